"""Figures of the lesson ``08_one_kernel``: GB/s by version, and two rooflines, of bytes and of instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator

from calmnb.config import DTYPE_BITS
from calmnb.errors import ConfigError
from calmnb.plots.rooflines import _mark
from calmnb.plots.style import (
    DARK,
    LIGHT,
    NOTE,
    TICK,
    CalmFigure,
    Theme,
    new_figure,
    plain,
    plain_axis,
    style_axes,
)
from calmnb.profile.device import find_device
from calmnb.profile.session import Peak

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["instruction_roofline", "version_bars", "version_roofline"]

#: Of the formats: blue, green, orange that also differ in lightness.
COLORS = {"fp16": "#0072b2", "fp8": "#009e73", "gf4": "#d55e00"}


def version_bars(table: pd.DataFrame, layer: str = "gate+up", *, dark: bool = False) -> CalmFigure:
    """Draw GB/s of each version on one matrix, what is new in it, and the peaks.

    Parameters
    ----------
    table
        Of `calmnb.one_kernel.measure` or `load`.
    layer
        Which matrix; rows that read one copy again and again are left out.
    dark
        For dark pages.

    Raises
    ------
    ConfigError
        If the table has no such matrix.
    """
    theme = DARK if dark else LIGHT
    rows, lines = _rows(table, layer), _peaks(table)
    figure = new_figure(
        f"One matvec, {len(rows)} kernels: {layer} of Mistral-7B", _caption(table, "whiskers: 20-80% of replays"), theme,
        height=1.5 + 0.5 * len(rows),
    )  # fmt: skip
    axes = figure.subplots()
    style_axes(axes, theme, x="GB/s (1 GB = 10⁹ bytes that must move)", grid="x")
    top = max([line.gb_per_s for line in lines] + [row["gb_per_s"] for row in rows])
    axes.set_xlim(0, top * 1.03)
    axes.set_ylim(len(rows) - 0.3, -1.3)
    for i, row in enumerate(rows):
        axes.barh(i - 0.08, row["gb_per_s"], height=0.42, color=COLORS[row["dtype"]])
        ends = [row["gb_per_s"] * row["us"] / row[name] for name in ("us_p80", "us_p20")]
        axes.plot(ends, [i - 0.08] * 2, color=theme.ink, linewidth=1.2, solid_capstyle="butt")
        axes.text(top * 0.004, i + 0.31, row["idea"], fontsize=NOTE, color=theme.quiet, va="center")
    axes.set_yticks(range(len(rows)), [f"{row['name']}  {row['version']}" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    plain_axis(axes.xaxis)
    _columns(axes, rows, theme)
    for i, line in enumerate(sorted(lines, key=lambda line: line.gb_per_s)):
        color = theme.datasheet if line.kind == "datasheet" else theme.measured
        axes.axvline(line.gb_per_s, color=color, linewidth=1.4, linestyle="--" if line.kind == "datasheet" else "-")
        axes.text(line.gb_per_s - top * 0.01, -0.65 - 0.4 * i, f"{_KINDS[line.kind]} {plain(line.gb_per_s)}", ha="right",
                  va="center", fontsize=TICK, color=color,
                  bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8})  # fmt: skip
    return figure


_KINDS = {"measured": "a kernel that only reads", "datasheet": "datasheet"}


def _columns(axes: Any, rows: list[dict[str, Any]], theme: Theme) -> None:
    """Numbers right of the bars, under one another."""
    columns = [
        ("µs", [plain(row["us"]) for row in rows]),
        ("GB/s", [plain(row["gb_per_s"]) for row in rows]),
        ("of read", [f"{row['percent_measured']:.0f}%" for row in rows]),
    ]
    where = axes.get_yaxis_transform()
    for at, (title, cells) in enumerate(columns):
        x = 1.075 + 0.095 * at
        axes.text(x, -0.72, title, transform=where, ha="right", va="center", fontsize=NOTE, color=theme.quiet)
        for i, cell in enumerate(cells):
            axes.text(x, i - 0.08, cell, transform=where, ha="right", va="center", fontsize=TICK, color=theme.ink)


def version_roofline(table: pd.DataFrame, layer: str = "gate+up", *, dark: bool = False) -> CalmFigure:
    """Draw each version's GFLOP/s over FLOP a byte: up a wall of one storage, then along the slope with the next.

    Parameters, errors and return value as for `version_bars`; the numbers at the marks are those of the versions.
    """
    theme = DARK if dark else LIGHT
    rows, lines = _rows(table, layer), _peaks(table)
    figure = new_figure(
        f"The roofline, step by step: {layer} of Mistral-7B", _caption(table, "mark: version, GFLOP/s"), theme, height=5.2
    )
    axes = figure.subplots()
    style_axes(axes, theme, x="arithmetic intensity, FLOP per byte", y="achieved, GFLOP/s", grid="both")
    points = [(f"{row['version']}:", COLORS[row["dtype"]], "o", *_flops(row), 0.06) for row in rows]
    device = find_device(str(table.attrs["meta"]["device"]))
    roofs = [("fp32", device.fp32_tflops)] if device else []
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.6, 40)
    axes.set_ylim(
        0.6 * min(y for *_, y, _ in points), 2 * max([8 * line.gb_per_s for line in lines] + [1e3 * r for _, r in roofs])
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plain_axis(axis)
    _slopes(axes, lines, roofs, theme)
    _mark(axes, points, theme)
    _format_key(figure, rows, theme)
    return figure


def _slopes(axes: Any, lines: list[Peak], roofs: list[tuple[str, float]], theme: Theme) -> None:
    """Memory's roofs, named together above them, and the flat arithmetic ones."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    top = 1e3 * max((roof for _, roof in roofs), default=np.inf)
    x = np.geomspace(x0, x1, 200)
    for line in lines:
        is_sheet = line.kind == "datasheet"
        axes.plot(x, np.minimum(x * line.gb_per_s, top), color=theme.datasheet if is_sheet else theme.measured, linewidth=1.4,
                  linestyle="--" if is_sheet else "-")  # fmt: skip
    names = ", ".join(f"{_KINDS[line.kind]} {plain(line.gb_per_s)}" for line in lines)
    high = max(line.gb_per_s for line in lines)
    at = x0 * 3.6
    axes.text(at, at * high * (y1 / y0) ** 0.012, f"{names} GB/s", fontsize=TICK, color=theme.ink, ha="center", va="bottom",
              rotation=np.degrees(np.arctan(high)), rotation_mode="anchor", transform_rotates_text=True)  # fmt: skip
    for name, roof in roofs:
        axes.text(x1 * 0.97, 1e3 * roof * 1.05, f"{name} {plain(roof)} TFLOP/s (datasheet)", fontsize=NOTE, color=theme.quiet,
                  ha="right", va="bottom")  # fmt: skip


