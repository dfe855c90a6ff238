"""Where the time goes: per layer, over position, and beside the physical limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calmnb.engine.base import STAGES, Stage
from calmnb.errors import ConfigError
from calmnb.plots.style import (
    DARK,
    LABEL,
    LIGHT,
    NOTE,
    TICK,
    CalmFigure,
    Theme,
    caption,
    duration,
    ink_on,
    new_figure,
    peaks,
    plain,
    plain_axis,
    require_decode,
    stage_key,
    style_axes,
)
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.report import decode_summary, device_label
from calmnb.profile.speed_of_light import SpeedOfLight
from calmnb.profile.speed_of_light import speed_of_light as limit_of

if TYPE_CHECKING:
    from calmnb.profile.session import PeakChoice, Session

_Bar = tuple[str, list[tuple[Stage, float]], float]

__all__ = ["latency", "layers", "speed_of_light", "time_unit"]


def layers(session: Session, *, dark: bool = False) -> CalmFigure:
    """Draw the time of each layer, stacked by stage, and beside it what happens once a token.

    Parameters
    ----------
    session
        With at least one decoded token.
    dark
        For dark pages.

    Returns
    -------
    Figure
        Medians of exclusive times. The two panels have scales of their own.
    """
    require_decode(session, "layers")
    theme = DARK if dark else LIGHT
    table = session.layers()
    inside, outside = table[table["layer"] >= 0], table[table["layer"] < 0]
    whole = float(inside.groupby("layer")["time_us"].sum().median())
    title = f"Time per layer: {plain(whole)} µs (median of {inside['layer'].nunique()} layers)" if len(inside) else "No layers"
    figure = new_figure(title, caption(session), theme, height=4.8, key=True)
    left, right = figure.subplots(1, 2, width_ratios=[7, 1.0])
    style_axes(left, theme, x="layer", y="time in a decode step, µs", grid="y")
    grid = inside.pivot(index="layer", columns="stage", values="time_us").fillna(0.0)
    base = np.zeros(len(grid))
    for stage in [stage for stage in STAGES if stage in grid.columns]:
        values = grid[stage].to_numpy(float)
        left.bar(grid.index, values, bottom=base, width=0.86, color=STAGE_COLORS[stage], linewidth=0)
        base += values
    left.set_xlim(-0.7, (len(grid) or 1) - 0.3)
    left.set_ylim(0, max(float(base.max(initial=0.0)), 1e-9) * 1.06)
    left.xaxis.get_major_locator().set_params(integer=True)
    plain_axis(left.yaxis)
    style_axes(right, theme, x="once a token", y="µs (own scale)", grid="y")
    right.yaxis.set_label_position("right")
    right.yaxis.tick_right()
    right.spines["left"].set_visible(False)
    right.spines["right"].set_visible(True)
    right.spines["right"].set_color(theme.quiet)
    total = 0.0
    for record in outside.to_dict("records"):
        stage = record["stage"]
        right.bar([0], [record["time_us"]], bottom=total, width=0.8, color=STAGE_COLORS[stage], linewidth=0)
        total += record["time_us"]
    right.set_xticks([])
    right.set_xlim(-0.6, 0.6)
    right.set_ylim(0, max(total, 1e-9) * 1.06)
    plain_axis(right.yaxis)
    shares = table.groupby("stage", observed=True)["share_percent"].sum()
    stage_key(figure, [(stage, float(shares[stage])) for stage in STAGES if stage in shares.index], theme)
    return figure


def latency(session: Session, *, dark: bool = False) -> CalmFigure:
    """Draw the time of each token over its position, with the line that its bytes predict.

    Parameters and return value as for `layers`. The line is the step's bytes over the bandwidth that the weights'
    stages reached in this session, plus the median time of what moves no bytes. Tokens beyond the axis are counted
    at its upper edge.
    """
    require_decode(session, "latency")
    theme = DARK if dark else LIGHT
    table = session.tokens()
    settled = table[~table["warmup"]] if not table["warmup"].all() else table
    warm = table.drop(settled.index)
    numbers = decode_summary(session)
    rate = session.nonkv_gb_per_s()
    figure = new_figure(
        f"Time per token: {duration(numbers['time_ms'])}, {plain(numbers['tok_per_s'])} tok/s (median)",
        caption(session, f"line: bytes at {plain(rate)} GB/s, the weights' own rate here" if rate == rate else ""),
        theme,
    )
    axes = figure.subplots()
    style_axes(axes, theme, x="position in the context, tokens", y="time per token, ms", grid="y")
    x, y = settled["pos"].to_numpy(float), settled["time_ms"].to_numpy(float)
    high = max(float(np.quantile(y, 0.99)) * 1.25, float(np.median(y)) * 1.5)
    axes.set_ylim(0, high)
    size = 14 if len(y) < 400 else 6
    shown = y <= high * 0.97
    axes.scatter(x[shown], y[shown], s=size, color=theme.series, alpha=0.55, linewidths=0, label="one token")
    seen = warm[warm["time_ms"] <= high * 0.97]
    axes.scatter(seen["pos"], seen["time_ms"], s=22, facecolors="none", edgecolors=theme.quiet, linewidths=1, label="warm-up")
    beyond = np.concatenate([x[~shown], warm["pos"][warm["time_ms"] > high * 0.97].to_numpy(float)])
    if len(beyond):
        axes.scatter(beyond, np.full(len(beyond), high * 0.985), marker="^", s=26, color=STAGE_COLORS["attention"], zorder=3)
        worst = float(table["time_ms"].max())
        text = f"{len(beyond)} slower than shown, up to {plain(worst)} ms" + (" (warm-up included)" if len(warm) else "")
        axes.text(0.99, 0.93, text, transform=axes.transAxes, ha="right", va="top", fontsize=TICK, color=theme.quiet)
    ends = _line_ends(x, y, theme, axes)
    if rate == rate:
        fixed = float((settled["time_ms"] - settled["bytes_min"] / rate / 1e6).median())
        order = np.argsort(x)
        predicted = settled["bytes_min"].to_numpy(float) / rate / 1e6 + fixed
        axes.plot(x[order], predicted[order], color=theme.ink, linewidth=1.4, linestyle="--", label="predicted from bytes")
    axes.set_xlim(*ends)
    plain_axis(axes.yaxis)
    plain_axis(axes.xaxis)
    second = axes.secondary_yaxis("right", functions=(_inverse, _inverse))
    second.set_ylabel("tok/s", fontsize=LABEL, color=theme.ink)
    second.tick_params(colors=theme.ink, labelsize=TICK, width=0.8)
    second.spines["right"].set_color(theme.quiet)
    middle = numbers["tok_per_s"]
    second.set_yticks(_rate_ticks(1e3 / high, middle))
    plain_axis(second.yaxis)
    axes.legend(loc="lower left", frameon=False, fontsize=TICK, labelcolor=theme.ink, ncols=4, handletextpad=0.4)
    return figure


def _inverse(value: Any) -> Any:
    """Milliseconds to tokens a second, and back."""
    return 1e3 / np.maximum(value, 1e-9)


def _rate_ticks(slowest: float, typical: float) -> list[float]:
    """Round rates between the slowest the axis shows and about three times the typical one."""
    steps = [m * 10.0**e for e in range(-3, 6) for m in (1, 1.5, 2, 3, 5, 7)]
    return [rate for rate in steps if slowest * 1.02 <= rate <= 2.2 * typical]


def _line_ends(x: Any, y: Any, theme: Theme, axes: Any) -> tuple[float, float]:
    """Rolling median over the tokens, and the x limits."""
    order = np.argsort(x, kind="stable")
    window = max(5, len(x) // 40) | 1
    if len(x) >= 3 * window:
        views = np.lib.stride_tricks.sliding_window_view(y[order], window)
        middle = x[order][window // 2 : window // 2 + len(views)]
        axes.plot(middle, np.median(views, axis=1), color=theme.series, lw=1.8, label=f"median of {window}")
    margin = max(1.0, 0.02 * float(x.max() - x.min()))
    return max(0.0, float(x.min()) - margin), float(x.max()) + margin


def time_unit(longest_ms: float) -> tuple[str, float]:
    """Unit of a time axis that reaches `longest_ms`, and how many of it a millisecond has."""
    return ("ms", 1.0) if longest_ms >= 1 else ("µs", 1e3)


def speed_of_light(
    what: Session | SpeedOfLight | Sequence[SpeedOfLight], peak: PeakChoice = None, *, dark: bool = False
) -> CalmFigure:
    """Draw the least time of a token by stage; for a session, the measured one beside it.

    Parameters
    ----------
    what
        A session (compared with its own limit), or one or several results of `calmnb.profile.speed_of_light`.
    peak
        For a session: which bandwidth the limit is computed with.
    dark
        For dark pages.

    Returns
    -------
    Figure

    Raises
    ------
    ConfigError
        If nothing was given, or the session lacks a peak, the model's sizes or a decoded token.
    """
    theme = DARK if dark else LIGHT
    if isinstance(what, SpeedOfLight):
        what = [what]
    if isinstance(what, Sequence):
        if not what:
            raise ConfigError("plots.speed_of_light: nothing was given; pass a session or results of speed_of_light()")
        bars = [(f"{sol.device}\n{sol.dtype}, context {sol.kv_len:,}", _limit_parts(sol), sol.tok_per_s) for sol in what]
        rates = (f"{sol.device}: {plain(sol.gb_per_s)} GB/s ({sol.peak_kind}), KV {sol.kv_dtype}" for sol in what)
        note = list(dict.fromkeys(rates))
        title = "The physical limit: least time of one token, by stage"
    else:
        bars, note, title = _session_bars(what, peak)
    figure = new_figure(title, note, theme, height=1.95 + 0.72 * len(bars), key=True)
    axes = figure.subplots()
    unit, scale = time_unit(max(sum(ms for _, ms in parts) for _, parts, _ in bars))
    bars = [(name, [(stage, ms * scale) for stage, ms in parts], rate) for name, parts, rate in bars]
    longest = max(sum(time for _, time in parts) for _, parts, _ in bars)
    style_axes(axes, theme, x=f"time per token, {unit}", grid="x")
    for i, (_, parts, rate) in enumerate(bars):
        at = 0.0
        for stage, time in parts:
            axes.barh(i, time, left=at, height=0.62, color=STAGE_COLORS[stage], edgecolor=theme.paper, linewidth=0.6)
            # About 5.4 pixels a character, on some 620 for an axis a fifth longer than the longest bar.
            if 620 * time / (1.2 * longest) > 5.4 * len(STAGE_LABELS[stage]) + 4:
                axes.text(at + time / 2, i, f"{STAGE_LABELS[stage]}\n{plain(time)}", ha="center", va="center", fontsize=NOTE,
                          color=ink_on(STAGE_COLORS[stage]), linespacing=1.15)  # fmt: skip
            at += time
        text = f"{duration(at / scale)}\n{plain(rate)} tok/s"
        axes.text(at + 0.012 * longest, i, text, va="center", fontsize=TICK, color=theme.ink,
                  linespacing=1.25)  # fmt: skip
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.2)
    plain_axis(axes.xaxis)
    last = dict(bars[-1][1])
    total = sum(last.values())
    alone = len(bars) == 1 or not isinstance(what, Sequence)  # shares of one bar; several have shares of their own
    stage_key(figure, [(stage, 100 * last[stage] / total if alone else None) for stage in STAGES if stage in last], theme)
    return figure


def _limit_parts(limit: SpeedOfLight) -> list[tuple[Stage, float]]:
    return [(stage.stage, stage.seconds * 1e3) for stage in limit.stages]


def _session_bars(session: Session, peak: PeakChoice) -> tuple[list[_Bar], list[str], str]:
    """Bars, caption and title: the limit above, what was measured below."""
    require_decode(session, "speed_of_light")
    line, config = peaks(session, peak)[:1], session.config
    if not line or config is None:
        raise ConfigError("plots.speed_of_light: the session lacks a peak or the model's sizes; pass peak= in GB/s")
    numbers = decode_summary(session)
    middle = round((numbers["kv_len_first"] + numbers["kv_len_last"]) / 2)
    kv_dtype = session.meta.get("kv_dtype", "fp16")
    limit = limit_of(config, line[0], kv_len=middle, kv_dtype=kv_dtype)
    table = session.stages()
    measured = [(record["stage"], record["share_percent"] / 100 * numbers["time_ms"]) for record in table.to_dict("records")]
    bars = [
        ("limit", _limit_parts(limit), limit.tok_per_s),
        ("measured", measured, numbers["tok_per_s"]),
    ]
    title = f"{100 * limit.latency_s * 1e3 / numbers['time_ms']:.0f}% of the speed of light on {device_label(session.meta)}"
    return bars, caption(session, f"limit: bytes at peak {line[0]}, context {middle}"), title
