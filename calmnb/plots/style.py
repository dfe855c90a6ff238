"""The look that every figure shares: theme, fonts, captions, plain-number axes, labels that keep clear of each other.

Figures are built with matplotlib's Figure API. pyplot keeps global state, and its figures outlive their notebook cell.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from calmnb.engine.base import Stage
from calmnb.errors import ConfigError
from calmnb.files import replacing
from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS
from calmnb.profile.report import decode_summary, device_label
from calmnb.profile.telemetry import throttling_note

if TYPE_CHECKING:
    from calmnb.profile.session import Peak, PeakChoice, Session

__all__ = [
    "DARK",
    "LIGHT",
    "CalmFigure",
    "Theme",
    "caption",
    "duration",
    "ink_on",
    "new_figure",
    "peaks",
    "plain",
    "plain_axis",
    "reads_ahead",
    "require_decode",
    "spread",
    "stage_key",
    "style_axes",
]

TITLE, LABEL, TICK, NOTE = 12.0, 10.0, 9.0, 8.0


@dataclass(frozen=True)
class Theme:
    """Colours of a figure: paper, ink, quieter ink for notes, grid lines, the two peak lines, a plain series."""

    paper: str
    ink: str
    quiet: str
    grid: str
    measured: str
    datasheet: str
    series: str


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#e3e6ea", "#1f2328", "#6e7781", "#0072b2")
DARK = Theme("#15181c", "#e8eaed", "#a4acb5", "#2c3238", "#e8eaed", "#959da7", "#4ba3d8")


class CalmFigure(Figure):
    """A matplotlib Figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def write_png(self, path: str | Path, *, dpi: float = 120) -> Path:
        """Write a PNG under a temporary name, then rename it: never half a file. Returns its path.

        Raises
        ------
        CalmnbError
            If it cannot be written.
        """
        with replacing(path) as temporary:
            self.savefig(temporary, format="png", dpi=dpi)
        return Path(path)


def new_figure(title: str, note: Sequence[str], theme: Theme, *, height: float = 4.6, key: bool = False) -> CalmFigure:
    """Return an empty figure 800 pixels wide: title above, caption below, room for a `stage_key` between if `key`."""
    figure = CalmFigure(figsize=(8.0, height), dpi=100, layout="constrained", facecolor=theme.paper)
    lines = _pack([part for part in note if part])
    below = (len(lines) * NOTE * 1.35 + 8) / 72 / height
    above = (TITLE * 1.3 + 12 + (18 if key else 0)) / 72 / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.005, below, 0.982, 1 - below - above), w_pad=0.06, h_pad=0.04, wspace=0.03)
    figure.text(0.012, 1 - 8 / 72 / height, title, fontsize=TITLE, fontweight="bold", color=theme.ink, va="top")
    figure.text(0.012, 6 / 72 / height, "\n".join(lines), fontsize=NOTE, color=theme.quiet, va="bottom", linespacing=1.3)
    return figure


def _pack(parts: list[str], width: int = 128) -> list[str]:
    """Join caption parts by dots into lines of at most `width` characters; a part that is longer is wrapped."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]}  ·  {part}" if lines else part
        if lines and len(joined) <= width:
            lines[-1] = joined
        else:
            lines += textwrap.wrap(part, width)
    return lines


def stage_key(figure: Figure, shares: Sequence[tuple[Stage, float | None]], theme: Theme) -> None:
    """One line under the title: each stage's colour, name and, if known, its share in percent; under 0.5% is left out."""
    shown = [(stage, share) for stage, share in shares if share is None or share >= 0.5]
    texts = [STAGE_LABELS[stage] + ("" if share is None else f" {share:.0f}%") for stage, share in shown]
    top = 1 - (TITLE * 1.3 + 10) / 72 / figure.get_figheight()
    legend = figure.legend(
        [Patch(color=STAGE_COLORS[stage]) for stage, _ in shown], texts,
        loc="upper left", bbox_to_anchor=(0.006, top), ncols=max(len(shown), 1),
        frameon=False, fontsize=8.5, labelcolor=theme.ink, handlelength=0.9, handleheight=0.9, handletextpad=0.4,
        columnspacing=0.9, borderaxespad=0.0, borderpad=0.2,
    )  # fmt: skip
    legend.set_in_layout(False)


