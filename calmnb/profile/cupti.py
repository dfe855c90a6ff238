"""Kernel records of CUPTI, NVIDIA's profiling library, through ``cupti-python``: the driver's own view of a step.

Records carry the graph and the node that a kernel ran as, so they map to layers and stages by the order of the nodes. What
CUPTI adds to a step is large (about 100 to 230 us on an H200), so this checks the other time sources; it does not replace them.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from calmnb.engine.base import Kernel
from calmnb.errors import CalmnbError, DeviceError
from calmnb.profile.attribution import HOLD_KERNELS
from calmnb.profile.recorder import SessionRecorder, StepRecord

__all__ = [
    "KernelRecord",
    "cupti_problem",
    "kernel_excess",
    "step_records",
    "trace_kernels",
    "trace_launches",
    "trace_steps",
]

_BUFFER_BYTES = 8 << 20


class KernelRecord(NamedTuple):
    """One kernel as CUPTI saw it; times in nanoseconds on its clock, ids 0 where it gives none."""

    name: str
    start: int
    end: int
    launch: int  # correlation id: kernels of one graph launch share it
    graph: int
    node: int


def cupti_problem() -> str:
    """Why CUPTI cannot be asked, or an empty string."""
    if importlib.util.find_spec("cupti") is None:
        return "cupti-python is not installed; pip install cupti-python (Linux, CUDA 13), or leave CUPTI out"
    try:
        from cupti import cupti  # noqa: F401
    except ModuleNotFoundError as error:  # cupti-python imports more than kernel records need
        return f"cupti-python lacks a package that it needs, {error.name}; pip install --upgrade cupti-python pyelftools"
    except Exception as error:  # a missing or mismatched libcupti shows up as any of several errors
        return f"cupti-python cannot be used ({type(error).__name__}: {error}); it must fit the driver's CUDA version"
    return ""


class _Sink:
    """Where CUPTI's callbacks leave records. They can be registered once a process, and come on a thread of CUPTI's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: list[KernelRecord] = []
        self.registered = False
        self.busy = False

    def requested(self) -> tuple[int, int]:
        return _BUFFER_BYTES, 0

    def completed(self, activities: Sequence[Any]) -> None:
        made = [
            KernelRecord(a.name, a.start, a.end, a.correlation_id, a.graph_id, a.graph_node_id)
            for a in activities
            if hasattr(a, "graph_node_id") and hasattr(a, "registers_per_thread")
        ]
        with self.lock:
            self.records += made


_SINK = _Sink()


@contextmanager
def trace_kernels() -> Iterator[list[KernelRecord]]:
    """Record every kernel of the block; the list is complete once the block has ended. Wait for the GPU within it.

    Raises
    ------
    DeviceError
        If CUPTI cannot be used; says why, and what to do.
    """
    problem = cupti_problem()
    if problem:
        raise DeviceError(f"kernel records of CUPTI were asked for, but {problem}")
    from cupti import cupti

    if _SINK.busy:
        raise DeviceError("kernel records of CUPTI are being taken already; wait for that to end")
    out: list[KernelRecord] = []
    _SINK.busy = True
    try:
        if not _SINK.registered:
            cupti.activity_register_callbacks(_SINK.requested, _SINK.completed)
            _SINK.registered = True
        cupti.activity_flush_all(1)  # what earlier work left behind
        with _SINK.lock:
            _SINK.records.clear()
        cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
        try:
            yield out
        finally:
            # Flush and disable, never finalize: after that the next use in the process fails.
            cupti.activity_flush_all(1)
            cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)
        with _SINK.lock:
            out += _SINK.records
    except CalmnbError:
        raise
    except cupti.cuptiError as error:
        raise DeviceError(
            f"CUPTI failed: {error}. Another profiler may hold it (nsys, ncu, a debugger): run without that, "
            "or take times by stamps or events"
        ) from error
    finally:
        _SINK.busy = False


