"""A GPU whose kernels run on the CPU: the whole CUDA engine, its plans, programs and kernels' source, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from calmnb.engine.cuda_device import Bytes, Launch
from calmnb.engine.cuda_matvec import Device
from tests.emulator.launcher import EmulatedLauncher
from tests.fake_gpu import FakeGpu

_GUARD, _MARK = 256, 0xA5


class EmulatedGpu(FakeGpu):
    """Runs what is launched, at once. Memory lies between guards that `check_guards` looks at.

    Parameters
    ----------
    launcher
        Keeps compiled kernels; shared by the GPUs of several tests.
    order
        Changes which block of a grid comes first.
    arch
        Whose plans the engine makes, and whose shared memory there is.
    """

    name = "Emulated GPU"

    def __init__(self, launcher: EmulatedLauncher, *, order: int = 0, arch: str = "sm_90") -> None:
        super().__init__(arch=arch, sm_count=launcher.device.sm_count)
        self._most_shared = Device.of_arch(arch).shared_per_block
        self.launcher, self._order = launcher, order
        self._whole: dict[int, Bytes] = {}
        self.on_launch = self.on_run = self._run

    def allocate(self, nbytes: int) -> int:
        return int(self._guarded(nbytes).ctypes.data)

    def pinned(self, nbytes: int) -> Bytes:
        return self._guarded(nbytes)

    def matmul(self, out: int, x: int, weights: int, rows: int, outputs: int, inputs: int, *, add: bool) -> None:
        left, right = _at(x, np.float16, rows, inputs), _at(weights, np.float16, outputs, inputs)
        with np.errstate(invalid="ignore", over="ignore"):
            product = left.astype(np.float32) @ right.astype(np.float32).T
        target = _at(out, np.float32, rows, outputs)
        target[...] = target + product if add else product

    def check_guards(self) -> None:
        """Fail if a kernel wrote in front of or behind what was allocated."""
        for address, whole in self._whole.items():
            start = address - whole.ctypes.data
            assert (whole[:start] == _MARK).all(), "a kernel wrote in front of its memory"
            assert (whole[start + self.held[address].nbytes :] == _MARK).all(), "a kernel wrote behind its memory"

    def close(self) -> None:
        self.check_guards()
        self._whole.clear()
        super().close()

    def _guarded(self, nbytes: int) -> Bytes:
        whole = np.full(nbytes + 3 * _GUARD, _MARK, np.uint8)
        start = _GUARD + -(whole.ctypes.data + _GUARD) % 256  # as device memory is aligned
        array = whole[start : start + nbytes]
        array[:] = 0
        self._whole[array.ctypes.data] = whole
        self.held[array.ctypes.data] = array
        return array

    def release(self, address: int) -> None:
        self.check_guards()
        super().release(address)
        del self._whole[address]

    def _run(self, launches: Sequence[Launch]) -> None:
        for one in launches:
            assert one.shared <= self._most_shared, f"{one.kernel.name} asks for {one.shared} bytes of shared memory"
            together = one.kernel.name == "sample_draw"
            self.launcher.run(
                one.kernel.spec, one.args, one.grid, one.block, one.shared, together=together, order=self._order
            )  # fmt: skip


def _at(address: int, dtype: type, *shape: int) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype).reshape(shape)
