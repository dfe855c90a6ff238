"""Times of a typical step that add up: what comparisons and waterfalls are made of.

Medians of parts do not sum to the median of the whole. So steps are ranked by their whole time, a fifth is cut from
either end (a busy neighbour makes a long tail), and every part is averaged over the same steps that remain. Growth with
the context is not what a step should be ranked by: decode steps are first brought to the session's mean context, along
the straight line that time and bytes follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calmnb.engine.base import STAGES, Phase
from calmnb.errors import ConfigError
from calmnb.profile.tables import selected_steps

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["TRIM", "StepSamples", "at_mean_context", "central", "step_samples"]

#: Part of the steps, ranked by time, that is left out at either end.
TRIM = 0.2

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepSamples:
    """One sample a step of every row, brought to the mean context if the steps decode.

    Attributes
    ----------
    rows : list of tuple
        Values of the key columns, in the order of execution.
    context : float
        Mean ``kv_len``, to which samples are brought.
    seconds : float64 (n_steps, n_rows)
        Exclusive time; 0 where a step lacks the row.
    nbytes : float64 (n_steps, n_rows)
        ``bytes_min``.
    steps : DataFrame
        The steps, as in `Session.steps`.
    """

    rows: list[tuple[Any, ...]]
    context: float
    seconds: Floats
    nbytes: Floats
    steps: pd.DataFrame

    @property
    def totals(self) -> Floats:
        """Seconds of each step, shape (n_steps,)."""
        return np.asarray(self.seconds.sum(axis=1))

    @property
    def middle(self) -> NDArray[np.intp]:
        """Indices of the steps that means are taken over."""
        return central(self.totals)


def central(totals: Floats) -> NDArray[np.intp]:
    """Rank along the last axis and cut `TRIM` off both ends.

    Parameters
    ----------
    totals : float64 (..., n)

    Returns
    -------
    integer array (..., n - 2 * int(TRIM * n))
        Indices into the last axis; all of them where n is below five.
    """
    cut = int(TRIM * totals.shape[-1])
    order = np.argsort(totals, axis=-1, kind="stable")
    return np.asarray(order[..., cut : totals.shape[-1] - cut])


def step_samples(session: Session, keys: Sequence[str], phase: Phase, *, name: str) -> StepSamples:
    """Sum the event rows of each settled step by `keys`.

    Parameters
    ----------
    session
        With at least one step of `phase`.
    keys
        Columns of `Session.events` that stay the same from step to step.
    phase
        Which steps.
    name
        Who asks, for the message.

    Raises
    ------
    ConfigError
        If the session has no step of that phase.
    """
    steps = selected_steps(session.steps, phase)
    events = session.events[session.events["step"].isin(steps["step"])]
    if not len(events):
        hint = "record at least two tokens, e.g. tokens=32" if phase == "decode" else "record a prompt of several tokens"
        raise ConfigError(f"{name}: the session has no {phase} step; {hint}")
    keyed = pd.DataFrame({key: events[key].astype(object) for key in keys})
    row = keyed.groupby(list(keys), sort=False).ngroup().to_numpy()
    rows = [tuple(values) for values in keyed.drop_duplicates().itertuples(index=False, name=None)]
    step = pd.Index(steps["step"]).get_indexer(pd.Index(events["step"]))
    shape = (len(steps), len(rows))

    def summed(column: str) -> Floats:
        sums = np.bincount(step * shape[1] + row, weights=events[column].to_numpy(float), minlength=shape[0] * shape[1])
        return np.asarray(sums, np.float64).reshape(shape)

    order = sorted(range(len(rows)), key=lambda i: _rank(keys, rows[i]))
    seconds, nbytes = summed("exclusive_s")[:, order], summed("bytes_min")[:, order]
    context = steps["kv_len"].to_numpy(float)
    if phase == "decode":
        seconds, nbytes = at_mean_context(seconds, nbytes, context)
    return StepSamples([rows[i] for i in order], float(context.mean()), seconds, nbytes, steps)


def at_mean_context(seconds: Floats, nbytes: Floats, context: Floats) -> tuple[Floats, Floats]:
    """Take out of every row what grows in a straight line with the context; means over all steps stay.

    Parameters
    ----------
    seconds, nbytes : float64 (n_steps, n_rows)
    context : float64 (n_steps,)
        ``kv_len``.

    Returns
    -------
    float64 arrays of the same shapes
        The slope is fitted to the middle steps, where no outlier bends it; which those are depends on the slope, hence
        the three rounds. Less than three different contexts have no slope.
    """
    if len(np.unique(context)) < 3:
        return seconds, nbytes
    off = context - context.mean()
    flat, flat_bytes = seconds, nbytes
    for _ in range(3):
        middle = central(flat.sum(axis=1))
        here = off[middle] - off[middle].mean()
        scale = float(here @ here)
        if scale == 0:
            break
        flat = seconds - np.outer(off, here @ seconds[middle] / scale)
        flat_bytes = nbytes - np.outer(off, here @ nbytes[middle] / scale)
    return flat, flat_bytes


def _rank(keys: Sequence[str], row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Stages in execution order, layers by number, names by alphabet; what comes once a step follows the layers."""
    ranks: list[Any] = []
    for key, value in zip(keys, row, strict=True):
        if key == "stage":
            ranks.append(STAGES.index(value))
        elif key == "layer":
            ranks.append(value if value >= 0 else np.inf)
        else:
            ranks.append(str(value))
    return tuple(ranks)
