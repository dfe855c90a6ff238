"""One matrix of the lesson ``08_one_kernel`` on a GPU: random weights, copies of them, the float64 answer, the clock."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb import quant
from calmnb.engine import _cuda_problem
from calmnb.engine.cuda_device import CudaDevice, Gpu, Launch
from calmnb.engine.cuda_matvec import MatvecArgs
from calmnb.errors import CalmnbError, DeviceError
from calmnb.kernels import CompiledKernel
from calmnb.one_kernel_versions import Layer, Plan

__all__ = ["TOLERANCE", "Case", "LessonDevice", "open_gpu", "random_weights"]

#: Largest `error` of a storage: half operands, half2 sums of 16 bytes (gf4 adds codes 0..7 and takes 4 times the sum off).
TOLERANCE = {"fp16": 2e-3, "fp8": 2e-3, "gf4": 3e-3}

_GUARD = 64  # poisoned floats behind y
_STEP = 256  # alignment of a copy, bytes


class LessonDevice(CudaDevice):
    """The engine's device, with as much L1 as a kernel's own shared memory leaves: plain loads live on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self._driver.CUdevice_attribute
        clock_khz, self.l2_bytes = (
            int(self._check(self._driver.cuDeviceGetAttribute(name, self.index), "attributes"))
            for name in (names.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, names.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        )
        self.clock_ghz: float | None = clock_khz / 1e6 or None
        self._plain: set[int] = set()

    def _function(self, kernel: CompiledKernel) -> Any:
        function = super()._function(kernel)
        if id(kernel) not in self._plain and kernel.spec.source.startswith("one_kernel/"):
            carveout = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._check(self._driver.cuFuncSetAttribute(function, carveout, -1), "default split of L1")
            self._plain.add(id(kernel))
        return function


def random_weights(rng: np.random.Generator, dtype: str, rows: int, cols: int) -> NDArray[Any]:
    """Stored weights of both signs, magnitudes 2^-7 to 2^-3: random bits with a narrow exponent. Shape as in the file."""
    shape = quant.storage_shape((rows, cols), dtype)
    if dtype == "fp16":
        bits = rng.integers(0, 1 << 16, shape, np.uint16)
        return ((bits & np.uint16(0x83FF)) | (((bits >> np.uint16(10)) & np.uint16(3)) + np.uint16(8)) << np.uint16(10)).view(
            np.float16
        )
    if dtype == "fp8":
        byte = rng.integers(0, 1 << 8, shape, np.uint8)
        return (byte & np.uint8(0x83)) | (((byte >> np.uint8(2)) & np.uint8(3)) + np.uint8(8)) << np.uint8(2)
    word = rng.integers(0, 1 << 32, shape, np.uint32)
    return (word & np.uint32(0xFFFFFF83)) | (((word >> np.uint32(2)) & np.uint32(3)) + np.uint32(9)) << np.uint32(2)


def _product_f64(stored: NDArray[Any], dtype: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """W x in float64, a block of rows at a time."""

    def part(at: int) -> NDArray[np.float64]:
        return quant.decode(stored[at : at + 512], dtype).astype(np.float64) @ x

    with ThreadPoolExecutor(8) as pool:
        return np.concatenate(list(pool.map(part, range(0, len(stored), 512))))


class Case:
    """One matrix in device memory, several copies of it, x, a poisoned y, and the float64 answer."""

    def __init__(self, gpu: Gpu, layer: Layer, dtype: str, arena_bytes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.gpu, self.layer, self.dtype = gpu, layer, dtype
        stored = random_weights(rng, dtype, layer.rows, layer.cols)
        x = np.zeros(-(-layer.cols // 64) * 64, np.float16)
        x[: layer.cols] = rng.uniform(-1, 1, layer.cols)
        self.expected = _product_f64(stored, dtype, x[: layer.cols].astype(np.float64))
        pitch = -(-stored.nbytes // _STEP) * _STEP
        copies = max(2, -(-arena_bytes // pitch))
        self._held: list[int] = []
        try:
            arena, self.x, self.y = (self._allocate(n) for n in (copies * pitch, x.nbytes, 4 * (layer.rows + _GUARD)))
            self.host = gpu.pinned(4 * (layer.rows + _GUARD))
            self._held.append(self.host.ctypes.data)
            self.copies = [arena + i * pitch for i in range(copies)]
            self._put(stored, self.copies)
            self._put(x, [self.x])
        except BaseException:  # the caller has nothing to close yet
            self.close()
            raise

    def _allocate(self, nbytes: int) -> int:
        address = self.gpu.allocate(nbytes)
        self._held.append(address)
        return address

    def _put(self, data: np.ndarray, addresses: list[int]) -> None:
        staging = self.gpu.pinned(data.nbytes)
        try:
            staging[:] = data.reshape(-1).view(np.uint8)
            for address in addresses:
                self.gpu.to_device(address, staging)
        finally:
            self.gpu.wait()
            self.gpu.release(staging.ctypes.data)

    def launch(self, kernel: CompiledKernel, p: Plan, weights: int, *, dependent: bool = False) -> Launch:
        """A launch of `kernel` on the copy at `weights`."""
        grid, _ = p.blocks(kernel, self.gpu.sm_count)
        args: tuple[Any, ...]
        if kernel.spec.name == "matvec_rows":
            args = (MatvecArgs(w0=weights, x16=self.x, y32=self.y, rows=self.layer.rows, cols=self.layer.cols, eps=1e-5,
                               clip=math.inf, q_scale=1.0, in_scale=1.0),)  # fmt: skip
        else:
            sizes = ctypes.c_int32(self.layer.rows), ctypes.c_int32(self.layer.cols)
            args = (*(ctypes.c_uint64(address) for address in (weights, self.x, self.y)), *sizes)
        return Launch(kernel, (grid, 1), p.threads, p.shared, args, dependent=dependent)

    def error(self, run: Callable[[], None], label: str) -> float:
        """Poison y, run, compare with float64. What was not written, or was written past the end, is an error."""
        self.host[:] = 0xFF
        self.gpu.to_device(self.y, self.host)
        run()
        self.gpu.to_host(self.host, self.y)
        self.gpu.wait()
        y = self.host.view(np.float32)
        rows = self.layer.rows
        if not (self.host[4 * rows :] == 0xFF).all():
            raise CalmnbError(f"{label}: wrote past the end of y")
        error = float(np.linalg.norm(y[:rows] - self.expected) / np.linalg.norm(self.expected))
        if not error < TOLERANCE[self.dtype]:
            wrong = np.flatnonzero(~(np.abs(y[:rows] - self.expected) < 0.05 * np.abs(self.expected).max()))
            first = int(wrong[0]) if len(wrong) else int(np.abs(y[:rows] - self.expected).argmax())
            raise CalmnbError(
                f"{label}: y is off by {error:.2e} (relative, float64; at most {TOLERANCE[self.dtype]:g}); {len(wrong)} rows "
                f"are far off, the first is row {first}: {y[first]!r} in place of {self.expected[first]:.6g}"
            )
        return error

    def time(self, launches: list[Launch], repeats: int) -> list[float]:
        """Seconds a launch, of each replay of a graph of `launches`."""
        run = self.gpu.capture(launches)
        for _ in range(3):
            self.gpu.time_call(run)
        return [self.gpu.time_call(run) / len(launches) for _ in range(repeats)]

    def close(self) -> None:
        """Free the device memory."""
        for address in self._held:
            self.gpu.release(address)


def open_gpu() -> Gpu:
    """CUDA device 0.

    Raises
    ------
    DeviceError
        If there is none, or CuPy or the driver bindings are missing.
    """
    problem = _cuda_problem()
    if problem:
        raise DeviceError(
            f"measuring kernels needs an NVIDIA GPU, but {problem}; install calmnb[cuda12] or calmnb[cuda13] on a machine that "
            "has one, or read a saved table: one_kernel.load(path)"
        )
    return LessonDevice()
