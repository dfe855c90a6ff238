"""From the physical limit to the measured step, part by part: by stage, or by what keeps a kernel from the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from calmnb.errors import ConfigError
from calmnb.profile.session import PeakChoice, Session
from calmnb.profile.typical import StepSamples, step_samples

__all__ = ["WATERFALL_COLUMNS", "StreamFit", "fit_streams", "waterfall"]

By = Literal["stage", "cause"]

#: Columns of the table.
WATERFALL_COLUMNS: dict[str, str] = {
    "part": '"weights" and "kv" at the peak; then, by stage, a stage\'s name, or, by cause, "ramp" (ramp-up and tail of each '
    'weight kernel), "rate" (weights streamed below the peak), "attention" (beyond its bytes), "small" (kernels that read '
    'next to nothing: embed, sample) and "gap" (no kernel running); then "step", "host" and "token"',
    "kind": '"limit": bytes over the peak; "excess": time beyond, negative where a cache beat the peak; "total": all above',
    "time_us": "length, microseconds",
    "start_us": "where it begins: the sum of all above; 0 for a total",
    "share_percent": "part of the measured step",
}


@dataclass(frozen=True)
class StreamFit:
    """How long a kernel takes that reads weights: a fixed time, and bytes over a rate.

    Attributes
    ----------
    fixed_us : float
        Microseconds of each kernel that its bytes do not explain: ramp-up and tail, as far as no neighbour hides them. >= 0.
    gb_per_s : float
        Rate at which further bytes come, GB = 1e9 bytes.
    kernels : int
        Kernels of a step that the fit is made of.
    residual_percent : float
        Root mean square of what the line misses, in percent of the mean time.
    """

    fixed_us: float
    gb_per_s: float
    kernels: int
    residual_percent: float

    def __str__(self) -> str:
        return (
            f"{self.fixed_us:.2f} us + bytes at {self.gb_per_s:.0f} GB/s, for each of {self.kernels} weight kernels "
            f"(misses by {self.residual_percent:.1f}%)"
        )


def waterfall(session: Session, peak: PeakChoice = None, *, by: By = "stage") -> pd.DataFrame:
    """Split a typical decode step into what physics asks for and what comes on top.

    Parameters
    ----------
    session
        With at least one decoded token.
    peak
        As for `Session.peak`.
    by : {"stage", "cause"}
        What the time beyond the limit is split into. By cause, a straight line through the step's weight kernels
        (`fit_streams`) tells the fixed time of each from the rate at which it reads.

    Returns
    -------
    DataFrame
        Columns of `WATERFALL_COLUMNS`, top to bottom. Limits and excesses sum to the row "step"; where the time from token
        to token is known, "host" (what passes between steps, median) and "token" follow.

    Raises
    ------
    ConfigError
        If the session has no decoded token or lacks the peak, or `by` is not accepted.
    """
    if by not in ("stage", "cause"):
        raise ConfigError(f"waterfall: by is {by!r}; accepted are 'stage' and 'cause'")
    line = session.peak(peak)
    if line is None:
        wanted = "a peak" if peak is None else f"the peak {peak!r}"
        raise ConfigError(f"waterfall: the session lacks {wanted}; pass peak= in GB/s")
    samples = step_samples(session, ["stage"] if by == "stage" else ["stage", "layer", "kernel"], "decode", name="waterfall")
    middle = samples.middle
    micros, nbytes = samples.seconds[middle].mean(axis=0) * 1e6, samples.nbytes[middle].mean(axis=0)
    stages = np.array([str(row[0]) for row in samples.rows])
    limits = nbytes / line.gb_per_s / 1e3
    is_kv = stages == "attention"
    parts = [("weights", "limit", float(limits[~is_kv].sum())), ("kv", "limit", float(limits[is_kv].sum()))]
    excess = _by_cause(stages, micros, nbytes, line.gb_per_s) if by == "cause" else _by_stage(stages, micros - limits)
    rows: list[dict[str, Any]] = []
    at = 0.0
    for part, kind, time_us in [*parts, *((name, "excess", time) for name, time in excess)]:
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


def _by_stage(stages: Any, beyond_us: Any) -> list[tuple[str, float]]:
    excess = {str(stage): float(time) for stage, time in zip(stages, beyond_us, strict=True)}
    late = [stage for stage in ("gap", "sample") if stage in excess]
    return [(stage, excess[stage]) for stage in [*(s for s in excess if s not in late), *late]]


def _by_cause(stages: Any, micros: Any, nbytes: Any, gb_per_s: float) -> list[tuple[str, float]]:
    """What each cause adds, microseconds a step; they sum to the step less its bytes at the peak."""
    limits = nbytes / gb_per_s / 1e3
    reads = _reads_weights(stages, nbytes)
    fit = _line(nbytes[reads], micros[reads])
    ramp = fit.fixed_us * fit.kernels
    beyond = float((micros - limits)[reads].sum())
    of = {name: float((micros - limits)[stages == name].sum()) for name in ("attention", "gap")}
    small = float((micros - limits).sum()) - beyond - of["attention"] - of["gap"]
    # What the line misses cancels in the sum, so what is not ramp is the rate's doing.
    return [("rate", beyond - ramp), ("ramp", ramp), ("attention", of["attention"]), ("small", small), ("gap", of["gap"])]


def _reads_weights(stages: Any, nbytes: Any) -> Any:
    return (nbytes > 0) & ~np.isin(stages, ["attention", "embed", "gap", "sample", "other"])


def fit_streams(session: Session) -> StreamFit:
    """Fit a straight line through time and bytes of the weight kernels of a typical decode step.

    Raises
    ------
    ConfigError
        If no kernel of the session reads weights.

    Notes
    -----
    Ordinary least squares, one sample a kernel launch (its mean over the middle 60% of the steps). Kernels of one size alone
    have no line; they, and a line below zero, count as all rate and no fixed time.
    """
    samples = step_samples(session, ["stage", "layer", "kernel"], "decode", name="fit_streams")
    middle = samples.middle
    micros, nbytes = samples.seconds[middle].mean(axis=0) * 1e6, samples.nbytes[middle].mean(axis=0)
    reads = _reads_weights(np.array([str(row[0]) for row in samples.rows]), nbytes)
    if not reads.any():
        raise ConfigError("fit_streams: no kernel of the session reads weights, or none declares its bytes")
    return _line(nbytes[reads], micros[reads])


def _line(nbytes: Any, micros: Any) -> StreamFit:
    fixed, slope = 0.0, float(micros.sum() / nbytes.sum()) if len(nbytes) else float("nan")
    off = nbytes - nbytes.mean() if len(nbytes) else nbytes
    if len(nbytes) and float(off @ off) > 1e-6 * float(nbytes @ nbytes):
        steep = float(off @ micros / (off @ off))
        base = float(micros.mean() - steep * nbytes.mean())
        if base > 0 and steep > 0:
            fixed, slope = base, steep
    missed = micros - fixed - slope * nbytes
    error = 100.0 * float(np.sqrt((missed**2).mean()) / micros.mean()) if len(nbytes) else float("nan")
    return StreamFit(fixed, 1e-3 / slope, len(nbytes), error)


def _host_us(session: Session, samples: StepSamples) -> float:
    """Median time between a step's end and the next one's start, microseconds; 0 if no step tells."""
    steps = session.steps
    follows = (steps["run"] == steps["run"].shift(-1)) & (steps["phase"] == "decode")
    between = (steps["interval_s"].shift(-1) - steps["duration_s"]).where(follows)
    known = between[steps["step"].isin(samples.steps["step"])].dropna()
    return float(known.median()) * 1e6 if len(known) else 0.0
