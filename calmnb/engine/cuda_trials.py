"""What benchmarks and checks ask of the CUDA engine beyond decoding: its clock, its programs, steps timed in bulk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine.base import EngineInfo, Recorder, TimeSource
from calmnb.engine.cuda_device import Gpu
from calmnb.engine.cuda_graphs import KernelSet, StepGraphs
from calmnb.engine.cuda_memory import MemoryPlan
from calmnb.engine.cuda_ops import sample_params, state_words
from calmnb.engine.cuda_program import Ending, StepProgram
from calmnb.engine.cuda_runner import StepRunner
from calmnb.engine.cuda_stamps import StampLevel
from calmnb.engine.cuda_weights import fill_random
from calmnb.engine.positions import Positions
from calmnb.errors import ConfigError
from calmnb.sampler import Sampling

__all__ = ["CudaTrials"]


class CudaTrials:
    """Part of `calmnb.engine.cuda.CudaEngine`, which owns all that is used here."""

    config: ModelConfig
    info: EngineInfo
    kv_dtype: KvDtype
    memory_plan: MemoryPlan
    seq_len: int
    _cache: int
    _gpu: Gpu
    _kernels: KernelSet
    _plans: Any
    _positions: Positions
    _runner: StepRunner
    _steps: StepGraphs
    _work: dict[str, int]

    def _enter(self, pos: int, n: int) -> None:
        raise NotImplementedError

    def _put(self, address: int, data: NDArray[np.uint8]) -> None:
        raise NotImplementedError

    @property
    def time_source(self) -> TimeSource:
        """How kernels are timed while there is a recorder: "stamps" (the default), "stamps-light" or "events".

        "stamps": kernels of the graph note when they began and when the one before them had ended, on the GPU's own clock.
        "stamps-light": the ends alone, so that no overlap is seen. Where kernels cannot overlap (GPUs before sm_90),
        "stamps" is the first block's start and the last block's end, "stamps-light" block 0's.
        "events": kernels are launched one by one between CUDA events, inside NVTX ranges, and do not overlap.

        Raises
        ------
        ConfigError
            When set to anything else.
        """
        return self._runner.source

    @time_source.setter
    def time_source(self, source: TimeSource) -> None:
        self._runner.source = source
        self.info = replace(self.info, time_source=source)

    @property
    def runner(self) -> StepRunner:
        """What runs steps and times them."""
        return self._runner

    @property
    def graphs(self) -> StepGraphs:
        """The graphs of a step."""
        return self._steps

    @property
    def gpu(self) -> Gpu:
        """The device underneath."""
        return self._gpu

    @property
    def short_max(self) -> int:
        """Positions up to which a step takes the attention kernel for short contexts."""
        return int(self._plans.attention.short_max)

    def pretend_cached(self, n: int) -> None:
        """Fill the KV cache with random numbers and take the first `n` positions as cached: speed at a context, without
        feeding one."""
        if n > self.seq_len:
            raise ConfigError(f"{n} cached positions were asked for; the cache has {self.seq_len}")
        self._gpu.use()
        bits = 16 if self.kv_dtype == "fp16" else 8
        fill_random(self._gpu, self._kernels, self._cache, self.memory_plan.cache, seed=99, bits=bits, scale=1.0)
        self._gpu.wait()
        self._positions.end = n

    def time_graph(self, pos: int, n: int, *, level: int = 0) -> float:
        """Seconds a step, of `n` greedy steps from `pos` queued back to back: the GPU's own time, without the loop.

        `level` is what kernels note meanwhile (`calmnb.engine.cuda_stamps.StampLevel`).
        """
        self._start_greedy(pos, level)

        def queue() -> None:
            for i in range(n):
                self._steps.run("greedy", level, pos + i)

        seconds = self._gpu.time_call(queue) / n
        self._runner.discard()
        return seconds

    def time_steps(self, pos: int, n: int, recorder: Recorder, *, level: int) -> tuple[list[float], list[float]]:
        """Record `n` stamped greedy steps queued back to back, each between two CUDA events: a check of the stamps.

        Parameters
        ----------
        pos, n
            First position, and how many.
        recorder
            Gets the steps.
        level
            What kernels note (`calmnb.engine.cuda_stamps.StampLevel`), not 0.

        Returns
        -------
        step_s : list of float, n
            Seconds between the two events.
        moving_s : list of float, n - 1
            Part of it that went to moving the stamps, after the step's last kernel; not known of the last step.
        """
        self._start_greedy(pos, level)
        gpu, pairs = self._gpu, []
        for i in range(n):
            before = gpu.mark()
            self._steps.run("greedy", level, pos + i)
            pairs.append((before, gpu.mark()))
        gpu.wait()
        stamps = self._steps.stamps
        assert stamps is not None
        edges = []
        for i in range(n):
            stamps.forward(recorder, "decode", pos + i, self._positions.length(pos + i))
            edges.append(stamps.edges)
        moving = [after.moved_before - before.last_end for before, after in itertools.pairwise(edges)]
        return [gpu.between(before, after) for before, after in pairs], moving

    def _start_greedy(self, pos: int, level: int) -> None:
        self._enter(pos, 1)
        self._steps.prepare("greedy", level, pos)
        self._put(self._work["params"], np.frombuffer(bytes(sample_params(Sampling(), 1, self.config.vocab_size)), np.uint8))
        self._put(self._work["state"], np.array(state_words(1, pos, self.seq_len), np.int32).view(np.uint8))

    def program(self, ending: Ending, *, stamped: bool = False, short: bool = False) -> StepProgram:
        """List the launches of a step that ends in `ending`, with or without the stamps of recorded steps."""
        level = self._runner.level_of(self._runner.source) if stamped else StampLevel.OFF
        return self._steps.program(ending, level=level, short=short)

    def program_at(self, ending: Ending, pos: int) -> StepProgram:
        """List the launches of the step at `pos`, without stamps."""
        return self._steps.at(ending, pos)
