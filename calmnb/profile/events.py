"""From raw step records to tidy columns: exclusive times, the gap of each step, bytes and FLOPs of each row.

Two kernels may be alive at once (programmatic dependent launch on GPUs). A row's *exclusive* time runs from the later
of its own start and every predecessor's end to its own end, so the exclusive times of a step never overlap, and with the
``gap`` row (what no kernel covers) they sum to the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.engine.base import STAGES, Kernel, Stage
from calmnb.engine.stages import StageCost, stage_cost
from calmnb.profile.recorder import StepRecord

__all__ = ["CATEGORIES", "EVENT_COLUMNS", "STEP_COLUMNS", "Columns", "build_columns", "exclusive_times"]

Columns = dict[str, NDArray[Any]]
Rows = tuple[NDArray[Any], ...]

#: Columns of `Session.events`, one row a kernel, choice of token, or gap of a step.
EVENT_COLUMNS: dict[str, str] = {
    "run": "prompt-and-answer this belongs to, from 0",
    "step": "row of `Session.steps`",
    "phase": '"prefill" (several prompt tokens at once) or "decode" (one token)',
    "pos": "position of the step's first token",
    "kv_len": "positions the step's last token attends to",
    "n_tokens": "tokens computed together",
    "layer": "layer, from 0; -1 outside the layers",
    "stage": "stage of the step; `sample` chooses the next token, `other` is work of no known stage, `gap` what no row covers",
    "kernel": "the engine's name of the code that ran",
    "start_s": "start, seconds after the first step's start",
    "duration_s": "end minus start, seconds; overlapping rows both count the overlap",
    "exclusive_s": "end minus the later of own start and every predecessor's end, seconds; sums to the step",
    "bytes_min": "bytes any implementation must move; 0 for sample and gap",
    "bytes_counted": "bytes this code touches, activations, norms and biases included",
    "flops": "floating-point operations, a multiply-add counting as two",
    "source": "how the row was timed: stamps, stamps-light, events, cupti, nsys or cpu",
}

#: Columns of `Session.steps`, one row a step of the engine.
STEP_COLUMNS: dict[str, str] = {
    "run": "prompt-and-answer this belongs to, from 0",
    "step": "its number, from 0",
    "phase": '"prefill" or "decode"',
    "pos": "position of the step's first token",
    "kv_len": "positions the step's last token attends to",
    "n_tokens": "tokens computed together; 0 for a choice of token without a recorded step",
    "token": "id chosen after the step, -1 unknown",
    "text": "that token as text, empty if unknown",
    "start_s": "start, seconds after the first step's start",
    "forward_s": "the forward pass, seconds",
    "sample_s": "choosing the token, seconds; 0 unknown",
    "duration_s": "forward_s + sample_s: the sum of the step's event rows",
    "interval_s": "from the previous decode step's start to this one's, host work included; nan for a run's first",
    "bytes_min": "sum over the step's rows",
    "bytes_counted": "sum over the step's rows",
    "kv_bytes": "bytes_min of the attention rows: the KV cache read",
    "flops": "sum over the step's rows",
    "warmup": "one of a run's first decode steps (settings.warmup, 1 by default): left out of decode statistics",
}

#: Columns that hold one of few strings.
CATEGORIES: dict[str, tuple[str, ...]] = {"phase": ("prefill", "decode"), "stage": tuple(STAGES)}

_STAGE_CODE = {stage: code for code, stage in enumerate(STAGES)}


def exclusive_times(
    starts: NDArray[np.float64], ends: NDArray[np.float64], step_start: float, step_end: float
) -> NDArray[np.float64]:
    """Part of the step that each row has to itself.

    Parameters
    ----------
    starts, ends : float64 (n,)
        Seconds, in execution order; may overlap.
    step_start, step_end : float
        Seconds; what lies outside is not counted.

    Returns
    -------
    float64 array, shape (n,)
        Seconds, >= 0, with a sum of at most ``step_end - step_start``.
    """
    if len(starts) == 0:
        return np.empty(0)
    own_start, own_end = np.clip(starts, step_start, step_end), np.clip(ends, step_start, step_end)
    before = np.concatenate(([step_start], np.maximum.accumulate(own_end)[:-1]))
    return np.maximum(own_end - np.maximum(own_start, before), 0.0)


class _Rows:
    """What is the same in every step with one tuple of kernels."""

    def __init__(self, kernels: Sequence[Kernel], names: dict[str, int]) -> None:
        self.kernels = kernels  # kept alive: the cache below is keyed by identity
        self.stage = np.array([_STAGE_CODE[k.stage] for k in kernels], np.int16)
        self.layer = np.array([k.layer for k in kernels], np.int32)
        self.name = np.array([names.setdefault(k.name, len(names)) for k in kernels], np.int16)
        # A stage's cost is declared for the stage. Where several kernels share one, the first carries it.
        first = {(k.stage, k.layer): i for i, k in reversed(list(enumerate(kernels)))}
        self.carries = np.array([first[k.stage, k.layer] == i for i, k in enumerate(kernels)], np.int64)


class _Costs:
    """Bytes and FLOPs of every stage, computed once for each (kv_len, n_tokens)."""

    def __init__(self, config: ModelConfig | None, kv_dtype: str, has_bias: bool) -> None:
        self._config, self._kv_dtype, self._has_bias = config, kv_dtype, has_bias
        self._known: dict[tuple[int, int], NDArray[np.int64]] = {}

    def table(self, kv_len: int, n_tokens: int) -> NDArray[np.int64]:
        """int64 array, shape (len(STAGES), 3): bytes_min, bytes_counted, flops."""
        key = (kv_len, n_tokens)
        if key not in self._known:
            self._known[key] = np.array([self._cost(kv_len, n_tokens, stage) for stage in STAGES], np.int64)
        return self._known[key]

    def _cost(self, kv_len: int, n_tokens: int, stage: Stage) -> StageCost:
        if self._config is None:
            return StageCost(0, 0, 0)
        kwargs: dict[str, Any] = {"kv_dtype": self._kv_dtype, "n_tokens": n_tokens, "has_bias": self._has_bias}
        return stage_cost(self._config, stage, kv_len, **kwargs)


def build_columns(
    records: Sequence[StepRecord],
    *,
    config: ModelConfig | None,
    kv_dtype: str = "fp16",
    has_bias: bool = False,
    source: str = "cpu",
    warmup: int = 1,
    token_text: Callable[[int], str] | None = None,
) -> tuple[Columns, Columns, dict[str, tuple[str, ...]]]:
    """Turn step records into the columns of `EVENT_COLUMNS` and `STEP_COLUMNS`.

    Parameters
    ----------
    records
        Steps in order.
    config
        The model, for bytes and FLOPs; None leaves them 0.
    kv_dtype, has_bias
        What `stage_cost` wants to know besides.
    source
        The engine's time source.
    warmup
        Decode steps at the start of each run to flag as warm-up.
    token_text
        Text of a token id; None leaves the text empty.

    Returns
    -------
    events, steps : dict of arrays
        Categorical columns as int16 codes.
    labels : dict
        Labels of every categorical column.
    """
    names: dict[str, int] = {}
    rows_of: dict[int, _Rows] = {}
    costs = _Costs(config, kv_dtype, has_bias)
    origin = records[0].step_start if records else 0.0
    parts: list[Rows] = []
    steps: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    run, decoded, previous = -1, 0, math.nan
    for index, r in enumerate(records):
        rows = rows_of.get(id(r.kernels))
        if rows is None:
            rows = rows_of[id(r.kernels)] = _Rows(r.kernels, names)
        if r.run != run:
            run, decoded, previous = r.run, 0, math.nan
        own = exclusive_times(r.starts, r.ends, r.step_start, r.step_end)
        forward = r.step_end - r.step_start
        sample = 0.0 if math.isnan(r.sample_end) else max(r.sample_end - max(r.sample_start, r.step_end), 0.0)
        cost = costs.table(r.kv_len, r.n_tokens)[rows.stage] * rows.carries[:, None]
        here = np.full(len(own), index, np.int64)
        parts.append((rows.stage, rows.layer, rows.name, r.starts - origin, r.ends - r.starts, own, cost, here))
        # A device that chooses tokens inside the step has a row for it already, and the loop reports no time of its own.
        inside = sample == 0.0 and bool((rows.stage == _STAGE_CODE["sample"]).any())
        if not math.isnan(r.sample_end) and not inside:
            parts.append(_single("sample", names, max(r.sample_start, r.step_end) - origin, sample, index))
        gap = max(forward - float(own.sum()), 0.0)
        parts.append(_single("gap", names, r.step_start - origin, gap, index))
        decode = r.phase == "decode" and r.n_tokens > 0
        attention = rows.stage == _STAGE_CODE["attention"]
        total = cost.sum(axis=0)
        for name, value in (
            ("run", r.run), ("step", index), ("phase", CATEGORIES["phase"].index(r.phase)), ("pos", r.pos),
            ("kv_len", r.kv_len), ("n_tokens", r.n_tokens), ("token", r.token),
            ("text", token_text(r.token) if token_text and r.token >= 0 else ""),
            ("start_s", r.step_start - origin), ("forward_s", forward), ("sample_s", sample), ("duration_s", forward + sample),
            ("interval_s", r.step_start - previous if decode else math.nan),
            ("bytes_min", total[0]), ("bytes_counted", total[1]),
            ("kv_bytes", cost[attention, 0].sum()), ("flops", total[2]),
            ("warmup", decode and decoded < warmup),
        ):  # fmt: skip
            steps[name].append(value)
        if decode:
            decoded, previous = decoded + 1, r.step_start
    labels = {**CATEGORIES, "kernel": tuple(names), "source": (source,)}
    return _gather(parts, records, names, source), _step_arrays(steps), labels


def _single(stage: Stage, names: dict[str, int], start: float, duration: float, index: int) -> Rows:
    """One row outside the layers that moves no bytes; its kernel has the stage's name."""
    code, seconds = names.setdefault(stage, len(names)), np.array([duration])
    return (
        np.array([_STAGE_CODE[stage]], np.int16),
        np.array([-1], np.int32),
        np.array([code], np.int16),
        np.array([start]),
        seconds,
        seconds,
        np.zeros((1, 3), np.int64),
        np.array([index], np.int64),
    )


