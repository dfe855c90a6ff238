"""Two sessions side by side: what got faster, what slower, how sure that is, and what else was different.

A difference without its uncertainty invites stories about noise, and a ratio without the settings compares apples with
pears; so neither is shown without the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.engine.base import STAGES, Phase
from calmnb.errors import ConfigError
from calmnb.profile.pivot import added_columns
from calmnb.profile.resample import RESAMPLES, uncertainty
from calmnb.profile.session import Session
from calmnb.profile.settings import distinguishing_labels, setting_differences
from calmnb.profile.telemetry import throttling_note
from calmnb.profile.typical import StepSamples, step_samples

__all__ = ["COMPARE_COLUMNS", "MIN_STEPS", "Comparison", "Verdict", "compare"]

Verdict = Literal["faster", "slower", "no difference shown", "only in a", "only in b"]

#: Columns of `Comparison.table` after those compared by.
COMPARE_COLUMNS: dict[str, str] = {
    "time_us_a": "exclusive time in a step of a at its mean context, mean of the middle 60%, microseconds; rows add up",
    "time_us_b": "the same of b",
    "difference_us": "time_us_b - time_us_a: below zero, b is faster",
    "low_us": "lower end of the difference's simultaneous interval; nan with too few steps",
    "high_us": "upper end",
    "ratio": "time_us_b / time_us_a; nan where one has no such row",
    "gb_per_s_a": "bytes_min over time in a, GB = 1e9 bytes; nan where no bytes must move",
    "gb_per_s_b": "the same of b",
    "change_percent": "part of the whole step's change, with its sign; rows sum to 100; nan if the step did not change",
    "verdict": '"faster", "slower" or "no difference shown" of b; "only in a", "only in b" where one lacks the row',
}

#: Fewer settled steps than this in a session give no interval.
MIN_STEPS = 8
#: From so many runs (answers) in each session on, whole runs are resampled.
MIN_RUNS = 5

_BY = {"stage": ["stage"], "layer": ["layer"], "kernel": ["kernel", "stage"]}
_COLUMNS = ("stage", "layer", "kernel", "source")
_NOTHING_US = 1e-3  # a nanosecond: below any clock's resolution, and what is left of rounding


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Result of `compare`.

    Attributes
    ----------
    table : DataFrame
        One row for each value of `by` that either session has, in execution order: the columns of `by`, then those of
        `COMPARE_COLUMNS`.
    total : dict
        The whole step, with the keys of `COMPARE_COLUMNS`. Its interval is not corrected: it is one question.
    by : tuple of str
    phase : {"decode", "prefill"}
    labels : tuple of str
        Short names of a and b: what tells them apart.
    settings : tuple of (name, in a, in b)
        Every setting in which the sessions differ.
    notes : tuple of str
        What a reader must know before trusting the comparison.
    steps : tuple of int
        Settled steps of a and b.
    confidence : float
    by_runs : bool
        Whether intervals come from resampling whole runs, and so cover what changes between runs.
    a, b : Session
    """

    table: pd.DataFrame
    total: dict[str, Any]
    by: tuple[str, ...]
    phase: Phase
    labels: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    steps: tuple[int, int]
    confidence: float
    by_runs: bool
    a: Session
    b: Session

    @property
    def method(self) -> str:
        """How the intervals and verdicts came about, in a sentence or two."""
        parts = [f"times: mean of the middle 60% of {self.steps[0]} and {self.steps[1]} steps"]
        if min(self.steps) >= MIN_STEPS:
            what = "whole runs" if self.by_runs else "blocks of steps"
            covers = "they cover noise between runs" if self.by_runs else "they cover noise between steps, not between runs"
            level = f"{100 * self.confidence:g}% for all {len(self.table)} rows together (max-t)"
            parts.append(f"intervals: {RESAMPLES} bootstrap resamples of {what}, {level}; {covers}")
        return "; ".join(parts)

    def summary(self) -> str:
        """One line to paste in an issue."""
        from calmnb.profile.compare_report import summary_line

        return summary_line(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: everything but the sessions."""
        return {
            "summary": self.summary(),
            "labels": list(self.labels),
            "by": list(self.by),
            "phase": self.phase,
            "steps": list(self.steps),
            "confidence": self.confidence,
            "method": self.method,
            "settings": [{"name": name, "a": a, "b": b} for name, a, b in self.settings],
            "notes": list(self.notes),
            "total": self.total,
            "table": self.table.to_dict("records"),
        }

    def __repr__(self) -> str:
        from calmnb.profile.compare_report import text_report

        return text_report(self)

    def _repr_html_(self) -> str:
        from calmnb.profile.compare_report import html_report

        return html_report(self)


def compare(
    a: Session,
    b: Session,
    *,
    by: str | Sequence[str] = "stage",
    phase: Phase = "decode",
    labels: tuple[str, str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two recordings row by row.

    Parameters
    ----------
    a, b
        Sessions with at least one step of `phase`. They may differ in anything: rows that one lacks are kept, settings
        that differ are listed.
    by
        "stage", "layer", "kernel" (kernel and stage), or several of the columns ``stage, layer, kernel, source`` and
        of the labels that an outside tool added to both (``nvtx``).
    phase : {"decode", "prefill"}
    labels
        Short names for a and b; by default what tells them apart ("fp16", "fp8").
    confidence
        Of the intervals, in (0, 1).
    seed
        Of the resampling: the same sessions give the same intervals.

    Returns
    -------
    Comparison

    Raises
    ------
    ConfigError
        If an argument is not accepted, or a session has no such step.

    Notes
    -----
    Each step is one sample, brought to the session's mean context along the straight line that attention follows. A
    row's time is its mean over the middle 60% of the steps ranked by whole time, so that rows add up to the step and a
    long tail does not count. Its uncertainty comes from a circular block bootstrap of the steps (blocks of about
    n**(1/3), since neighbouring steps resemble each other; Politis and Romano 1992), widened as Student's t is for few
    blocks. Neighbouring runs differ by more than that (clocks, other work): where both sessions hold five or more runs,
    whole runs are resampled and the intervals cover it; best record the runs of a and b in turns. Many rows give many
    chances of a false alarm, so intervals hold for all rows at once: each is the difference plus or minus c standard
    errors, where c is the `confidence` quantile of the largest standardised deviation among all rows of a resample
    (max-t; Westfall and Young 1993). A verdict is given where the interval excludes zero.

    Examples
    --------
    >>> calmnb.compare(fp16, fp8)  # doctest: +SKIP
    >>> calmnb.compare(before, after, by=["layer", "stage"]).table  # doctest: +SKIP
    """
    keys = _checked(a, b, by, phase, confidence)
    samples = step_samples(a, keys, phase, name="compare: a"), step_samples(b, keys, phase, name="compare: b")
    rows = _joined(keys, samples)
    sides = [_aligned(side, rows) for side in samples]
    means = [seconds[side.middle].mean(axis=0) * 1e6 for side, (seconds, _) in zip(samples, sides, strict=True)]
    moved = [nbytes[side.middle].mean(axis=0) for side, (_, nbytes) in zip(samples, sides, strict=True)]
    counts = len(samples[0].seconds), len(samples[1].seconds)
    errors, factor = np.full(len(rows) + 1, np.nan), (math.nan, math.nan)
    groups = _runs(samples)
    if min(counts) >= MIN_STEPS:
        errors, factor = uncertainty([seconds for seconds, _ in sides], groups, confidence, seed)
    change = float(means[1].sum() - means[0].sum())
    in_a, in_b = (set(side.rows) for side in samples)
    records = []
    for i, row in enumerate(rows):
        only: Verdict | None = "only in b" if row not in in_a else "only in a" if row not in in_b else None
        of_row = (float(values[i]) for values in (*means, *moved))
        numbers = _record(*of_row, half_us=factor[0] * errors[i], change_us=change, only=only)
        records.append({**dict(zip(keys, row, strict=True)), **numbers})
    total = _record(
        *(float(values.sum()) for values in (*means, *moved)), half_us=factor[1] * errors[-1], change_us=change, only=None
    )
    settings = setting_differences(a, b, phase)
    return Comparison(
        table=pd.DataFrame(records, columns=[*keys, *COMPARE_COLUMNS]),
        total=total,
        by=tuple(keys),
        phase=phase,
        labels=labels or distinguishing_labels(a, b, phase),
        settings=settings,
        notes=_notes(a, b, settings, counts, samples),
        steps=counts,
        confidence=confidence,
        by_runs=groups is not None,
        a=a,
        b=b,
    )


def _checked(a: Session, b: Session, by: str | Sequence[str], phase: Phase, confidence: float) -> list[str]:
    for name, session in (("a", a), ("b", b)):
        if not isinstance(session, Session):
            raise ConfigError(
                f"compare: {name} is a {type(session).__name__}, not a Session; record one with calmnb.profile(...) or "
                "open one with calmnb.Session.load(path)"
            )
    added = [column for column in added_columns(a.events, numbers=False) if column in b.events.columns]
    columns = [*_COLUMNS, *added]
    if isinstance(by, str) and by not in _BY and by not in columns:
        raise ConfigError(f"compare: by is {by!r}; accepted are 'stage', 'layer', 'kernel' or a list of {', '.join(columns)}")
    keys = _BY.get(by, [by]) if isinstance(by, str) else list(by)
    unknown = [key for key in keys if key not in columns]
    if unknown or not keys or len(set(keys)) < len(keys):
        raise ConfigError(f"compare: by is {keys!r}; accepted are different columns of {', '.join(columns)}")
    if phase not in ("decode", "prefill"):
        raise ConfigError(f"compare: phase is {phase!r}; accepted are 'decode' and 'prefill'")
    if not 0 < confidence < 1:
        raise ConfigError(f"compare: confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")
    return keys


def _joined(keys: list[str], samples: tuple[StepSamples, StepSamples]) -> list[tuple[Any, ...]]:
    """Rows of both: a's in their order, each of b's own after what precedes it there."""
    rows = list(samples[0].rows)
    at = 0
    for row in samples[1].rows:
        if row in rows:
            at = rows.index(row) + 1
        else:
            rows.insert(at, row)
            at += 1
    if keys == ["stage"]:
        rows.sort(key=lambda row: STAGES.index(row[0]))
    return rows


def _aligned(side: StepSamples, rows: list[tuple[Any, ...]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds and bytes with a column for every row, zero where the session lacks it."""
    where = [rows.index(row) for row in side.rows]
    seconds, nbytes = np.zeros((2, len(side.seconds), len(rows)))
    seconds[:, where], nbytes[:, where] = side.seconds, side.nbytes
    return seconds, nbytes


def _runs(samples: tuple[StepSamples, StepSamples]) -> list[list[NDArray[np.intp]]] | None:
    """Indices of the steps of each run on both sides; None if a side has too few runs to tell how runs scatter."""
    sides = []
    for side in samples:
        run = side.steps["run"].to_numpy()
        sides.append([np.flatnonzero(run == one) for one in np.unique(run)])
    return sides if min(map(len, sides)) >= MIN_RUNS else None


def _record(
    a_us: float, b_us: float, a_bytes: float, b_bytes: float, *, half_us: float, change_us: float, only: Verdict | None
) -> dict[str, Any]:
    difference = b_us - a_us
    low, high = difference - half_us, difference + half_us
    verdict: Verdict = "no difference shown"
    if only:
        verdict = only
    elif high < -_NOTHING_US:
        verdict = "faster"
    elif low > _NOTHING_US:
        verdict = "slower"
    return {
        "time_us_a": a_us,
        "time_us_b": b_us,
        "difference_us": difference,
        "low_us": low,
        "high_us": high,
        "ratio": b_us / a_us if a_us > 0 and not only else math.nan,
        "gb_per_s_a": a_bytes / a_us / 1e3 if a_us > 0 and a_bytes > 0 else math.nan,
        "gb_per_s_b": b_bytes / b_us / 1e3 if b_us > 0 and b_bytes > 0 else math.nan,
        "change_percent": 100.0 * difference / change_us if abs(change_us) > _NOTHING_US else math.nan,
        "verdict": verdict,
    }


def _notes(
    a: Session,
    b: Session,
    settings: tuple[tuple[str, str, str], ...],
    counts: tuple[int, int],
    samples: tuple[StepSamples, StepSamples],
) -> tuple[str, ...]:
    notes, different = [], {name for name, _, _ in settings}
    if any(name.startswith("config.") for name in different):
        notes.append("the models differ in size: stages of the same name do different work")
    if "measured peak" in different and "device" not in different:
        peaks = " and ".join(str(session.peak("measured") or "none") for session in (a, b))
        notes.append(f"the same device read its memory at {peaks}: it was not equally free")
    if "times" in different:
        notes.append("times were taken in different ways: part of the difference may be the measurement")
    notes += _held_back(a, b)
    spans = [(int(side.steps["kv_len"].min()), int(side.steps["kv_len"].max())) for side in samples]
    are_known = min(last for _, last in spans) > 0  # an outside tool may not know them
    if are_known and (spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]):
        notes.append("the contexts do not overlap: attention reads different amounts of KV cache")
    if min(counts) < MIN_STEPS:
        few = "1 step is" if min(counts) == 1 else f"{min(counts)} steps are"
        notes.append(f"{few} too few to show a difference; record at least {MIN_STEPS} beyond the warm-up")
    if any(bool(side.steps["warmup"].all()) for side in samples):
        notes.append("a session has nothing but warm-up steps")
    return tuple(notes)


def _held_back(a: Session, b: Session) -> list[str]:
    notes = [(name, throttling_note(session.meta)) for name, session in (("a", a), ("b", b))]
    held = [f"{name} was held back by {note}" for name, note in notes if note]
    free = [f"{name} was not" for name, note in notes if not note]
    return [", ".join(held + free) + ": part of the difference may be that"] if held else []
