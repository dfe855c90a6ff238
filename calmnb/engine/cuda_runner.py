"""How a step is run while it is being recorded: by stamps inside the graph, or kernel by kernel between events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

from calmnb.config import ModelConfig
from calmnb.engine.base import Phase, Recorder, TimeSource
from calmnb.engine.cuda_device import Gpu
from calmnb.engine.cuda_events import EventSteps, EventTimes, StepRanges
from calmnb.engine.cuda_graphs import KernelSet, StepGraphs
from calmnb.engine.cuda_program import Ending
from calmnb.engine.cuda_stamps import StampLevel
from calmnb.errors import ConfigError

__all__ = ["ENGINE_SOURCES", "StepRunner"]

#: Time sources of the CUDA engine.
ENGINE_SOURCES: tuple[TimeSource, ...] = ("stamps", "stamps-light", "events")


class StepRunner:
    """Queues steps and hands their times to a recorder.

    Parameters
    ----------
    gpu, graphs, kernels
        Device, the engine's graphs and compiled kernels.
    config, kv_dtype
        The model, for the bytes that NVTX ranges carry.
    kv_len
        Positions that a step at a position attends to.

    Attributes
    ----------
    kv_len : callable
        As given.
    """

    def __init__(
        self,
        gpu: Gpu,
        graphs: StepGraphs,
        kernels: KernelSet,
        config: ModelConfig,
        kv_dtype: str,
        kv_len: Callable[[int], int],
    ) -> None:
        self._gpu, self._graphs, self._kernels = gpu, graphs, kernels
        self._config, self._kv_dtype, self.kv_len = config, kv_dtype, kv_len
        self._source: TimeSource = "stamps"
        self._events: EventSteps | None = None
        self._timed: list[EventTimes] = []

    @property
    def source(self) -> TimeSource:
        """How recorded steps are timed: "stamps", "stamps-light" or "events"."""
        return self._source

    @source.setter
    def source(self, source: TimeSource) -> None:
        if source not in ENGINE_SOURCES:
            why = ", which listens from outside" if source in get_args(TimeSource) else ""
            raise ConfigError(f"the CUDA engine cannot time by {source!r}{why}; accepted are {', '.join(ENGINE_SOURCES)}")
        self._source = source

    @property
    def events(self) -> EventSteps:
        """What runs steps kernel by kernel."""
        if self._events is None:
            self._events = EventSteps(self._gpu, self._kernels, self._config, self._kv_dtype)
        return self._events

    def level(self, recorder: Recorder | None) -> StampLevel:
        """What the kernels of a step note."""
        return self.level_of(self._source) if recorder is not None else StampLevel.OFF

    def level_of(self, source: TimeSource) -> StampLevel:
        """What kernels note where `source` is the time source, on this GPU."""
        if not source.startswith("stamps"):
            return StampLevel.OFF
        light = source == "stamps-light"
        if self._gpu.has_pdl and self._graphs.overlap:
            return StampLevel.HANDED_OVER_ENDS if light else StampLevel.HANDED_OVER
        return StampLevel.BLOCK_0 if light else StampLevel.BLOCKS

    def ahead(self, recorder: Recorder | None, steps: int) -> int:
        """Steps that may be queued beyond the one asked for: none where each is waited for."""
        return 0 if recorder is not None and self._source == "events" else steps

    def prepare(self, ending: Ending, pos: int, recorder: Recorder | None) -> None:
        """Compile and capture what a step at `pos` needs, so that no later step waits for it."""
        self._graphs.prepare(ending, self.level(recorder), pos)

    def run(self, ending: Ending, phase: Phase, pos: int, recorder: Recorder | None) -> None:
        """Queue the step at `pos`; by events, also wait for it."""
        if recorder is not None and self._source == "events":
            program = self._graphs.at(ending, pos)
            self._timed.append(self.events.run(program, phase, pos, self.kv_len(pos)))
            return
        with nullcontext() if recorder is None else self.ranges(phase, pos, self.kv_len(pos)):
            self._graphs.run(ending, self.level(recorder), pos)

    def ranges(self, phase: Phase, pos: int, kv_len: int, n_tokens: int = 1) -> StepRanges:
        """NVTX ranges of a step: of the step alone where a graph runs it, of layers and stages where a tool can tell them."""
        return StepRanges(self._config, self._kv_dtype, phase, pos, kv_len, n_tokens)

    def forward(self, recorder: Recorder, phase: Phase, pos: int) -> None:
        """Hand the oldest step not yet handed over to `recorder`."""
        kv_len = self.kv_len(pos)
        if self._timed:
            times = self._timed.pop(0)
            recorder.add(phase, pos, kv_len, 1, *times)
        elif self._graphs.stamps is not None:
            self._graphs.stamps.forward(recorder, phase, pos, kv_len)

    def discard(self) -> None:
        """Forget the steps that ran but that nobody will ask for."""
        self._timed.clear()
        if self._graphs.stamps is not None:
            self._graphs.stamps.skip()

    def describe(self) -> dict[str, Any]:
        """What a session should say about how its times were taken."""
        if self._source != "events":
            return {}
        return {"event_overhead_s": self.events.overhead_s} if self._events is not None else {}
