"""A stand-in for `calmnb.engine.cuda_device.CudaDevice` that records launches instead of making them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calmnb.engine.cuda_device import Bytes, Launch
from calmnb.engine.cuda_ops import CollectArgs, HostToken, SampleArgs


class FakeGpu:
    """Device memory is host memory; `on_run` is called with a graph's launches each time the graph is queued."""

    name = "Fake GPU"

    def __init__(self, *, free: int = 8 << 30, arch: str = "sm_90", sm_count: int = 132) -> None:
        self.arch, self.sm_count = arch, sm_count
        self.has_pdl = arch >= "sm_90"
        self.free = free
        self.held: dict[int, Any] = {}
        self.launched: list[Launch] = []
        self.graphs: list[Sequence[Launch]] = []
        self.products: list[tuple[Any, ...]] = []
        self.waits = 0
        self.closed = False
        self.profiled: list[bool] = []
        self.on_launch: Callable[[Sequence[Launch]], None] = lambda launches: None
        self.on_run: Callable[[Sequence[Launch]], None] = lambda launches: None

    def memory(self) -> tuple[int, int]:
        return self.free, 16 << 30

    def allocate(self, nbytes: int) -> int:
        array = np.zeros(nbytes, np.uint8)
        self.held[array.ctypes.data] = array
        return int(array.ctypes.data)

    def release(self, address: int) -> None:
        del self.held[address]

    def pinned(self, nbytes: int) -> Bytes:
        array = np.zeros(nbytes, np.uint8)
        self.held[array.ctypes.data] = array
        return array

    def to_device(self, address: int, source: Bytes) -> None:
        assert source.flags.c_contiguous
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def to_host(self, target: Bytes, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def launch(self, launches: Sequence[Launch]) -> None:
        self.launched += launches
        self.on_launch(launches)

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        self.graphs.append(launches)
        return lambda: self.on_run(launches)

    def time_call(self, call: Callable[[], None]) -> float:
        call()
        return 1e-3

    def matmul(self, *args: Any, **options: Any) -> None:
        self.products.append(args)

    def between(self, begin: object, end: object) -> float:
        return 1e-4

    def mark(self) -> object:
        return object()

    def reached(self, event: object) -> bool:
        return True

    def wait(self, event: object | None = None) -> None:
        self.waits += 1

    def profiler(self, on: bool) -> None:
        self.profiled.append(on)

    def use(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self.held.clear()


def deliver(launches: Sequence[Launch], choose: Callable[[int], int]) -> None:
    """Do what the sampling kernels do: choose a token for the position in the state, hand it over, move on."""
    args = next(a for one in launches for a in one.args if isinstance(a, SampleArgs))
    state = (ctypes.c_int32 * 16).from_address(args.state)
    ring = (HostToken * args.host_cap).from_address(args.host_ring)
    pos, step = state[1] + 1, state[5]
    token = choose(pos)
    state[0], state[1], state[5] = max(token, 0), pos, step + 1
    ring[step % args.host_cap] = HostToken(token, -0.5, pos, step + 1)


class ClockedGpu(FakeGpu):
    """A GPU with a clock: kernels run alone and take `kernel_s`, an event pair takes `pair_s` besides, and stamps are kept."""

    def __init__(
        self, *, kernel_s: float = 10e-6, pair_s: float = 2e-6, choose: Callable[[int], int] = lambda pos: pos * 7 % 96
    ):
        super().__init__()
        self.kernel_s, self.pair_s, self.choose = kernel_s, pair_s, choose
        self.now = 0.0
        self.on_launch = self.on_run = self._run

    def _run(self, launches: Sequence[Launch]) -> None:
        for one in launches:
            if one.kernel.name == "hold_stream":
                continue
            if one.kernel.name == "hold_time":
                self._stay(*(a.value for a in one.args))
                continue
            begun = self.ticks
            if isinstance(one.args[0], CollectArgs):
                self._collect(one.args[0])
                continue
            self.now += self.kernel_s
            if getattr(one.args[0], "stamp", 0):
                pair = (ctypes.c_uint64 * 2).from_address(one.args[0].stamp)
                level = dict(one.kernel.spec.defines)["CALMNB_STAMPS"]
                # Nothing overlaps here, so a wait for the kernel ahead returns at once.
                pair[0], pair[1] = (2**64 - 1 if level == 4 else begun), (begun if level >= 3 else self.ticks)
        samples = [one for one in launches if one.kernel.name in ("sample_max", "sample_draw")]
        if samples:
            deliver(samples, self.choose)

    def _stay(self, ns: int, slot: int) -> None:
        pair = (ctypes.c_uint64 * 2).from_address(slot)
        pair[0] = self.ticks
        self.now += ns * 1e-9
        pair[1] = self.ticks

    @property
    def ticks(self) -> int:
        return 1_700_000_000_000_000_000 + round(self.now * 1e9)

    def _collect(self, a: CollectArgs) -> None:
        serial = ctypes.c_int32.from_address(a.serial)
        ended = ctypes.c_uint64.from_address(a.serial + 8)
        row = (ctypes.c_uint64 * a.stride).from_address(a.ring + 8 * a.stride * (serial.value % a.rows))
        row[2 : 2 + 2 * a.n] = (ctypes.c_uint64 * (2 * a.n)).from_address(a.stamps)[:]
        row[2 + 2 * a.n], row[3 + 2 * a.n] = ended.value, self.ticks
        self.now += 3e-6
        serial.value += 1
        row[0], ended.value = serial.value, self.ticks

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.now += 2 * nbytes / 4000e9

    def time(self, launches: Sequence[Launch]) -> float:
        return 16 * launches[0].args[1].value / 4400e9 if launches[0].kernel.name == "read_bytes" else 0.0

    def mark(self) -> object:
        self.now += self.pair_s / 2
        return self.now - self.pair_s / 4

    def between(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def time_call(self, call: Callable[[], None]) -> float:
        begun = self.now
        call()
        return self.now - begun
