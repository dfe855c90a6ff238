"""Achieved against possible: the bandwidth roofline and the arithmetic-intensity roofline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from matplotlib.ticker import LogLocator

from calmnb.engine.base import Stage
from calmnb.errors import ConfigError
from calmnb.plots.style import (
    DARK,
    LIGHT,
    NOTE,
    TICK,
    CalmFigure,
    Theme,
    caption,
    ink_on,
    new_figure,
    peaks,
    plain,
    plain_axis,
    reads_ahead,
    require_decode,
    spread,
    style_axes,
)
from calmnb.profile.device import find_device
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.tables import selected_steps

if TYPE_CHECKING:
    from calmnb.profile.session import Peak, PeakChoice, Session

__all__ = ["cache_note", "intensity_roofline", "roofline"]

_STEP = "#6b7480"


def roofline(
    session: Session, peak: PeakChoice = None, *, by: Literal["stage", "kernel"] = "stage", dark: bool = False
) -> CalmFigure:
    """Draw the bandwidth that each stage or kernel and the whole step reached, against the peak lines.

    Parameters
    ----------
    session
        With at least one decoded token.
    peak
        "user", "measured", "datasheet" or GB/s for one line; None for every peak that the session has.
    by : {"stage", "kernel"}
        A bar each.
    dark
        For dark pages.

    Returns
    -------
    Figure
        Bars are medians, whiskers the 20th to 80th percentile of the steps. A bar beyond every peak is labelled, not
        clipped: what it read came from a cache, or was read while the kernel before still ran, or the peak was measured
        while other work ran. Where a whole step's bytes
        fit in the device's last-level cache, the caption says so: memory's peak is then no limit.

    Raises
    ------
    ConfigError
        If the session has no decoded token, or `by` is not accepted.
    """
    if by not in ("stage", "kernel"):
        raise ConfigError(f"plots.roofline: by is {by!r}; accepted are 'stage' and 'kernel'")
    require_decode(session, "roofline")
    theme = DARK if dark else LIGHT
    lines = peaks(session, peak)
    rows = _rates(session, by)
    lined = "; ".join(f"peak {line}" for line in lines) or "no peak known"
    ahead = reads_ahead(session)
    beyond = any(row.rate > line.gb_per_s for row in rows for line in lines)
    why_beyond = "beyond a peak: began to read while the kernel before it ran" if ahead and beyond else ""
    note = caption(session, lined, cache_note(session), "whiskers: 20-80% of steps", why_beyond)
    title = f"Memory bandwidth reached, {by} by {by}"
    figure = new_figure(title, note, theme, height=1.9 + 0.42 * len(rows))
    axes = figure.subplots()
    style_axes(axes, theme, x="GB/s (1 GB = 10⁹ bytes that must move)", grid="x")
    top = max([line.gb_per_s for line in lines] + [row.high for row in rows])
    axes.set_xlim(0, top * 1.04)
    axes.set_ylim(len(rows) - 0.45, -1.25 if len(lines) > 1 else -0.95)
    reference = session.peak(peak)
    for i, row in enumerate(rows):
        axes.barh(i, row.rate, height=0.68, color=row.color)
        axes.plot([row.low, row.high], [i, i], color=theme.ink, linewidth=1.2, solid_capstyle="butt")
        beaten = [line.kind for line in lines if row.rate > line.gb_per_s]
        if beaten and len(beaten) == len(lines):
            # A datasheet cannot be beaten by memory. Our own reading can, if other work disturbed it.
            why = "read from a cache" if "datasheet" in beaten else "cached, or the peak was read in a busy moment"
            why = "read ahead, or from a cache" if ahead else why
            axes.text(top * 0.012, i, f"beyond the peak: {why}", va="center", fontsize=TICK, color=ink_on(row.color))
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    plain_axis(axes.xaxis)
    _number_columns(axes, rows, reference, theme)
    _peak_lines(axes, lines, theme, top)
    return figure


class _Rate(NamedTuple):
    """One bar: GB/s as median, 20th and 80th percentile, and the stage's share of the time in percent."""

    name: str
    color: str
    rate: float
    low: float
    high: float
    share: float