def step_records(records: Sequence[KernelRecord], engine: Any, first_pos: int, n: int) -> list[StepRecord]:
    """Find decode steps among CUPTI's records and name their kernels.

    Parameters
    ----------
    records
        From `trace_kernels`, in any order.
    engine
        The CUDA engine that ran: its programs say what each node of a step's graph is.
    first_pos, n
        Position of the first decode step, and how many there were.

    Returns
    -------
    list of StepRecord
        In order; times in seconds on CUPTI's clock.

    Raises
    ------
    DeviceError
        If records are missing or are not those of the engine's steps.
    """
    launches: dict[int, list[KernelRecord]] = {}
    for record in records:
        if record.graph:
            launches.setdefault(record.launch, []).append(record)
    in_order = sorted(launches.values(), key=lambda part: min(r.start for r in part))
    sizes = {len(engine.program_at(ending, first_pos + i).kernels) for ending in ("greedy", "draw") for i in (0, n - 1)}
    steps = [part for part in in_order if len(part) in sizes][-n:]  # the prompt's steps came before
    if len(steps) != n:
        raise DeviceError(
            f"CUPTI delivered {len(steps)} of {n} steps ({len(records)} kernel records, {len(launches)} graph launches); "
            "take fewer steps, or times by stamps or events"
        )
    origin = min(record.start for part in steps for record in part)
    return [_step(part, engine, first_pos + i, origin) for i, part in enumerate(steps)]


def _step(part: list[KernelRecord], engine: Any, pos: int, origin: int) -> StepRecord:
    # Nodes are numbered in the order of their capture; without numbers, or under another order, a kernel still starts
    # no earlier than the one it depends on.
    orders = (sorted(part, key=lambda r: (r.node, r.start)), sorted(part, key=lambda r: (r.start, r.node)))
    for ending in ("greedy", "draw"):
        program = engine.program_at(ending, pos)
        wanted = [one.kernel.name for one in program.launches[: len(program.kernels)]]
        found = next((order for order in orders if [r.name for r in order] == wanted), None)
        if found is not None:
            break
    else:
        raise DeviceError(
            f"the kernels that CUPTI saw of the step at position {pos} are not those of the engine's graph, or come in another "
            f"order: {', '.join(r.name for r in orders[0][:8])} ...; take times by stamps or events"
        )
    starts = np.array([r.start - origin for r in found], np.float64) * 1e-9
    ends = np.array([r.end - origin for r in found], np.float64) * 1e-9
    kernels: tuple[Kernel, ...] = program.kernels
    return StepRecord(
        0, "decode", pos, engine.runner.kv_len(pos), 1, kernels, starts, ends, float(starts.min()), float(ends.max())
    )  # fmt: skip


def kernel_excess(engine: Any, *, n: int = 65) -> float:
    """Seconds that CUPTI counts for a kernel beyond the time that the kernel itself saw: its launch and its drain.

    Measured with a kernel of a block a multiprocessor that notes its own first start and last end, median of `n`; 0 where
    CUPTI gave no record of it.

    Raises
    ------
    DeviceError
        As `trace_kernels`.
    """
    with trace_kernels() as records:
        _, own = engine.runner.events.time_stays(n, 5_000, engine.gpu.sm_count)
    seen = [1e-9 * (r.end - r.start) for r in records if r.name == "hold_time"]
    return statistics.median(seen) - statistics.median(own) if seen else 0.0


def trace_steps(engine: Any, pos: int, n: int) -> list[StepRecord]:
    """Decode `n` greedy tokens from `pos` under CUPTI, unrecorded otherwise, and return the steps.

    Raises
    ------
    DeviceError
        As `trace_kernels` and `step_records`.
    """
    before, engine.recorder = engine.recorder, None
    try:
        with trace_kernels() as records:
            engine.graphs.forget()  # CUPTI knows the nodes of graphs that it saw being made
            for _ in engine.decode_many(1, pos, n):
                pass
    finally:
        engine.recorder = before
    return step_records(records, engine, pos, n)


def trace_launches(engine: Any, pos: int, n: int) -> list[StepRecord]:
    """As `trace_steps`, of kernels that the time source "events" launches, one by one: the very launches that events time.

    Raises
    ------
    DeviceError
        As `trace_kernels`, or if records are missing.
    """
    before = engine.recorder, engine.time_source
    try:
        engine.recorder, engine.time_source = SessionRecorder({}), "events"
        with trace_kernels() as records:
            for _ in engine.decode_many(1, pos, n):
                pass
    finally:
        engine.recorder, engine.time_source = before
    mine = sorted((r for r in records if r.name not in HOLD_KERNELS), key=lambda r: r.start)
    size = len(engine.program_at("greedy", pos).kernels)
    if len(mine) != n * size:
        raise DeviceError(
            f"CUPTI delivered {len(mine)} of the {n * size} kernel records of {n} steps; "
            "take fewer steps, or times by stamps or events"
        )
    return [_step(mine[i * size : (i + 1) * size], engine, pos + i, mine[0].start) for i in range(n)]
