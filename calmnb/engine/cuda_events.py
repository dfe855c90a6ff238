"""A step kernel by kernel: each launched alone between two CUDA events, inside nested NVTX ranges.

This is what users of Nsight Systems and Nsight Compute expect to see, and what stamps are checked against. It serialises:
kernels that overlap in the graph run one after the other, so a step takes longer than at full speed.

Launches from Python are slower than the kernels. So the stream is held by a kernel that waits for the host, and let go when
a group of launches is queued; the events then see the GPU's own pace. The wait is bounded: a tool that runs kernels one at a
time, as Nsight Compute does, makes it slow, not stuck.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel, Phase
from calmnb.engine.cuda_device import Gpu, Launch
from calmnb.engine.cuda_graphs import KernelSet
from calmnb.engine.cuda_program import StepProgram
from calmnb.engine.stages import stage_cost
from calmnb.kernels import KernelSpec

__all__ = ["DOMAIN", "EventSteps", "EventTimes", "StepRanges", "step_name"]

#: NVTX domain of every range.
DOMAIN = "calmnb"

#: Kernels queued while the stream is held: a stream takes about a thousand launches before it makes the host wait.
_GROUP = 64
_LIMIT_NS = 20_000_000
_CALIBRATION, _STAY_NS = 65, 5_000


class EventTimes(NamedTuple):
    """Times of one step, seconds on the clock of ``time.perf_counter``; arrays have a row a kernel."""

    kernels: tuple[Kernel, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    begin: float
    end: float


def step_name(phase: Phase, pos: int, kv_len: int, n_tokens: int = 1) -> str:
    """Name of a step's range, which `calmnb.profile.attribution.step_of_range` reads.

    Examples
    --------
    >>> step_name("decode", 12, 13), step_name("prefill", 0, 24, 24)
    ('decode pos=12 kv_len=13', 'prefill pos=0 n_tokens=24 kv_len=24')
    """
    count = f" n_tokens={n_tokens}" if phase == "prefill" else ""
    return f"{phase} pos={pos}{count} kv_len={kv_len}"


class StepRanges:
    """NVTX ranges of one step, in the domain `DOMAIN`: step > ``layer 3`` > stage.

    A stage's range carries ``bytes_min`` as its payload, once however many kernels the stage has.

    Parameters
    ----------
    config, kv_dtype
        What bytes are computed from.
    phase, pos, kv_len, n_tokens
        The step.
    """

    def __init__(self, config: ModelConfig, kv_dtype: str, phase: Phase, pos: int, kv_len: int, n_tokens: int = 1) -> None:
        import nvtx

        self._nvtx = nvtx
        self._config, self._kv_dtype, self._kv_len, self._n_tokens = config, kv_dtype, kv_len, n_tokens
        self._name = step_name(phase, pos, kv_len, n_tokens)
        self._open: list[str] = []
        self._at: tuple[int, str] | None = None
        self._costs: dict[str, int] = {}

    def __enter__(self) -> StepRanges:
        self._push(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pop_to(0)

    def enter(self, kernel: Kernel) -> None:
        """Open the ranges of `kernel`'s layer and stage, closing those of the kernel before where they differ."""
        at = (kernel.layer, kernel.stage)
        if self._at == at:
            return
        stays = self._at is not None and self._at[0] == kernel.layer >= 0
        self._pop_to(2 if stays else 1)
        if kernel.layer >= 0 and not stays:
            self._push(f"layer {kernel.layer}")
        self._push(kernel.stage, payload=self._bytes(kernel))
        self._at = at

    def leave(self) -> None:
        """Close the ranges of layer and stage."""
        self._pop_to(1)
        self._at = None

    def follow(self, kernel: Kernel) -> None:
        """Open the ranges of what a batch of prompt tokens does after `kernel`."""
        order = ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")
        if kernel.stage == "output":
            self.leave()
        elif kernel.stage in order[:-1]:
            self.enter(Kernel(order[order.index(kernel.stage) + 1], kernel.layer, ""))  # type: ignore[arg-type]
        elif kernel.layer + 1 < self._config.n_layers:
            self.enter(Kernel("matmul_qkv", kernel.layer + 1, ""))
        else:
            self.enter(Kernel("output", -1, ""))

    def _bytes(self, kernel: Kernel) -> int:
        if kernel.stage not in self._costs:
            cost = stage_cost(self._config, kernel.stage, self._kv_len, kv_dtype=self._kv_dtype, n_tokens=self._n_tokens)
            self._costs[kernel.stage] = cost.bytes_min
        return self._costs[kernel.stage]

    def _push(self, name: str, **options: Any) -> None:
        self._nvtx.push_range(name, domain=DOMAIN, **options)
        self._open.append(name)

    def _pop_to(self, depth: int) -> None:
        while len(self._open) > depth:
            self._nvtx.pop_range(domain=DOMAIN)
            self._open.pop()