def _number_columns(axes: Any, rows: list[_Rate], reference: Peak | None, theme: Theme) -> None:
    """Numbers right of the bars, in columns, so that they cross no line."""
    columns = [("GB/s", [plain(row.rate) for row in rows])]
    if reference:
        columns.append(("of peak", [f"{100 * row.rate / reference.gb_per_s:.0f}%" for row in rows]))
    columns.append(("of time", [f"{row.share:.0f}%" for row in rows]))
    where = axes.get_yaxis_transform()
    for at, (title, cells) in enumerate(columns):
        x = 1.085 + 0.105 * at
        axes.text(x, -0.72, title, transform=where, ha="right", va="center", fontsize=NOTE, color=theme.quiet)
        for i, cell in enumerate(cells):
            axes.text(x, i, cell, transform=where, ha="right", va="center", fontsize=TICK, color=theme.ink,
                      fontweight="bold" if i == len(cells) - 1 else "normal")  # fmt: skip


def cache_note(session: Session) -> str:
    """What a caption says of steps that the last-level cache can hold, whole or in good part; else an empty string."""
    device = find_device(str(session.meta.get("device", "")))
    moved = float(selected_steps(session.steps, "decode")["bytes_min"].median())
    if device is None or not device.l2_mb or not moved > 0:
        return ""
    l2 = device.l2_mb * 2**20
    if moved <= l2:
        return f"a step's {plain(moved / 1e6)} MB fit in the {device.l2_mb:g} MiB L2 cache: memory's peak is no limit here"
    if moved <= 4 * l2:
        return (
            f"up to {100 * l2 / moved:.0f}% of a step's {plain(moved / 1e6)} MB may stay in the {device.l2_mb:g} MiB L2 cache"
        )
    return ""


def _rates(session: Session, by: str = "stage") -> list[_Rate]:
    """Label, colour, median, 20th and 80th percentile GB/s, share of time; the whole step last."""
    events, chosen = session.events, selected_steps(session.steps, "decode")
    rows = events[events["step"].isin(chosen["step"]) & (events["bytes_min"] > 0)]
    keys = ["stage"] if by == "stage" else ["stage", "kernel"]
    each = rows.groupby([*keys, "step"], observed=True)[["bytes_min", "exclusive_s"]].sum()
    total = float(chosen["duration_s"].sum())
    out = []
    for key in each.groupby(level=keys, observed=True).size().index:
        part = each.loc[key]
        share = 100 * float(part["exclusive_s"].sum()) / total
        if float(part["bytes_min"].sum()) < 0.001 * float(chosen["bytes_min"].sum()):
            continue  # the embedding row: a few hundred bytes
        rate = part["bytes_min"] / part["exclusive_s"].where(part["exclusive_s"] > 0) / 1e9
        if rate.notna().any():
            name: Stage = key if by == "stage" else key[0]
            label = STAGE_LABELS[name] if by == "stage" else f"{key[1]}\n({STAGE_LABELS[name]})"
            out.append(_rate(label, STAGE_COLORS[name], rate, share))
    rate = chosen["bytes_min"] / chosen["duration_s"].where(chosen["duration_s"] > 0) / 1e9
    return [*out, _rate("whole step", _STEP, rate, 100.0)]


def _rate(name: str, color: str, rates: Any, share: float) -> _Rate:
    return _Rate(name, color, float(rates.median()), float(rates.quantile(0.2)), float(rates.quantile(0.8)), share)


