"""How far a difference of typical steps may be off: bootstrap of steps or runs, for all rows together.

`calmnb.profile.compare.compare` says what is done and why; this is how.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from calmnb.profile.typical import central

__all__ = ["RESAMPLES", "uncertainty"]

#: Resamples of each session.
RESAMPLES = 2000


def uncertainty(
    sides: list[NDArray[np.float64]], groups: list[list[NDArray[np.intp]]] | None, confidence: float, seed: int
) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Standard errors of the rows' differences, and what to multiply them with.

    Parameters
    ----------
    sides : two float64 arrays (n_steps, n_rows)
        Seconds of each step's rows.
    groups
        Indices of the steps of each run, for both sides, to resample whole runs; None to resample blocks of steps.
    confidence
        In (0, 1).
    seed
        Of the random numbers.

    Returns
    -------
    errors : float64 (n_rows + 1,)
        Microseconds; the last is the whole step's.
    factors : (float, float)
        Half an interval over its error: for all rows together, and for the whole step alone.
    """
    random = np.random.default_rng(seed)
    if groups:
        units = [float(len(runs)) for runs in groups]
        drawn = [_of_runs(seconds, runs, random) for seconds, runs in zip(sides, groups, strict=True)]
    else:
        units = [len(seconds) / _block(len(seconds)) for seconds in sides]
        drawn = [_of_blocks(seconds, random) for seconds in sides]
    means = [seconds[central(seconds.sum(axis=1))].mean(axis=0) for seconds in sides]
    off = ((drawn[1] - drawn[0]) - (means[1] - means[0])) * 1e6
    off = np.column_stack([off, off.sum(axis=1)])
    # What is resampled scatters less than what was drawn from, by (units - 1) / units.
    errors = np.sqrt((off**2).mean(axis=0) * min(units) / (min(units) - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        deviations = np.where(errors > 0, np.abs(off) / errors, 0.0)
    freedom = sum(units) - 2
    largest, alone = (np.quantile(d, confidence) for d in (deviations[:, :-1].max(axis=1), deviations[:, -1]))
    return errors, (_student(float(largest), freedom), _student(float(alone), freedom))


def _student(z: float, freedom: float) -> float:
    """Widen a normal quantile to Student's t of so many degrees of freedom (Cornish-Fisher expansion)."""
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _block(n: int) -> int:
    """Neighbouring steps that are resampled together."""
    return max(1, round(math.pow(n, 1 / 3)))


def _of_blocks(seconds: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Means over the middle steps of resamples made of blocks of neighbouring steps, shape (RESAMPLES, n_rows)."""
    n = len(seconds)
    totals, block = seconds.sum(axis=1), _block(n)
    parts = []
    for done in range(0, RESAMPLES, 250):  # a piece at a time: long sessions have thousands of steps
        some = min(250, RESAMPLES - done)
        starts = random.integers(0, n, (some, -(-n // block)))
        picks = ((starts[:, :, None] + np.arange(block)) % n).reshape(some, -1)[:, :n]
        middle = np.take_along_axis(picks, central(totals[picks]), axis=1)
        flat = (middle + n * np.arange(some)[:, None]).ravel()
        weights = np.bincount(flat, minlength=some * n).reshape(some, n) / middle.shape[1]
        parts.append(weights @ seconds)
    return np.concatenate(parts)


def _of_runs(seconds: NDArray[np.float64], runs: list[NDArray[np.intp]], random: np.random.Generator) -> NDArray[np.float64]:
    """The same with whole runs drawn."""
    totals = seconds.sum(axis=1)
    out = np.empty((RESAMPLES, seconds.shape[1]))
    for i, picks in enumerate(random.integers(0, len(runs), (RESAMPLES, len(runs)))):
        steps = np.concatenate([runs[pick] for pick in picks])
        out[i] = seconds[steps[central(totals[steps])]].mean(axis=0)
    return out
