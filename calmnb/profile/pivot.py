"""The event table by any of its columns: the general form behind the tables of `calmnb.profile.tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from calmnb.engine.base import Phase
from calmnb.errors import ConfigError
from calmnb.profile.events import EVENT_COLUMNS
from calmnb.profile.tables import selected_steps

__all__ = ["PIVOT_KEYS", "PIVOT_STATISTICS", "PIVOT_VALUES", "added_columns", "pivot"]

#: Columns that rows and columns of a pivot may be named by; so may labels that an outside tool added (``nvtx``).
PIVOT_KEYS = ("run", "step", "phase", "pos", "kv_len", "n_tokens", "layer", "stage", "kernel", "source")

#: What each value of a pivot means. Rows of one step that fall in the same cell are added up before anything else.
PIVOT_VALUES: dict[str, str] = {
    "time_us": "exclusive time in a step, microseconds: cells add up to the step",
    "duration_us": "end minus start, microseconds; rows that overlap both count the overlap",
    "share_percent": "exclusive time over the step's time",
    "calls": "rows in a step",
    "bytes_min": "bytes that must move in a step",
    "bytes_counted": "bytes this code touches in a step",
    "flops": "floating-point operations in a step",
    "gb_per_s": "bytes_min over exclusive time; GB = 1e9 bytes; nan where no bytes must move",
    "gflop_per_s": "flops over exclusive time, 1e9 a second; nan where there are none",
    "flop_per_byte": "flops over bytes_min: arithmetic intensity",
}

_RATIOS = {
    "gb_per_s": ("bytes_min", "time_us", 1e-3),
    "gflop_per_s": ("flops", "time_us", 1e-3),
    "flop_per_byte": ("flops", "bytes_min", 1.0),
}
#: How the steps of a cell become one number.
PIVOT_STATISTICS: dict[str, Callable[[Any], Any]] = {
    "median": lambda by: by.median(),
    "mean": lambda by: by.mean(),
    "std": lambda by: by.std(ddof=0),
    "min": lambda by: by.min(),
    "max": lambda by: by.max(),
    "sum": lambda by: by.sum(min_count=1),
    "p20": lambda by: by.quantile(0.2),
    "p80": lambda by: by.quantile(0.8),
}


def pivot(
    events: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    index: str | Sequence[str],
    columns: str | Sequence[str] = (),
    values: str = "time_us",
    phase: Phase | None = "decode",
    statistic: str = "median",
) -> pd.DataFrame:
    """Pivot the event table; see `calmnb.profile.session.Session.pivot`, whose parameters these are."""
    labels = added_columns(events, numbers=False)
    rows, across = _keys("index", index, labels), _keys("columns", columns, labels)
    keys = [*rows, *across]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if not rows or twice:
        problem = f"{', '.join(twice)} is named twice" if twice else "index names no column"
        raise ConfigError(f"pivot: {problem}; index and columns take different names of {_listed(PIVOT_KEYS, labels)}")
    numbers = added_columns(events, numbers=True)
    for name, value, accepted in (
        ("values", values, [*PIVOT_VALUES, *numbers]),
        ("statistic", statistic, [*PIVOT_STATISTICS]),
    ):
        if value not in accepted:
            raise ConfigError(f"pivot: {name} is {value!r}; accepted are {', '.join(accepted)}")
    if phase not in ("decode", "prefill", None):
        raise ConfigError(f"pivot: phase is {phase!r}; accepted are 'decode', 'prefill' or None for both")
    phases: list[Phase] = ["decode", "prefill"] if phase is None else [phase]
    chosen = pd.concat([selected_steps(steps, each) for each in phases])
    each = _cells(events[events["step"].isin(chosen["step"])], chosen, keys)
    if values in _RATIOS:
        top, bottom, scale = _RATIOS[values]
        sample = scale * each[top].where(each[top] > 0) / each[bottom].where(each[bottom] > 0)
    else:
        sample = each[values]
    by = sample.groupby(level=[f"by {key}" for key in keys], observed=True, sort=True)
    result: pd.Series[Any] = PIVOT_STATISTICS[statistic](by).rename(values)
    result.index = result.index.set_names(keys) if len(keys) > 1 else result.index.rename(keys[0])
    if not across:
        return result.to_frame()
    table: pd.DataFrame = result.unstack(across)
    return table


def added_columns(events: pd.DataFrame, *, numbers: bool) -> list[str]:
    """Columns beyond `EVENT_COLUMNS` that hold amounts (`numbers`: bytes_measured), or else labels (nvtx)."""
    extra = [str(column) for column in events.columns if column not in EVENT_COLUMNS]
    return [column for column in extra if pd.api.types.is_numeric_dtype(events[column]) == numbers]


def _listed(names: Sequence[str], more: Sequence[str]) -> str:
    return ", ".join([*names, *more])


def _keys(name: str, given: str | Sequence[str], labels: list[str]) -> list[str]:
    keys = [given] if isinstance(given, str) else list(given)
    unknown = [key for key in keys if key not in PIVOT_KEYS and key not in labels]
    if unknown:
        raise ConfigError(f"pivot: {name} names {', '.join(map(repr, unknown))}; accepted are {_listed(PIVOT_KEYS, labels)}")
    return keys


def _cells(events: pd.DataFrame, steps: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sums of each step's rows in each cell."""
    frame = pd.DataFrame({f"by {key}": events[key] for key in keys})
    frame["of step"] = events["step"]
    frame["time_us"], frame["duration_us"] = events["exclusive_s"] * 1e6, events["duration_s"] * 1e6
    frame["calls"] = np.ones(len(events), np.int64)
    sums = ["bytes_min", "bytes_counted", "flops", *added_columns(events, numbers=True)]
    frame[sums] = events[sums]
    labels = ["of step", *(f"by {key}" for key in keys)]
    out = frame.groupby(labels, observed=True)[["time_us", "duration_us", "calls", *sums]].sum()
    whole = steps.set_index("step")["duration_s"].reindex(out.index.get_level_values("of step")).to_numpy() * 1e6
    out["share_percent"] = 100.0 * out["time_us"] / np.where(whole > 0, whole, np.nan)
    return out