def _peak_lines(axes: Any, lines: list[Peak], theme: Theme, top: float) -> None:
    """Vertical lines, named at their upper end; names of several stand one above the other."""
    for i, line in enumerate(sorted(lines, key=lambda line: line.gb_per_s)):
        color = theme.datasheet if line.kind == "datasheet" else theme.measured
        height = -0.66 - 0.4 * (i if len(lines) > 1 else 0)
        axes.axvline(line.gb_per_s, color=color, linewidth=1.4, linestyle="--" if line.kind == "datasheet" else "-")
        left = line.gb_per_s > 0.5 * top
        axes.text(
            line.gb_per_s + (-1 if left else 1) * top * 0.01, height, f"{line.kind} peak {plain(line.gb_per_s)}",
            ha="right" if left else "left", va="center", fontsize=TICK, color=color,
            bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip


def intensity_roofline(session: Session, peak: PeakChoice = None, *, dark: bool = False) -> CalmFigure:
    """Draw FLOP/s over FLOP/byte on log axes, with the memory slope and, where known, the arithmetic roof.

    Parameters and return value as for `roofline`. A mark's area follows its share of the step's time; the diamond is
    the prompt, whose tokens share each read of the weights.
    """
    require_decode(session, "intensity_roofline", declared=True)
    theme = DARK if dark else LIGHT
    lines = peaks(session, peak)
    points = _points(session)
    device = find_device(str(session.meta.get("device", "")))
    roofs = [("fp32", device.fp32_tflops)] if device else []
    if device and device.tensor_tflops:
        roofs.append(("fp16 tensor cores", device.tensor_tflops))
    lined = "; ".join(f"peak {line}" for line in lines) or "no peak known"
    note = caption(session, lined, cache_note(session), "area: share of time")
    figure = new_figure("Arithmetic intensity: how much work each byte brings", note, theme, height=5.2)
    axes = figure.subplots()
    style_axes(axes, theme, x="arithmetic intensity, FLOP per byte", y="achieved, GFLOP/s", grid="both")
    axes.set_xscale("log")
    axes.set_yscale("log")
    x_low = min(0.5, 0.5 * min(x for *_, x, _, _ in points))
    x_high = max([16.0, *(2.5 * x for *_, x, _, _ in points)] + [3e3 * roof / lines[-1].gb_per_s for _, roof in roofs if lines])
    y_low = 0.4 * min(y for *_, y, _ in points)
    y_high = 2.5 * max([y for *_, y, _ in points] + [1e3 * roof for _, roof in roofs])
    if not roofs and lines:
        y_high = max(y_high, 4 * max(line.gb_per_s for line in lines))
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    for axis, low, high in ((axes.xaxis, x_low, x_high), (axes.yaxis, y_low, y_high)):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        plain_axis(axis)
    _roofs(axes, lines, roofs, theme)
    _mark(axes, points, theme)
    return figure


def _points(session: Session) -> list[tuple[str, str, str, float, float, float]]:
    """Label, colour, marker, FLOP/byte, GFLOP/s and share of the step, for stages, the step and the prompt."""
    out: list[tuple[str, str, str, float, float, float]] = []
    for record in session.stages().to_dict("records"):
        stage: Stage = record["stage"]
        if record["flops"] > 0 and record["bytes_min"] > 0 and record["time_us"] > 0:
            rate = record["flops"] / record["time_us"] / 1e3
            out.append(
                (STAGE_LABELS[stage], STAGE_COLORS[stage], "o", record["flop_per_byte"], rate, record["share_percent"] / 100)
            )  # fmt: skip
    for phase, label, marker in (("decode", "whole step", "s"), ("prefill", "prompt", "D")):
        steps = selected_steps(session.steps, phase)  # type: ignore[arg-type]
        moved, flops = float(steps["bytes_min"].sum()), float(steps["flops"].sum())
        rate = float((steps["flops"] / steps["duration_s"].where(steps["duration_s"] > 0)).median()) / 1e9
        if moved > 0 and flops > 0 and rate > 0:
            each = float(steps.groupby("run")["n_tokens"].sum().median())
            text = label if phase == "decode" else f"{label}, {each:.0f} tokens"
            out.append((text, _STEP, marker, flops / moved, rate, 0.25))
    return out


def _roofs(axes: Any, lines: list[Peak], roofs: list[tuple[str, float]], theme: Theme) -> None:
    """The slanted memory roofs with names along them, and the flat arithmetic ones."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    top = 1e3 * max((roof for _, roof in roofs), default=math.inf)
    for i, line in enumerate(sorted(lines, key=lambda line: -line.gb_per_s)):
        color = theme.datasheet if line.kind == "datasheet" else theme.measured
        x = np.geomspace(x0, x1, 256)
        y = np.minimum(x * line.gb_per_s, top)
        axes.plot(x, y, color=color, linewidth=1.4, linestyle="--" if line.kind == "datasheet" else "-")
        first, last = max(x0, y0 / line.gb_per_s), min(x1, min(y1, top) / line.gb_per_s)
        at = first * (last / first) ** (0.66 if i == 0 else 0.72)
        # On log axes the line y = k x runs in the direction (1, k) of the data, wherever it is.
        away = (y1 / y0) ** (0.012 if i == 0 else -0.012)
        axes.text(
            at, at * line.gb_per_s * away, f"{line.kind} peak {plain(line.gb_per_s)} GB/s", fontsize=TICK, color=color,
            rotation=math.degrees(math.atan(line.gb_per_s)), rotation_mode="anchor", transform_rotates_text=True,
            ha="center", va="bottom" if i == 0 else "top",
        )  # fmt: skip
    for name, roof in roofs:
        axes.axhline(1e3 * roof, color=theme.datasheet, linewidth=1.1, linestyle=":")
        axes.text(
            x0 * (x1 / x0) ** 0.01, 1e3 * roof * (y1 / y0) ** 0.008, f"{name} {plain(roof)} TFLOP/s (datasheet)",
            fontsize=NOTE, color=theme.quiet, va="bottom",
        )  # fmt: skip


def _mark(axes: Any, points: list[tuple[str, str, str, float, float, float]], theme: Theme) -> None:
    """Points, with labels to their right that are moved apart and joined by a thin line."""
    figure = axes.figure
    (y0, y1), (x0, x1) = axes.get_ylim(), axes.get_xlim()
    gap = 13 / 72 / (figure.get_figheight() * 0.68)  # a line of text, as a fraction of the axes' height
    heights = [math.log(y / y0) / math.log(y1 / y0) for *_, y, _ in points]
    columns: list[list[int]] = []  # points so near one another that a label of one would cover the other
    for i in sorted(range(len(points)), key=lambda i: points[i][3]):
        if not columns or points[i][3] > points[columns[-1][0]][3] * (x1 / x0) ** 0.24:
            columns.append([])
        columns[-1].append(i)
    for members in columns:
        right = max(points[i][3] for i in members) * (x1 / x0) ** 0.035
        # Labels go down from the points: above them runs the roof.
        high = max(max(heights[i] for i in members), 0.02 + gap * len(members))
        placed = spread([heights[i] for i in members], gap, 0.02, high)
        for i, height in zip(members, placed, strict=True):
            label, color, marker, x, y, share = points[i]
            hollow = marker == "s"
            axes.scatter([x], [y], s=30 + 500 * share, marker=marker, zorder=3 + hollow, linewidths=1.5 if hollow else 0.8,
                         facecolors="none" if hollow else color, edgecolors=theme.ink if hollow else theme.paper)  # fmt: skip
            at = y0 * (y1 / y0) ** height
            axes.plot([x, right], [y, at], color=theme.quiet, linewidth=0.6, zorder=2)
            axes.text(right * (x1 / x0) ** 0.006, at, f"{label}  {plain(y)}", va="center", fontsize=TICK, color=theme.ink,
                      zorder=4, bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.6, "alpha": 0.8})  # fmt: skip