class EventSteps:
    """Runs the kernels of a step one by one and times each by a pair of CUDA events.

    Parameters
    ----------
    gpu, kernels
        Device and compiled kernels.
    config, kv_dtype
        For the bytes that ranges carry.

    Attributes
    ----------
    overhead_s : float
        Seconds that a pair of events adds to the kernel between them: the way from the first event to the kernel and from its
        last block to the second event. Measured at the first step, with a kernel that times itself, and taken off every
        kernel's time; -1 before.
    """

    def __init__(self, gpu: Gpu, kernels: KernelSet, config: ModelConfig, kv_dtype: str) -> None:
        self._gpu = gpu
        self._config, self._kv_dtype = config, kv_dtype
        self._hold_kernel, self._timed_kernel = (kernels(KernelSpec(name, "cache.cu")) for name in ("hold_stream", "hold_time"))
        self._flag = gpu.pinned(64).view(np.uint32)
        self._ticket = 0
        self._alone: dict[int, tuple[StepProgram, tuple[Launch, ...]]] = {}
        self.overhead_s = -1.0

    def run(self, program: StepProgram, phase: Phase, pos: int, kv_len: int) -> EventTimes:
        """Run one step of single tokens, wait for it, and return its times."""
        if self.overhead_s < 0:
            pairs, own = self.time_stays(_CALIBRATION, _STAY_NS, self._gpu.sm_count)
            self.overhead_s = statistics.median(pair - kernel for pair, kernel in zip(pairs, own, strict=True))
        gpu, launches = self._gpu, self._launches(program)
        marks: list[tuple[Any, Any]] = []
        began = time.perf_counter()
        with StepRanges(self._config, self._kv_dtype, phase, pos, kv_len) as ranges:
            for first in range(0, len(launches), _GROUP):
                ranges.leave()
                self._hold()
                for i in range(first, min(first + _GROUP, len(launches))):
                    ranges.enter(program.kernels[i])
                    before = gpu.mark()
                    gpu.launch(launches[i : i + 1])
                    marks.append((before, gpu.mark()))
                self._let_go()
            gpu.wait()
        origin = marks[0][0]
        starts = began + np.array([gpu.between(origin, before) for before, _ in marks])
        times = np.array([gpu.between(before, after) for before, after in marks])
        ends = starts + np.maximum(times - self.overhead_s, 0.0)
        return EventTimes(program.kernels, starts, ends, began, float(ends.max()))

    def time_pairs(self, n: int) -> list[float]:
        """Seconds between two events with nothing between them, `n` times."""
        return self._paired([None] * n)

    def time_stays(self, n: int, ns: int, blocks: int = 1) -> tuple[list[float], list[float]]:
        """Time a kernel that stays about `ns` nanoseconds, `n` times: by pairs of events, and by its own stamps; seconds."""
        gpu = self._gpu
        slots, staged = gpu.allocate(16 * n), gpu.pinned(16 * n)
        try:
            staged.view(np.uint64)[0::2] = np.iinfo(np.uint64).max
            arguments = [(ctypes.c_uint64(ns), ctypes.c_uint64(slots + 16 * i)) for i in range(n)]
            launches = [Launch(self._timed_kernel, (blocks, 1), 256, 0, args, dependent=False) for args in arguments]
            self._paired(launches[:1])  # loads the kernel, which would take longer than the stream is held
            gpu.to_device(slots, staged)
            pairs = self._paired(launches)
            gpu.to_host(staged, slots)
            gpu.wait()
            stamps = staged.view(np.uint64).reshape(n, 2)
            return pairs, [float(seconds) for seconds in (stamps[:, 1] - stamps[:, 0]) * 1e-9]
        finally:
            gpu.release(slots)
            gpu.release(staged.ctypes.data)

    def _paired(self, launches: Sequence[Launch | None]) -> list[float]:
        self._hold()
        pairs = []
        for launch in launches:
            before = self._gpu.mark()
            if launch is not None:
                self._gpu.launch([launch])
            pairs.append((before, self._gpu.mark()))
        self._let_go()
        self._gpu.wait()
        return [self._gpu.between(before, after) for before, after in pairs]

    def _launches(self, program: StepProgram) -> Sequence[Launch]:
        """The program's launches without dependence on each other; the one that moves stamps, which has no row, left out."""
        if id(program) not in self._alone:
            mine = tuple(one.alone() for one in program.launches[: len(program.kernels)])
            self._alone[id(program)] = (program, mine)  # the program is kept so that its id stays its own
        return self._alone[id(program)][1]

    def _hold(self) -> None:
        self._ticket += 1
        args = (ctypes.c_uint64(self._flag.ctypes.data), ctypes.c_uint32(self._ticket), ctypes.c_uint64(_LIMIT_NS))
        self._gpu.launch([Launch(self._hold_kernel, (1, 1), 32, 0, args, dependent=False)])

    def _let_go(self) -> None:
        self._flag[0] = self._ticket