def style_axes(axes: Axes, theme: Theme, *, x: str = "", y: str = "", grid: str = "") -> None:
    """Colour `axes`, name its axes (units included), and draw grid lines along "x", "y" or "both"."""
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.quiet)
        spine.set_linewidth(0.8)
    axes.tick_params(colors=theme.ink, labelsize=TICK, which="both", width=0.8)
    axes.set_xlabel(x, fontsize=LABEL, color=theme.ink)
    axes.set_ylabel(y, fontsize=LABEL, color=theme.ink)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(True, axis=grid, color=theme.grid, linewidth=0.8)  # type: ignore[arg-type]


def plain(value: float, _: object = None) -> str:
    """Write a number the way people do: 1,500, 20, 0.5; no exponents down to 0.001."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(ms: float) -> str:
    """Write milliseconds with the unit that keeps the number above one: 1.5 s, 12.3 ms, 45.6 µs."""
    if ms >= 1000:
        return f"{plain(ms / 1e3)} s"
    return f"{plain(ms)} ms" if ms >= 1 else f"{plain(ms * 1e3)} µs"


def plain_axis(axis: Any) -> None:
    """Label an axis, log or not, in plain numbers; minor ticks get none."""
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart so that neighbours are at least `gap` apart, within [low, high], keeping their order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    at = low - gap
    for i in order:
        at = max(wanted[i], at + gap)
        placed[i] = at
    at = high + gap
    for i in reversed(order):
        at = min(placed[i], at - gap)
        placed[i] = at
    return placed


def require_decode(session: Session, figure: str, *, declared: bool = False) -> None:
    """Refuse a session without a decoded token, which a figure of decoding cannot show, or without bytes if `declared`."""
    if not decode_summary(session)["tokens"]:
        raise ConfigError(f"plots.{figure}: the session has no decoded token; record at least two tokens, e.g. tokens=32")
    if declared and not (session.events["bytes_min"] > 0).any():
        raise ConfigError(
            f"plots.{figure}: no kernel of the session declares its bytes; for a report of Nsight Systems, say which model "
            "ran: calmnb.read_nsys(path, config=...)"
        )


def peaks(session: Session, peak: PeakChoice) -> list[Peak]:
    """Peak lines to draw: the one asked for, or all that the session has, each kind once."""
    if peak is not None:
        chosen = session.peak(peak)
        if chosen is None:
            raise ConfigError(f"the session has no peak {peak!r}; pass a number of GB/s")
        return [chosen]
    kinds: tuple[Any, ...] = ("user", "measured", "datasheet")
    found = [session.peak(kind) for kind in kinds]
    return [entry for entry in found if entry is not None]


def caption(session: Session, *extra: str, statistic: str = "median") -> list[str]:
    """The parts of every caption: model, storage, device, context, `extra`, how times were taken and averaged, throttling."""
    meta, numbers = session.meta, decode_summary(session)
    parts = [str(meta.get("model", "unknown model"))]
    if meta.get("dtype"):
        parts.append(f"{meta['dtype']}, KV {meta.get('kv_dtype', 'fp16')}")
    parts.append(device_label(meta))
    if numbers["kv_len_last"] > 0:  # an outside tool may not know it
        parts.append(f"context {numbers['kv_len_first']:.0f}-{numbers['kv_len_last']:.0f}")
    parts += extra
    parts.append(f"{statistic} of {numbers['tokens']:.0f} decode steps" + (", warm-up left out" if _left_out(session) else ""))
    parts.append(f"times: {meta.get('time_source', 'unknown')}")
    if held := throttling_note(meta):
        parts.append(f"THROTTLED: {held}")
    return parts


def _left_out(session: Session) -> bool:
    warm = int(session.steps["warmup"].sum())
    return 0 < warm < int((session.steps["phase"] == "decode").sum())


def reads_ahead(session: Session) -> bool:
    """Whether kernels began while the one before ran: part of their reading then lies outside their exclusive time."""
    rows = session.events[session.events["bytes_min"] > 0]
    overlap = float((rows["duration_s"] - rows["exclusive_s"]).clip(lower=0.0).sum())
    return overlap > 0.02 * float(rows["duration_s"].sum())


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on `color` ("#rrggbb")."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