def _flops(row: dict[str, Any]) -> tuple[float, float]:
    """FLOP a byte and GFLOP/s of a row: a weight is one multiplication and one addition."""
    flops = 2 * _weights(row)
    return flops / row["bytes_min"], flops / row["us"] / 1e3


def _weights(row: dict[str, Any]) -> float:
    """Weights of the matrix; x and y are a thousandth of the bytes."""
    return float(row["bytes_min"]) * 8 / DTYPE_BITS[row["dtype"]]


def instruction_roofline(table: pd.DataFrame, layer: str = "gate+up", *, dark: bool = False) -> CalmFigure:
    """Draw weights a second over instructions a weight: memory's roofs lie flat, the issue slots' falls.

    Parameters, errors and return value as for `version_bars`. Versions whose instructions are not known are left out; a
    table without the GPU's clock has no falling roof.

    Notes
    -----
    After the instruction roofline of Ding and Williams (2019, "An Instruction Roofline Model for GPUs"): four schedulers a
    multiprocessor issue one instruction for 32 lanes a cycle each.
    """
    theme, meta = (DARK if dark else LIGHT), table.attrs["meta"]
    rows = [row for row in _rows(table, layer) if row["instructions_per_weight"] == row["instructions_per_weight"]]
    figure = new_figure(
        f"Instructions a weight, against what the GPU can issue: {layer} of Mistral-7B",
        _caption(table, "mark: version; flat lines: a kernel that only reads; instructions of the loop, static count"),
        theme, height=5.2,
    )  # fmt: skip
    axes = figure.subplots()
    style_axes(axes, theme, x="instructions a weight", y="10⁹ weights a second", grid="both")
    axes.set_xscale("log")
    axes.set_yscale("log")
    x = np.geomspace(1, 16, 200)
    points = [(f"{r['version']}", COLORS[r["dtype"]], r["instructions_per_weight"], _weights(r) / r["us"] / 1e3) for r in rows]
    roofs = {dtype: meta["measured_gb_per_s"] * 8 / bits for dtype, bits in DTYPE_BITS.items()}
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(0.6 * min([y for *_, y in points] + [min(roofs.values())]), 2.2 * max(roofs.values()))
    for dtype, roof in roofs.items():
        axes.axhline(roof, color=COLORS[dtype], linewidth=1.4)
        axes.text(
            1.03,
            roof * 1.02,
            f"{dtype} at {plain(meta['measured_gb_per_s'])} GB/s",
            va="bottom",
            fontsize=TICK,
            color=theme.ink,
        )
    if meta["clock_ghz"]:
        issue = meta["sm_count"] * 4 * 32 * meta["clock_ghz"]
        axes.plot(x, issue / x, color=theme.ink, linewidth=1.4)
        axes.text(2.6, issue / 2.6 * 1.05, f"every issue slot, {meta['clock_ghz']:.2f} GHz", fontsize=TICK, color=theme.ink)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plain_axis(axis)
    _numbered(axes, points, theme)
    return figure


