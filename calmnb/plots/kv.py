"""What a context costs: attention's time and bytes as it grows, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from calmnb.config import ModelConfig
from calmnb.errors import ConfigError
from calmnb.plots.costs import time_unit
from calmnb.plots.style import (
    DARK,
    LIGHT,
    TICK,
    CalmFigure,
    Theme,
    caption,
    duration,
    new_figure,
    plain,
    plain_axis,
    require_decode,
    spread,
    style_axes,
)
from calmnb.profile.kv import context_limits, device_memory, kv_milestones
from calmnb.profile.palette import STAGE_COLORS
from calmnb.profile.speed_of_light import RESERVE_BYTES

if TYPE_CHECKING:
    from calmnb.profile.device import Device
    from calmnb.profile.session import Session

__all__ = ["kv_cost", "kv_memory"]

_FELT = 0.1  # the growth of a token's time that a line marks


class _Line(NamedTuple):
    """One session: its name, colour, marker and KV table."""

    name: str
    color: str
    marker: str
    session: Session
    table: pd.DataFrame

    @property
    def felt_from(self) -> float:
        """Context from which a token takes a tenth longer; nan if it never does, or only beyond what was recorded."""
        if len(self.table) < 2:
            return float("nan")
        row = kv_milestones(self.session, [_FELT]).iloc[0]
        return float(row["kv_len"]) if row["source"] == "measured" else float("nan")


def kv_cost(what: Session | Sequence[Session], *, dark: bool = False) -> CalmFigure:
    """Draw what the KV cache costs as the context grows: time measured and predicted, and bytes up to the full context.

    Parameters
    ----------
    what
        A session with at least one decoded token, or up to four that differ in the storage of weights or cache.
    dark
        For dark pages.

    Returns
    -------
    Figure
        The dashed line is the cache's bytes over the bandwidth that the weights' stages reached in the same session: where
        the dots lie above it, attention reads its bytes less well than the matrices do. A dotted line marks the context
        from which a token takes a tenth longer than at the shortest one.
    """
    sessions = [what] if not isinstance(what, Sequence) else list(what)
    if not 1 <= len(sessions) <= 4:
        raise ConfigError(f"plots.kv_cost: {len(sessions)} sessions were given; it draws one to four")
    theme = DARK if dark else LIGHT
    lines = _lines(sessions, theme)
    note = caption(sessions[0], *_predictions(lines), *_milestones(lines), "bars: 20-80% of steps")
    if len(lines) > 1:
        note[1] = "; ".join(line.name for line in lines)
    figure = new_figure("What the KV cache costs as the context grows", note, theme)
    left, right = figure.subplots(1, 2)
    _times(left, lines, theme)
    _bytes(right, lines, theme)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(5))
        plain_axis(axes.xaxis)
        plain_axis(axes.yaxis)
    return figure


def _lines(sessions: Sequence[Session], theme: Theme) -> list[_Line]:
    looks = [(STAGE_COLORS["attention"], "o"), (theme.series, "s"), (STAGE_COLORS["matmul_ffn_up"], "D"), (theme.quiet, "^")]
    lines = []
    several = len({session.meta.get("dtype") for session in sessions}) > 1
    for session, (color, marker) in zip(sessions, looks, strict=False):
        require_decode(session, "kv_cost", declared=True)
        table = session.kv_cost()
        if not len(table):
            raise ConfigError("plots.kv_cost: the session has no attention rows; record with an engine that reports them")
        kv = f"KV {session.meta.get('kv_dtype', 'fp16')}"
        lines.append(_Line(f"{session.meta.get('dtype')}, {kv}" if several else kv, color, marker, session, table))
    return lines


def _predictions(lines: Sequence[_Line]) -> list[str]:
    rates = [plain(line.session.nonkv_gb_per_s()) for line in lines]
    return [f"prediction: KV bytes at {' / '.join(dict.fromkeys(rates))} GB/s, the weights' own rate here"]


def _milestones(lines: Sequence[_Line]) -> list[str]:
    felt = [(line.name, line.felt_from) for line in lines]
    known = [f"{float(f'{at:.2g}'):,.0f} tokens" + (f" ({name})" if len(lines) > 1 else "") for name, at in felt if at == at]
    return [f"dotted: a token takes {100 * _FELT:.0f}% longer from {', '.join(known)}"] if known else []


def _times(axes: Any, lines: Sequence[_Line], theme: Theme) -> None:
    unit, scale = time_unit(max(float(line.table["attention_ms"].max()) for line in lines))
    style_axes(axes, theme, x="context, tokens", y=f"attention, all layers, {unit} per token", grid="y")
    longest = max(float(line.table["kv_len"].max()) for line in lines)
    span, top = np.array([0.0, longest * 1.05]), 0.0
    one = len(lines) == 1
    for line in lines:
        x, y = line.table["kv_len"].to_numpy(float), line.table["attention_ms"].to_numpy(float) * scale
        low, high = (line.table[name].to_numpy(float) * scale for name in ("p20_ms", "p80_ms"))
        errors = np.maximum(np.stack([y - low, high - y]), 0)
        axes.errorbar(x, y, yerr=errors, fmt=line.marker, color=line.color, markersize=4.5, elinewidth=1,
                      label="measured" if one else f"{line.name}, measured")  # fmt: skip
        slope = float((line.table["predicted_ms"] / line.table["kv_len"]).median()) * scale
        if slope == slope:
            axes.plot(span, span * slope, color=theme.ink if one else line.color, linestyle="--", linewidth=1.4,
                      label="predicted from bytes" if one or line is lines[-1] else None)  # fmt: skip
        if line.felt_from == line.felt_from:
            axes.axvline(line.felt_from, ymax=0.55, color=line.color, linestyle=":", linewidth=1.2)
        top = max(top, float(y.max()), float(np.median(y + errors[1])), float(span[1] * slope) if slope == slope else 0.0)
    axes.set_xlim(*span)
    axes.set_ylim(0, top * (1.25 if one else 1.4))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", frameon=False, fontsize=TICK, labelcolor=theme.ink)


def _bytes(axes: Any, lines: Sequence[_Line], theme: Theme) -> None:
    """KV bytes a token reads: the exact line to the full context, the part measured so far, and the ends named."""
    style_axes(axes, theme, x="context, tokens", y="KV cache read per token, MB", grid="y")
    top, most, said = 0.0, 0.0, []
    for line in lines:
        session, table = line.session, line.table
        reached = float(table["kv_len"].max())
        per_token = float((table["kv_bytes"] / table["kv_len"]).max())
        full = float(max(session.meta.get("seq_len") or 0, reached))
        config = session.config
        window = config.sliding_window if config and config.sliding_window else np.inf
        x = np.linspace(0, full, 200)
        axes.plot(x, np.minimum(x, window) * per_token / 1e6, linestyle="--", linewidth=1.4,
                  color=theme.ink if len(lines) == 1 else line.color)  # fmt: skip
        axes.scatter(table["kv_len"], table["kv_bytes"] / 1e6, s=18, marker=line.marker, color=line.color, zorder=3)
        end = min(full, window) * per_token
        said += _ends(line, end, full, len(lines) > 1)
        if len(lines) == 1 and reached < 0.55 * full:
            at = (reached, min(reached, window) * per_token / 1e6)
            axes.annotate(
                "measured", at, xytext=(14, 6), textcoords="offset points", fontsize=TICK, color=line.color, va="center"
            )
        top, most = max(top, end), max(most, full)
    axes.text(0.04, 0.96, "\n".join(said), transform=axes.transAxes, ha="left", va="top", fontsize=TICK, color=theme.ink,
              linespacing=1.35)  # fmt: skip
    axes.set_xlim(0, most * 1.04)
    axes.set_ylim(0, top / 1e6 * (1.3 if len(lines) == 1 else 1.2 + 0.1 * len(said)))


def _ends(line: _Line, end: float, full: float, several: bool) -> list[str]:
    """What reading the full context means: megabytes, time, part of the weights."""
    session = line.session
    rate = session.nonkv_gb_per_s()
    decode = session.steps[session.steps["phase"] == "decode"]
    weights = float((decode["bytes_min"] - decode["kv_bytes"]).max())
    share = f"{100 * end / weights:.0f}% of the weights' {plain(weights / 1e6)} MB" if weights > 0 else ""
    if several:
        return [f"{line.name}: {plain(end / 1e6)} MB at {full:,.0f}" + (f", {share.split(' ')[0]} of weights" if share else "")]
    lines = [f"{plain(end / 1e6)} MB at {full:,.0f} tokens"]
    if rate == rate:
        lines.append(f"{duration(end / rate / 1e6)} predicted")
    return [*lines, share] if share else lines


def kv_memory(config: ModelConfig, device: str | Device | float, *, is_tied: bool = False, dark: bool = False) -> CalmFigure:
    """Draw the memory that a model takes against its context, for each storage, and where a GPU's memory ends.

    Parameters
    ----------
    config, device, is_tied
        As for `calmnb.profile.kv.context_limits`.
    dark
        For dark pages.

    Returns
    -------
    Figure
        Solid: fp16 KV cache; dashed: fp8. Right of the lines, the context that fits. The weights are what a line starts at.
    """
    theme = DARK if dark else LIGHT
    total = device_memory(device) / 2**30
    table = context_limits(config, device, is_tied=is_tied)
    name = f"{device:g} GiB" if isinstance(device, int | float) else getattr(device, "name", str(device))
    trained = config.max_seq_len
    note = [
        f"{config.arch}: {config.n_layers} layers, {config.n_kv_heads} KV heads of {config.head_dim}",
        "solid: fp16 KV cache, dashed: fp8",
        "with 500 MiB for everything else; computed, not measured",
        f"dotted: the {trained:,} tokens that the model is made for",
    ]
    figure = new_figure(f"Which context fits on {name} ({total:.4g} GiB)", note, theme, height=4.4)
    left, right = figure.subplots(1, 2, width_ratios=[5, 4])
    style_axes(left, theme, x="context, tokens", y="memory, GiB", grid="y")
    colors = {"fp16": STAGE_COLORS["matmul_qkv"], "fp8": STAGE_COLORS["matmul_ffn_up"], "gf4": STAGE_COLORS["attention"]}
    x = np.linspace(0, 1.15 * trained, 50)
    for row in table.to_dict("records"):
        y = (row["weights_bytes"] + RESERVE_BYTES + x * row["kv_bytes_per_token"]) / 2**30
        style = "-" if row["kv_dtype"] == "fp16" else "--"
        left.plot(x, y, style, color=colors[row["dtype"]], linewidth=1.5)
    left.axhline(total, color=theme.ink, linewidth=1.4)
    left.axvline(trained, color=theme.quiet, linewidth=1, linestyle=":")
    left.set_xlim(0, x[-1])
    left.set_ylim(0, max(total, left.get_ylim()[1]) * 1.12)
    _name_lines(left, table, colors, theme)
    left.annotate(f"{total:.4g} GiB", (0, total), xytext=(5, 4), textcoords="offset points", fontsize=TICK, color=theme.ink)
    _fitting(right, table, colors, theme)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(4))
        plain_axis(axes.xaxis)
    plain_axis(left.yaxis)
    return figure


def _name_lines(axes: Any, table: pd.DataFrame, colors: dict[str, str], theme: Theme) -> None:
    """Names at the lines' left ends, just below them, moved apart where the ends are close."""
    top = float(axes.get_ylim()[1])
    starts = table[table["kv_dtype"] == "fp16"]
    heights = [(weights + RESERVE_BYTES) / 2**30 / top - 0.03 for weights in starts["weights_bytes"]]
    for dtype, height in zip(starts["dtype"], spread(heights, 0.055, 0.03, 0.9), strict=True):
        axes.text(0.02, height, f"{dtype} weights", transform=axes.transAxes, va="center", fontsize=TICK, color=colors[dtype],
                  bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.4, "alpha": 0.75})  # fmt: skip


def _fitting(axes: Any, table: pd.DataFrame, colors: dict[str, str], theme: Theme) -> None:
    style_axes(axes, theme, x="context that fits, tokens", grid="x")
    names, most = [], max(int(table["context"].max()), 1)
    for i, row in enumerate(table.to_dict("records")):
        names.append(f"{row['dtype']}, KV {row['kv_dtype']}")
        hatch = {} if row["kv_dtype"] == "fp16" else {"hatch": "////", "edgecolor": theme.paper, "linewidth": 0}
        axes.barh(i, row["context"], height=0.66, color=colors[row["dtype"]], **hatch)
        text = f"{row['context']:,}" if row["context"] else "does not fit"
        axes.text(row["context"] + 0.02 * most, i, text, va="center", fontsize=TICK, color=theme.ink)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * most)
    axes.axvline(int(table["trained_context"].iloc[0]), color=theme.quiet, linewidth=1, linestyle=":")
