"""Waterfalls: from one session's step to another's, and from the physical limit to a session's own step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from matplotlib.ticker import StrMethodFormatter

from calmnb.engine.base import STAGES, Stage
from calmnb.plots.style import (
    DARK,
    LIGHT,
    NOTE,
    TICK,
    CalmFigure,
    Theme,
    caption,
    new_figure,
    reads_ahead,
    require_decode,
    style_axes,
)
from calmnb.profile.compare import MIN_STEPS
from calmnb.profile.compare_report import row_name
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.report import device_label
from calmnb.profile.settings import context_span, model_name
from calmnb.profile.waterfall import fit_streams
from calmnb.profile.waterfall import waterfall as waterfall_table

if TYPE_CHECKING:
    from calmnb.profile.compare import Comparison
    from calmnb.profile.session import PeakChoice, Session

__all__ = ["compare", "waterfall"]

_STEP, _PLAIN = "#6b7480", "#4d7ea8"
_MOST_ROWS = 14


class _Bar(NamedTuple):
    """One bar: where it starts and how long it is (microseconds), how sure, and the cells right of it."""

    name: str
    color: str
    start: float
    length: float
    cells: tuple[str, ...]
    interval: tuple[float, float] | None = None
    is_sure: bool = True
    is_total: bool = False


def compare(comparison: Comparison, *, dark: bool = False) -> CalmFigure:
    """Draw how a's step becomes b's: what got faster, what slower, and how sure that is.

    Parameters
    ----------
    comparison
        What `calmnb.compare` returned.
    dark
        For dark pages.

    Returns
    -------
    Figure
        One bar a row, which starts where the one above ended; to the left is faster. Whiskers are the differences'
        simultaneous intervals. Hatched bars show no difference. Of many rows the largest differences are drawn, and the
        others as one bar.
    """
    theme = DARK if dark else LIGHT
    scale, unit = _scale(max(comparison.total["time_us_a"], comparison.total["time_us_b"]))
    bars = _difference_bars(comparison, scale)
    total = comparison.total
    title = f"{_short(comparison.labels[0], 24)} → {_short(comparison.labels[1], 24)}: {_in_words(total)}"
    figure = new_figure(title, _comparison_caption(comparison), theme, height=2.0 + 0.36 * len(bars))
    axes = figure.subplots()
    style_axes(axes, theme, x=f"{unit} per {'token' if comparison.phase == 'decode' else 'step of the prompt'}", grid="x")
    _draw(axes, bars, ("a", "b", "change", "b/a", "verdict"), theme)
    return figure


def waterfall(
    session: Session, peak: PeakChoice = None, *, by: Literal["stage", "cause"] = "stage", dark: bool = False
) -> CalmFigure:
    """Draw how the least time that physics allows becomes the measured step.

    Parameters
    ----------
    session
        With at least one decoded token.
    peak
        "user", "measured", "datasheet" or GB/s; None for the first of these that the session has.
    by : {"stage", "cause"}
        What the time beyond the limit is split into; see `calmnb.profile.waterfall.waterfall`.
    dark
        For dark pages.

    Returns
    -------
    Figure
        First the bytes of the weights and of the KV cache at the peak; then the time beyond: each stage's, or that of each
        cause (ramp-up and tail of the kernels, reading below the peak, launch gaps ...). The sum is the measured step. A bar
        to the left means that a cache beat the peak.
    """
    require_decode(session, "waterfall")
    theme = DARK if dark else LIGHT
    table = waterfall_table(session, peak, by=by)
    step_us = float(table.loc[table["part"] == "step", "time_us"].iloc[0])
    limit_us = float(table.loc[table["kind"] == "limit", "time_us"].sum())
    scale, unit = _scale(float(table["time_us"].max()))
    digits = _digits(step_us * scale)
    bars = []
    for row in table.to_dict("records"):
        kind, length = str(row["kind"]), float(row["time_us"]) * scale
        name, color = (_CAUSES if by == "cause" else _PARTS)[str(row["part"])]
        cells = (_number(length, digits, "+" if kind == "excess" else "-"), f"{row['share_percent']:.1f}%")
        label = f"+ {name}" if kind == "excess" else name
        bars.append(_Bar(label, color, float(row["start_us"]) * scale, length, cells, is_total=kind == "total"))
    extra = [f"peak {session.peak(peak)}"]
    if by == "stage":
        extra.append("+ stage: its time beyond its own bytes at the peak")
    elif (table["part"] == "rate").any():
        extra.append(f"each weight kernel: {fit_streams(session)}")
    if (table["share_percent"] < -0.5).any():
        why = "or while the kernel before ran" if reads_ahead(session) else "or the peak was read in a busy moment"
        extra.append(f"to the left: read from a cache, {why}")
    note = caption(session, *extra, statistic="mean of the middle 60%")
    title = f"From the memory's limit to the measured step: {100 * limit_us / step_us:.0f}% of the speed of light"
    figure = new_figure(title, note, theme, height=2.0 + 0.36 * len(bars))
    axes = figure.subplots()
    style_axes(axes, theme, x=f"{unit} per token", grid="x")
    _draw(axes, bars, (unit, "of step"), theme, from_zero=True)
    return figure


_PARTS: dict[str, tuple[str, str]] = {
    "weights": ("weights at the peak", _PLAIN),
    "kv": ("KV cache at the peak", STAGE_COLORS["attention"]),
    "step": ("measured step", _STEP),
    "host": ("between steps", STAGE_COLORS["gap"]),
    "token": ("token to token", _STEP),
    **{str(stage): (STAGE_LABELS[stage], STAGE_COLORS[stage]) for stage in STAGES},
}

_CAUSES: dict[str, tuple[str, str]] = {
    **_PARTS,
    "rate": ("weights below the peak", STAGE_COLORS["matmul_ffn_up"]),
    "ramp": ("kernels' ramp-up and tail", STAGE_COLORS["matmul_qkv"]),
    "attention": ("attention beyond its bytes", STAGE_COLORS["attention"]),
    "small": ("embed, sample", STAGE_COLORS["sample"]),
    "gap": ("no kernel running", STAGE_COLORS["gap"]),
}


def _scale(longest_us: float) -> tuple[float, str]:
    return (1e-3, "ms") if longest_us >= 2000 else (1.0, "µs")


def _difference_bars(comparison: Comparison, scale: float) -> list[_Bar]:
    records: list[dict[str, Any]] = comparison.table.to_dict("records")  # type: ignore[assignment]
    sizes = sorted((abs(record["difference_us"]) for record in records), reverse=True)
    least = sizes[_MOST_ROWS - 1] if len(sizes) > _MOST_ROWS + 1 else -1.0
    total = comparison.total
    bars = [_Bar(_end_name(comparison, 0), _STEP, 0.0, total["time_us_a"] * scale, ("",) * 5, is_total=True)]
    digits = _digits(total["time_us_a"] * scale)
    at, rest, n_rest = total["time_us_a"] * scale, {"time_us_a": 0.0, "time_us_b": 0.0}, 0
    for record in records:
        if abs(record["difference_us"]) < least:
            rest = {key: value + record[key] for key, value in rest.items()}
            n_rest += 1
            continue
        length = record["difference_us"] * scale
        interval = None if math.isnan(record["low_us"]) else (record["low_us"] * scale, record["high_us"] * scale)
        name, color = _row_look(comparison, record)
        is_sure = record["verdict"] != "no difference shown"
        bars.append(_Bar(name, color, at, length, _cells(record, scale, digits), interval, is_sure))
        at += length
    if n_rest:
        length = (rest["time_us_b"] - rest["time_us_a"]) * scale
        times = (_number(rest[key] * scale, digits) for key in ("time_us_a", "time_us_b"))
        bars.append(_Bar(f"{n_rest} other rows", _STEP, at, length, (*times, _number(length, digits, "+"), "", "")))
    cells = _cells(total, scale, digits)
    return [*bars, _Bar(_end_name(comparison, 1), _STEP, 0.0, total["time_us_b"] * scale, cells, is_total=True)]


def _end_name(comparison: Comparison, side: int) -> str:
    name, label = "ab"[side], comparison.labels[side]
    return name if label == name else f"{name}: {_short(label, 20)}"


def _cells(record: dict[str, Any], scale: float, digits: int) -> tuple[str, ...]:
    verdict = {"no difference shown": "unclear"}.get(record["verdict"], record["verdict"])
    ratio = "" if math.isnan(record["ratio"]) else f"{record['ratio']:.2f}"
    times = (_number(record[key] * scale, digits) for key in ("time_us_a", "time_us_b"))
    return (*times, _number(record["difference_us"] * scale, digits, "+"), ratio, verdict)


def _digits(step: float) -> int:
    """Decimals that give the step four digits; its parts get the same, so that columns line up."""
    return max(0, 3 - math.floor(math.log10(step))) if step > 0 else 0


def _number(value: float, digits: int, sign: str = "-") -> str:
    if round(abs(value), digits) == 0:
        return "0"
    return f"{value:{sign},.{digits}f}"


def _row_look(comparison: Comparison, record: dict[str, Any]) -> tuple[str, str]:
    """Name and colour of a row."""
    name = _short(row_name(comparison, record), 30)
    if "stage" not in comparison.by:
        return name, _PLAIN
    stage: Stage = record["stage"]
    return STAGE_LABELS[stage] if comparison.by == ("stage",) else name, STAGE_COLORS[stage]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _in_words(total: dict[str, Any]) -> str:
    ratio = total["ratio"]
    if total["verdict"] == "no difference shown" or not ratio > 0:
        return "no difference shown"
    if total["verdict"] == "faster":
        return f"{1 / ratio:.2f} times as fast" if ratio < 0.9 else f"{100 * (1 - ratio):.2g}% less time"
    return f"{ratio:.2f} times as long" if ratio > 1.1 else f"{100 * (ratio - 1):.2g}% more time"


def _comparison_caption(comparison: Comparison) -> list[str]:
    """Every difference that a reader must know, then what is the same, then how it was made."""
    meta, differing = comparison.a.meta, {name for name, _, _ in comparison.settings}
    same = [("model", model_name(meta)), ("weights", meta.get("dtype")), ("device", device_label(meta))]
    parts = [str(value) for name, value in same if name not in differing and value]
    if "KV cache" not in differing and meta.get("kv_dtype"):
        parts.append(f"KV {meta['kv_dtype']}")
    spans = [context_span(session, comparison.phase) for session in (comparison.a, comparison.b)]
    parts.append(f"context {' / '.join(dict.fromkeys(spans))}")
    sources = [str(session.meta.get("time_source", "unknown")) for session in (comparison.a, comparison.b)]
    parts.append(f"times: {' / '.join(dict.fromkeys(sources))}")
    shown = [row for row in comparison.settings if row[0] not in ("context", "times")]
    parts += [f"{name}: {_short(a, 40)} / {_short(b, 40)}" for name, a, b in shown[:6]]
    if len(shown) > 6:
        parts.append(f"{len(shown) - 6} more settings differ")
    parts += list(comparison.notes)
    steps = " / ".join(f"{n}" for n in comparison.steps)
    parts.append(f"means of the middle 60% of {steps} {comparison.phase} steps")
    if min(comparison.steps) < MIN_STEPS:
        return parts
    noise = "runs" if comparison.by_runs else "steps"
    whiskers = f"whiskers: {100 * comparison.confidence:g}% for all rows together, noise between {noise}"
    return [*parts, whiskers, "hatched, unclear: no difference shown"]


def _draw(axes: Any, bars: list[_Bar], titles: tuple[str, ...], theme: Theme, *, from_zero: bool = False) -> None:
    """Bars from top to bottom with thin lines that carry each end to the next start, and the columns right of them."""
    low, high, is_cut = _limits(bars, from_zero)
    if is_cut:
        axes.set_xlabel(f"{axes.get_xlabel()} (the axis does not start at 0)")
    axes.set_xlim(low, high)
    axes.set_ylim(len(bars) - 0.45, -1.05)
    for i, bar in enumerate(bars):
        start = max(bar.start, low) if bar.is_total else bar.start
        length = bar.start + bar.length - start
        style: dict[str, Any] = {"color": bar.color}
        if not bar.is_sure:
            style = {"facecolor": theme.paper, "edgecolor": bar.color, "hatch": "//////", "linewidth": 0.8}
        axes.barh(i, length, left=start, height=0.66, **style)
        end = bar.start + bar.length
        if bar.interval:
            whisker = [bar.start + side for side in bar.interval]
            axes.plot(whisker, [i, i], color=theme.ink, linewidth=1.2, zorder=3, solid_capstyle="butt")
        if i + 1 < len(bars) and not (bar.is_total and bars[i + 1].is_total):
            axes.plot([end, end], [i - 0.33, i + 1.33], color=theme.quiet, linewidth=0.7, zorder=1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.is_total else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))  # a cut axis needs more digits than `plain` gives
    _columns(axes, bars, titles, theme)


def _limits(bars: list[_Bar], from_zero: bool) -> tuple[float, float, bool]:
    """Limits of the axis, and whether its start is cut off: small changes of a long step would not be seen from zero."""
    ends = [bar.start + side for bar in bars if not bar.is_total for side in (0.0, bar.length, *(bar.interval or ()))]
    ends += [bar.length for bar in bars if bar.is_total]
    least, most = min(ends), max(ends)
    span = most - least
    if from_zero or span > 0.35 * most:
        return min(0.0, least - 0.02 * most), most * 1.03, False
    span = max(span, 0.02 * most)
    return max(0.0, least - 0.45 * span), most + 0.06 * span, least - 0.45 * span > 0


def _columns(axes: Any, bars: list[_Bar], titles: tuple[str, ...], theme: Theme) -> None:
    """Cells right of the axes, at distances in points: the layout then knows how much room they need."""
    where = axes.get_yaxis_transform()
    x = 4.0
    for j, title in enumerate(titles):
        x += 6.0 * max(len(title), *(len(bar.cells[j]) for bar in bars)) + 9

        def put(row: float, text: str, at: float = x, **style: Any) -> None:
            style |= {"ha": "right", "va": "center", "annotation_clip": False}
            axes.annotate(text, (1.0, row), xycoords=where, xytext=(at, 0), textcoords="offset points", **style)

        put(-0.75, title, fontsize=NOTE, color=theme.quiet)
        for i, bar in enumerate(bars):
            if bar.cells[j]:
                put(i, bar.cells[j], fontsize=TICK, color=theme.ink, fontweight="bold" if bar.is_total else "normal")
