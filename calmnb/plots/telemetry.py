"""Power, clocks and temperature beside a recording, with the moments in which the GPU was held back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from calmnb.errors import ConfigError
from calmnb.plots.style import DARK, LIGHT, TICK, CalmFigure, Theme, new_figure, plain_axis, style_axes
from calmnb.profile.palette import STAGE_COLORS
from calmnb.profile.report import device_label
from calmnb.profile.telemetry import throttling_note

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["telemetry"]

_PANELS = (("power_w", "power, W"), ("sm_mhz", "SM clock, MHz"), ("temperature_c", "GPU, °C"))


def telemetry(session: Session, *, dark: bool = False) -> CalmFigure:
    """Draw power, clock and temperature over time; moments in which the clocks were held down are shaded.

    Parameters
    ----------
    session
        With samples of NVML: a recording made on a GPU with ``nvidia-ml-py`` installed.
    dark
        For dark pages.

    Returns
    -------
    Figure
        The title says the energy of a token, where it is known; the caption how it was counted.

    Raises
    ------
    ConfigError
        If the session has no samples; the message says why.
    """
    table = session.telemetry()
    known: dict[str, Any] = session.meta.get("telemetry") or {}
    if not len(table):
        why = known.get("problem") or "it was recorded without telemetry"
        raise ConfigError(f"plots.telemetry: the session has no samples of power and clocks: {why}")
    theme = DARK if dark else LIGHT
    joules = known.get("energy_per_token_j")
    title = f"Energy per token: {joules:.3g} J" if joules else "Power and clocks while recording"
    figure = new_figure(title, _caption(session, known), theme, height=5.2)
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (column, label) in zip(panels, _PANELS, strict=True):
        style_axes(axes, theme, y=label, grid="y")
        axes.plot(table["time_s"], table[column], color=theme.series, linewidth=1.6, marker=".", markersize=4)
        _shade(axes, table)
        if column == "power_w" and known.get("power_limit_w"):
            _limit(axes, table, float(known["power_limit_w"]), theme)
        plain_axis(axes.yaxis)
        if column == "power_w":
            axes.set_ylim(0, 1.3 * max(float(table[column].max()), float(known.get("power_limit_w") or 0)))
        else:
            axes.margins(y=0.25)
    panels[-1].set_xlabel("seconds after the first recorded step")
    figure.align_ylabels(panels)
    plain_axis(panels[-1].xaxis)
    return figure


def _caption(session: Session, known: dict[str, Any]) -> list[str]:
    meta = session.meta
    parts = [str(meta.get("model", "unknown model")), f"{meta.get('dtype', '?')}, KV {meta.get('kv_dtype', 'fp16')}"]
    parts.append(device_label(meta))
    if known.get("context") is not None:
        parts.append(f"{known.get('tokens', 0):,} tokens decoded from context {known['context']:,}")
    if known.get("energy_from"):
        parts.append(f"energy: {known['energy_from']} over {known['seconds']:.2f} s, the whole board")
    held = throttling_note(meta)
    parts.append(f"THROTTLED (shaded): {held}" if held else "not throttled")
    return [*parts, f"NVML, {known.get('hz', 0):g} samples a second"]


def _shade(axes: Any, table: pd.DataFrame) -> None:
    """Colour the time around each sample that was throttled."""
    times: list[float] = table["time_s"].tolist()
    for i, reason in enumerate(table["throttled"]):
        if not reason:
            continue
        first = times[max(i - 1, 0)] / 2 + times[i] / 2
        last = times[min(i + 1, len(times) - 1)] / 2 + times[i] / 2
        axes.axvspan(first, last, color=STAGE_COLORS["attention"], alpha=0.25, linewidth=0)


def _limit(axes: Any, table: pd.DataFrame, limit_w: float, theme: Theme) -> None:
    axes.axhline(limit_w, color=theme.datasheet, linestyle="--", linewidth=1.2)
    axes.text(float(table["time_s"].iloc[0]), limit_w, f"limit {limit_w:.0f} W", va="bottom", fontsize=TICK, color=theme.quiet)
