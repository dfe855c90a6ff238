"""A stand-in for `calmnb.engine.cuda_device.CudaDevice` that records launches instead of making them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calmnb.engine.cuda_device import Bytes, Launch
from calmnb.engine.cuda_ops import HostToken, SampleArgs


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
