"""`CompareView`: two sessions on the same axes, every difference with its uncertainty beside it."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import traitlets

from calmnb.engine.base import STAGES, Phase
from calmnb.profile.compare import Comparison, compare
from calmnb.profile.session import PeakChoice, Session
from calmnb.profile.tables import selected_steps
from calmnb.widgets.assets import bundle, static_text
from calmnb.widgets.columns import frame_columns, pack_columns
from calmnb.widgets.fallback import StaticFallback, wrap_static
from calmnb.widgets.profile_data import describe_session
from calmnb.widgets.profile_view import open_session

__all__ = ["CompareView"]

#: What rows can be compared by: name, and the argument of `calmnb.compare`.
_BY: dict[str, Any] = {"stage": "stage", "kernel": "kernel", "layer": ["layer", "stage"]}


class CompareView(StaticFallback):
    """How the step of one session becomes that of another: what got faster, what slower, how sure that is.

    Parameters
    ----------
    a, b : Session, or path of a saved one
        `b` is judged against `a`.
    phase : {"decode", "prefill"}
    peak : {"user", "measured", "datasheet"}, number of GB/s, or None
        Peaks to draw in the rooflines; None draws all that the sessions have.
    labels : tuple of str, optional
        Short names of a and b; by default what tells them apart ("fp16", "fp8").
    confidence : float
        Of the intervals, in (0, 1).

    Attributes
    ----------
    comparisons : dict
        The `calmnb.profile.Comparison` behind each view: by "stage", "kernel" and "layer".

    Raises
    ------
    ConfigError
        If a session is something else or has no step of the phase, or an option is not accepted.
    FormatError
        If there is no session at a path.

    Notes
    -----
    Bars to the left are time saved. Whiskers are intervals that hold for all rows of a view together; a hatched bar shows
    no difference. See `calmnb.compare` for how they come about.

    Examples
    --------
    >>> calmnb.CompareView(fp16, fp8)  # doctest: +SKIP
    >>> calmnb.CompareView("before.calmprof", "after.calmprof", labels=("before", "after"))  # doctest: +SKIP
    """

    _esm = bundle(
        "format.js", "charts.js", "theme.js", "columns.js", "filter.js", "table.js", "choice.js", "roofline.js", "export.js",
        "waterfall.js", "compare.js",
    )  # fmt: skip
    _css = static_text("base.css") + static_text("profile.css")

    info = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)

    def __init__(
        self,
        a: Session | str | os.PathLike[str],
        b: Session | str | os.PathLike[str],
        *,
        phase: Phase = "decode",
        peak: PeakChoice = None,
        labels: tuple[str, str] | None = None,
        confidence: float = 0.95,
    ) -> None:
        sessions = [open_session(side, "CompareView") for side in (a, b)]
        sides = [describe_session(session, peak) for session in sessions]
        options: dict[str, Any] = {"phase": phase, "labels": labels, "confidence": confidence}
        self.comparisons: dict[str, Comparison] = {name: compare(*sessions, by=by, **options) for name, by in _BY.items()}
        by_stage = self.comparisons["stage"]
        tables, parts, at = {}, [], 0
        for name, found in self.comparisons.items():
            columns, texts = frame_columns(found.table)
            layout, data = pack_columns(columns)
            tables[name] = {
                "layout": [[key, form, offset + at, count] for key, form, offset, count in layout],
                "labels": texts,
                "rows": len(found.table),
                "method": found.method,
            }
            parts.append(data)
            at += len(data)
        super().__init__(
            data=b"".join(parts),
            info={
                "labels": list(by_stage.labels),
                "total": {key: _plain(value) for key, value in by_stage.total.items()},
                "summary": by_stage.summary(),
                "phase": by_stage.phase,
                "steps": list(by_stage.steps),
                "confidence": by_stage.confidence,
                "by_runs": by_stage.by_runs,
                "settings": [list(row) for row in by_stage.settings],
                "notes": list(by_stage.notes),
                "tables": tables,
                "sides": sides,
                "points": [_points(session, phase) for session in sessions],
            },
        )
        self._static_id = f"calmnb-{self.model_id}"
        self.info = {**self.info, "static_id": self._static_id}

    def __repr__(self) -> str:
        return f"CompareView: {self.info['summary']}"

    def static_html(self) -> str:
        """The comparison by stage as static HTML: what a saved notebook shows without a kernel."""
        return wrap_static(self.comparisons["stage"]._repr_html_(), self._static_id)


def _plain(value: Any) -> Any:
    """JSON data; None for a number that is not known."""
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else float(value)
    return value


def _points(session: Session, phase: Phase) -> list[dict[str, Any]]:
    """Marks of a roofline: each stage that moves bytes and computes, and the whole step, as means of a step."""
    events, steps = session.events, selected_steps(session.steps, phase)
    rows = events[events["step"].isin(steps["step"])]
    total = float(steps["duration_s"].sum())
    points: list[dict[str, Any]] = []
    for stage in (*STAGES, ""):  # "" is the whole step
        part = rows[rows["stage"] == stage] if stage else rows
        moved, flops = float(part["bytes_min"].sum()), float(part["flops"].sum())
        if moved > 0 and flops > 0:
            seconds = float(part["exclusive_s"].sum()) if stage else total
            points.append({"stage": stage, "time": seconds, "bytes": moved, "flops": flops})
    return [point | {"share": point["time"] / total} for point in points if point["time"] > 0]
