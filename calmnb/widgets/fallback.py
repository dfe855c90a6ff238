"""Widgets that leave a static view of themselves in the notebook file, for where no kernel or no widget runs."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import anywidget

from calmnb.profile.palette import STAGE_COLORS, STAGE_LABELS

__all__ = ["StaticFallback", "layer_bars", "wrap_static"]


class StaticFallback(anywidget.AnyWidget):
    """A widget whose live view and static view are two outputs of its cell; the live one hides the other.

    Subclasses give `static_html`: one ``div`` of the class ``calmnb-static`` and of the class `_static_id`, without
    script, style sheet or ids, with everything escaped.
    """

    _static_id = ""

    def static_html(self) -> str:
        """What a saved notebook shows without a kernel; HTML without scripts."""
        raise NotImplementedError

    def _ipython_display_(self, **kwargs: Any) -> None:
        """Show the live widget, and below it the static view, which the live one hides as long as it is there."""
        from IPython.display import display

        found = super()._repr_mimebundle_(**kwargs)
        live = dict(found[0] if isinstance(found, tuple) else found or {}) | {"text/plain": repr(self)}
        display(live, raw=True)  # type: ignore[no-untyped-call]
        display(self._static_bundle(), raw=True, display_id=self._static_id)  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        found = super()._repr_mimebundle_(**kwargs)
        if not isinstance(found, tuple):
            return found
        return dict(found[0]) | self._static_bundle(), dict(found[1])

    def _static_bundle(self) -> dict[str, str]:
        return {"text/html": self.static_html(), "text/plain": repr(self)}

    def _update_static(self) -> None:
        """Refresh the static view in the notebook document."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None and hasattr(shell, "kernel"):
            shell.display_pub.publish(self._static_bundle(), {}, transient={"display_id": self._static_id}, update=True)


def wrap_static(body: str, name: str) -> str:
    """Put static HTML into the ``div`` that a live widget with the class `name` finds and hides."""
    return f'<div class="calmnb-static {html.escape(name, quote=True)}" style="max-width:900px;line-height:1.5">{body}</div>'


def layer_bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """One stacked bar a layer, of stages in their colours, as static HTML: a heat map that any viewer can show.

    Parameters
    ----------
    rows : sequence of mappings
        ``layer``, ``stage``, ``time_us``, as `Session.layers` has them; what lies outside the layers is left out.
    """
    layers: dict[int, list[tuple[str, float]]] = {}
    for row in rows:
        if row["layer"] >= 0 and row["time_us"] > 0:
            layers.setdefault(int(row["layer"]), []).append((str(row["stage"]), float(row["time_us"])))
    if not layers:
        return ""
    longest = max(sum(us for _, us in stages) for stages in layers.values())
    lines = []
    for layer, stages in sorted(layers.items()):
        bar = "".join(
            f'<span title="layer {layer}, {html.escape(STAGE_LABELS.get(stage, stage))}: {us:.1f} µs"'  # type: ignore[call-overload]
            f' style="display:inline-block;height:7px;width:{us / longest * 88:.2f}%;'
            f'background-color:{STAGE_COLORS.get(stage, "#888")}"></span>'  # type: ignore[call-overload]
            for stage, us in stages
        )
        label = f'<span style="display:inline-block;width:3em;text-align:right;margin-right:.6em">{layer}</span>'
        lines.append(f'<div style="white-space:nowrap;font-size:9px;line-height:9px;overflow:hidden">{label}{bar}</div>')
    note = f'<div style="font-size:smaller;opacity:.8;margin:.5em 0 .2em">time per layer, the longest {longest:.0f} µs</div>'
    return f"{note}{''.join(lines)}"
