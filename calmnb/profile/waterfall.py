"""From the physical limit to the measured step, part by part: what each stage takes beyond its own bytes at the peak."""

from __future__ import annotations

from typing import Any

import pandas as pd

from calmnb.errors import ConfigError
from calmnb.profile.session import PeakChoice, Session
from calmnb.profile.typical import StepSamples, step_samples

__all__ = ["WATERFALL_COLUMNS", "waterfall"]

#: Columns of the table.
WATERFALL_COLUMNS: dict[str, str] = {
    "part": '"weights" and "kv" at the peak, then a stage\'s name, "step", "host" and "token"',
    "kind": '"limit": bytes over the peak; "excess": a stage\'s time beyond its own bytes at the peak, negative where a cache '
    'beat the peak; "total": all above',
    "time_us": "length, microseconds",
    "start_us": "where it begins: the sum of all above; 0 for a total",
    "share_percent": "part of the measured step",
}


def waterfall(session: Session, peak: PeakChoice = None) -> pd.DataFrame:
    """Split a typical decode step into what physics asks for and what each stage adds.

    Parameters
    ----------
    session
        With at least one decoded token.
    peak
        As for `Session.peak`.

    Returns
    -------
    DataFrame
        Columns of `WATERFALL_COLUMNS`, top to bottom. Limits and excesses sum to the row "step"; where the time from token
        to token is known, "host" (what passes between steps, median) and "token" follow.

    Raises
    ------
    ConfigError
        If the session has no decoded token or lacks the peak.
    """
    line = session.peak(peak)
    if line is None:
        wanted = "a peak" if peak is None else f"the peak {peak!r}"
        raise ConfigError(f"waterfall: the session lacks {wanted}; pass peak= in GB/s")
    samples = step_samples(session, ["stage"], "decode", name="waterfall")
    middle = samples.middle
    seconds, nbytes = samples.seconds[middle].mean(axis=0), samples.nbytes[middle].mean(axis=0)
    stages = [str(row[0]) for row in samples.rows]
    limits = [float(amount) / line.gb_per_s / 1e3 for amount in nbytes]
    kv_us = sum(limit for stage, limit in zip(stages, limits, strict=True) if stage == "attention")
    parts: list[tuple[str, str, float]] = [("weights", "limit", sum(limits) - kv_us), ("kv", "limit", kv_us)]
    excess = {stage: float(s) * 1e6 - limit for stage, s, limit in zip(stages, seconds, limits, strict=True)}
    late = [stage for stage in ("gap", "sample") if stage in excess]
    parts += [(stage, "excess", excess[stage]) for stage in [*(s for s in stages if s not in late), *late]]
    rows: list[dict[str, Any]] = []
    at = 0.0
    for part, kind, time_us in parts:
        rows.append({"part": part, "kind": kind, "time_us": time_us, "start_us": at})
        at += time_us
    rows.append({"part": "step", "kind": "total", "time_us": at, "start_us": 0.0})
    host_us = _host_us(session, samples)
    if host_us > 0:
        rows.append({"part": "host", "kind": "excess", "time_us": host_us, "start_us": at})
        rows.append({"part": "token", "kind": "total", "time_us": at + host_us, "start_us": 0.0})
    table = pd.DataFrame(rows)
    table["share_percent"] = 100.0 * table["time_us"] / at
    return table[list(WATERFALL_COLUMNS)]


def _host_us(session: Session, samples: StepSamples) -> float:
    """Median time between a step's end and the next one's start, microseconds; 0 if no step tells."""
    steps = session.steps
    follows = (steps["run"] == steps["run"].shift(-1)) & (steps["phase"] == "decode")
    between = (steps["interval_s"].shift(-1) - steps["duration_s"]).where(follows)
    known = between[steps["step"].isin(samples.steps["step"])].dropna()
    return float(known.median()) * 1e6 if len(known) else 0.0