def _numbered(axes: Any, points: list[tuple[str, str, float, float]], theme: Theme) -> None:
    """Points with their numbers to the right; those that lie on one another share a label."""
    near: list[list[tuple[str, str, float, float]]] = []
    for point in points:
        for group in near:
            if abs(np.log(group[0][2] / point[2])) < 0.08 and abs(np.log(group[0][3] / point[3])) < 0.14:
                group.append(point)
                break
        else:
            near.append([point])
    for group in near:
        for _, color, x, y in group:
            axes.scatter([x], [y], s=46, color=color, edgecolors=theme.paper, linewidths=0.8, zorder=3)
        names = ", ".join(name for name, *_ in group)
        axes.annotate(names, (max(x for *_, x, _ in group), float(np.mean([y for *_, y in group]))), xytext=(6, 0), zorder=4,
                      textcoords="offset points", va="center", fontsize=TICK, fontweight="bold", color=theme.ink,
                      bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.4, "alpha": 0.8})  # fmt: skip


def _format_key(figure: CalmFigure, rows: list[dict[str, Any]], theme: Theme) -> None:
    """The formats' names in their colours, upper left of the axes."""
    axes = figure.axes[0]
    for i, dtype in enumerate(dict.fromkeys(row["dtype"] for row in rows)):
        axes.text(0.015 + 0.075 * i, 0.955, dtype, transform=axes.transAxes, fontsize=TICK, fontweight="bold",
                  color=COLORS[dtype] if theme is LIGHT else theme.ink)  # fmt: skip


def _rows(table: pd.DataFrame, layer: str) -> list[dict[str, Any]]:
    chosen = table[(table["layer"] == layer) & (table["memory"] == "DRAM")].sort_values("version")
    if chosen.empty:
        known = ", ".join(dict.fromkeys(table["layer"]))
        raise ConfigError(f"the table has no matrix {layer!r} read from memory; it has {known or 'no rows'}")
    return [{str(key): value for key, value in record.items()} for record in chosen.to_dict("records")]


def _peaks(table: pd.DataFrame) -> list[Peak]:
    meta = table.attrs["meta"]
    kinds: tuple[Any, ...] = ("measured", "datasheet")
    found = [(kind, meta.get(f"{kind}_gb_per_s")) for kind in kinds]
    return [Peak(float(rate), kind) for kind, rate in found if rate]


def _caption(table: pd.DataFrame, *extra: str) -> list[str]:
    meta = table.attrs["meta"]
    return [str(meta["device"]), "saved table" if meta["saved"] else "measured here", str(meta["date"])[:10],
            f"median of {meta['repeats']} replays of a graph, copies of the weights taking turns", *extra]  # fmt: skip