def _gather(parts: list[Rows], records: Sequence[StepRecord], names: dict[str, int], source: str) -> Columns:
    if not parts:
        parts = [tuple(column[:0] for column in _single("gap", names, 0.0, 0.0, 0))]
    stage, layer, name, start, duration, own, cost, step = (np.concatenate(column) for column in zip(*parts, strict=True))

    def of_step(values: list[int], dtype: type) -> NDArray[Any]:
        return np.array(values, dtype)[step] if values else np.empty(0, dtype)

    return {
        "run": of_step([r.run for r in records], np.int32),
        "step": step,
        "phase": of_step([CATEGORIES["phase"].index(r.phase) for r in records], np.int16),
        "pos": of_step([r.pos for r in records], np.int64),
        "kv_len": of_step([r.kv_len for r in records], np.int64),
        "n_tokens": of_step([r.n_tokens for r in records], np.int64),
        "layer": layer,
        "stage": stage,
        "kernel": name,
        "start_s": start,
        "duration_s": duration,
        "exclusive_s": own,
        "bytes_min": cost[:, 0],
        "bytes_counted": cost[:, 1],
        "flops": cost[:, 2],
        "source": np.zeros(len(step), np.int16),
    }


def _step_arrays(steps: dict[str, list[Any]]) -> Columns:
    kinds: dict[str, Any] = {"run": np.int32, "phase": np.int16, "warmup": np.bool_, "text": object}
    kinds |= dict.fromkeys((name for name in steps if name.endswith("_s")), np.float64)
    return {name: np.array(values, kinds.get(name, np.int64)) for name, values in steps.items()}
