"""The CUDA engine's only door to the GPU: memory and streams by CuPy, launches and graphs by NVIDIA's driver bindings.

CuPy cannot set launch attributes, which programmatic dependent launch needs, so kernels go through `cuLaunchKernelEx`;
both see the same stream and the same context. Tests put a stand-in that records calls in place of `CudaDevice`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import DeviceError
from calmnb.kernels import CompiledKernel, KernelSpec

__all__ = ["CudaDevice", "Gpu", "Launch", "pdl_default"]

Bytes = NDArray[np.uint8]

_HOW_TO_GET = (
    "it needs an NVIDIA GPU with its driver, and pip install 'calmnb[cuda13]' or 'calmnb[cuda12]'; a .calm file also runs with "
    "device='cpu'"
)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything but the stream.

    `args` are ctypes objects passed by value, `dependent` asks for programmatic dependent launch on the kernel before.
    """

    kernel: CompiledKernel
    grid: tuple[int, int]
    block: int
    shared: int
    args: tuple[Any, ...]
    dependent: bool = True

    def alone(self) -> Launch:
        """Return the launch that begins when the kernel before has ended, and so need not keep out of its way."""
        args = list(self.args)
        if getattr(args[0], "delay", 0):
            args[0] = type(args[0]).from_buffer_copy(args[0])
            args[0].delay = 0
        return replace(self, args=tuple(args), dependent=False)


@functools.cache
def _elapsed_time() -> Callable[..., int]:
    """The driver's first ``cuEventElapsedTime``: later ones (CUDA 12.8, 13.0) make an Nsight Systems that is older than they
    are drop all that it recorded after the call.
    """
    windows = sys.platform == "win32"
    library = getattr(ctypes, "WinDLL" if windows else "CDLL")("nvcuda.dll" if windows else "libcuda.so.1")
    function: Callable[..., int] = library.cuEventElapsedTime
    return function


class Gpu(Protocol):
    """What the engine asks of a device. Addresses are plain integers."""

    name: str
    arch: str
    sm_count: int
    has_pdl: bool

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` of zeroed device memory."""
        ...

    def release(self, address: int) -> None:
        """Free what `allocate` or `pinned` returned."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Zeroed page-locked host memory that kernels can also write, at the array's own address."""
        ...

    def to_device(self, address: int, source: Bytes) -> None:
        """Copy host bytes to the device in stream order. `source` must be pinned and stay as it is until a wait."""
        ...

    def to_host(self, target: Bytes, address: int) -> None:
        """Copy device bytes to pinned host memory in stream order."""
        ...

    def launch(self, launches: Sequence[Launch]) -> None:
        """Queue kernels."""
        ...

    def matmul(self, out: int, x: int, weights: int, rows: int, outputs: int, inputs: int, *, add: bool) -> None:
        """Queue ``out[rows, outputs] (+)= x[rows, inputs] @ weights[outputs, inputs].T``: half in, float out."""
        ...

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Make a graph of kernels; the returned function queues it."""
        ...

    def time_call(self, call: Callable[[], None]) -> float:
        """Seconds between two events around what `call` queues."""
        ...

    def mark(self) -> Any:
        """Return an event that fires when everything queued so far is done."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether an event has fired."""
        ...

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two events that have fired."""
        ...

    def wait(self, event: Any | None = None) -> None:
        """Block until `event`, or everything queued, is done. The host thread sleeps or spins as the driver likes."""
        ...

    def profiler(self, on: bool) -> None:
        """Begin or end the range that outside profilers record: ``cudaProfilerStart`` and ``cudaProfilerStop``."""
        ...

    def use(self) -> None:
        """Make the device current in the calling thread."""
        ...

    def close(self) -> None:
        """Free everything that is still held."""
        ...


def pdl_default() -> bool:
    """Whether programmatic dependent launch is wanted: unless ``CALMNB_PDL=0``."""
    return os.environ.get("CALMNB_PDL", "1") != "0"


@dataclass
class CudaDevice:
    """A real GPU.

    Parameters
    ----------
    index : int
        CUDA device number.
    pdl : bool
        Use programmatic dependent launch where the GPU has it (sm_90 and later).
    """

    index: int = 0
    pdl: bool = field(default_factory=pdl_default)

    def __post_init__(self) -> None:
        try:
            import cupy
            from cuda.bindings import driver

            cupy.cuda.runtime.getDeviceCount()
        except ImportError as error:
            raise DeviceError(f"a GPU was asked for, but a package is missing ({error}): {_HOW_TO_GET}") from error
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"a GPU was asked for, but CuPy sees none ({error}): {_HOW_TO_GET}") from error

        self._cupy, self._driver = cupy, driver
        self._device = cupy.cuda.Device(self.index)
        self.use()
        properties = cupy.cuda.runtime.getDeviceProperties(self.index)
        self.name: str = properties["name"].decode()
        self.arch = f"sm_{properties['major']}{properties['minor']}"
        self.sm_count: int = properties["multiProcessorCount"]
        self.has_pdl = self.pdl and properties["major"] >= 9
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._memory: dict[int, Any] = {}
        self._functions: dict[tuple[KernelSpec, bytes], Any] = {}
        self._modules: list[Any] = []
        self._graphs: list[Any] = []
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        self._dependent = attribute

    @property
    def stream(self) -> Any:
        """The CuPy stream that everything runs on."""
        return self._stream

    def use(self) -> None:
        """Make the device current in the calling thread."""
        self._device.use()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, CuPy's idle pool counted as free."""
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return free + self._cupy.get_default_memory_pool().free_bytes(), total

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` of zeroed device memory."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        try:
            memory = self._cupy.cuda.Memory(nbytes)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            free, total = self.memory()
            raise DeviceError(
                f"{self.name}: {nbytes / 2**30:.2f} GiB asked for, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free, "
                f"and the allocation failed: {error}. Close other programs that use the GPU, or use a smaller seq_len"
            ) from error
        self._memory[memory.ptr] = memory
        self._cupy.cuda.runtime.memsetAsync(memory.ptr, 0, nbytes, self._stream.ptr)
        return int(memory.ptr)

    def pinned(self, nbytes: int) -> Bytes:
        """Zeroed page-locked host memory that kernels can also write, at the array's own address."""
        memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        array: Bytes = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
        array[:] = 0
        self._memory[array.ctypes.data] = memory
        return array

    def release(self, address: int) -> None:
        """Free what `allocate` or `pinned` returned."""
        self._memory.pop(address, None)

    def to_device(self, address: int, source: Bytes) -> None:
        """Copy pinned host bytes to the device in stream order."""
        kind = self._cupy.cuda.runtime.memcpyHostToDevice
        self._cupy.cuda.runtime.memcpyAsync(address, source.ctypes.data, source.nbytes, kind, self._stream.ptr)

    def to_host(self, target: Bytes, address: int) -> None:
        """Copy device bytes to pinned host memory in stream order."""
        kind = self._cupy.cuda.runtime.memcpyDeviceToHost
        self._cupy.cuda.runtime.memcpyAsync(target.ctypes.data, address, target.nbytes, kind, self._stream.ptr)

    def matmul(self, out: int, x: int, weights: int, rows: int, outputs: int, inputs: int, *, add: bool) -> None:
        """Queue ``out[rows, outputs] (+)= x[rows, inputs] @ weights[outputs, inputs].T``: half in, float sums and out."""
        cublas = self._cupy.cuda.cublas
        handle = self._cupy.cuda.device.get_cublas_handle()
        one, beta = np.ones(1, np.float32), np.full(1, 1.0 if add else 0.0, np.float32)
        half, single, compute_32f, default = 2, 0, 68, -1
        # cuBLAS counts columns first: there, weights are [inputs, outputs] to be transposed, x is [inputs, rows].
        # CuPy moves the handle to its current stream at every call, so a setStream of ours would not last.
        with self._stream:
            cublas.gemmEx(
                handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, outputs, rows, inputs, one.ctypes.data, weights, half, inputs,
                x, half, inputs, beta.ctypes.data, out, single, outputs, compute_32f, default,
            )  # fmt: skip

    def launch(self, launches: Sequence[Launch]) -> None:
        """Queue kernels."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = config.gridDimZ = 1
        config.hStream = self._stream.ptr
        for one in launches:
            config.gridDimX, config.gridDimY = one.grid
            config.blockDimX = one.block
            config.sharedMemBytes = one.shared
            dependent = one.dependent and self.has_pdl
            config.attrs = [self._dependent] if dependent else []
            config.numAttrs = int(dependent)
            pointers = (ctypes.c_void_p * len(one.args))(*[ctypes.addressof(a) for a in one.args])
            self._check(
                driver.cuLaunchKernelEx(config, self._function(one.kernel), ctypes.addressof(pointers), 0), one.kernel.name
            )

    def capture(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Make a graph of kernels; the returned function queues it."""
        driver = self._driver
        for one in launches:
            self._function(one.kernel)  # loading a module may synchronise, which a capture forbids
        stream = self._stream.ptr
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(driver.cuStreamBeginCapture(stream, mode), "begin capture")
        try:
            self.launch(launches)
        finally:
            result = driver.cuStreamEndCapture(stream)
        graph = self._check(result, "end capture")
        executable = self._check(driver.cuGraphInstantiate(graph, 0), "instantiate")
        self._check(driver.cuGraphDestroy(graph), "destroy")
        self._graphs.append(executable)

        def run() -> None:
            error = driver.cuGraphLaunch(executable, stream)[0]
            if error:
                self._check((error,), "graph launch")

        return run

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy from device to device in stream order."""
        kind = self._cupy.cuda.runtime.memcpyDeviceToDevice
        self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)

    @property
    def pci_bus_id(self) -> str:
        """Where the device sits, as NVML names it (``0000:19:00.0``)."""
        return str(self._cupy.cuda.runtime.deviceGetPCIBusId(self.index))

    def time(self, launches: Sequence[Launch]) -> float:
        """Seconds between two events around `launches`."""
        return self.time_call(lambda: self.launch(launches))

    def time_call(self, call: Callable[[], None]) -> float:
        """Seconds between two events around what `call` queues."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        call()
        end.record(self._stream)
        end.synchronize()
        return self.between(begin, end)

    def mark(self) -> Any:
        """Return an event that fires when everything queued so far is done."""
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return event

    def profiler(self, on: bool) -> None:
        """Begin or end the range that outside profilers record (``nsys --capture-range=cudaProfilerApi``)."""
        (self._cupy.cuda.runtime.profilerStart if on else self._cupy.cuda.runtime.profilerStop)()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two events that have fired."""
        milliseconds = ctypes.c_float()
        error = _elapsed_time()(ctypes.byref(milliseconds), ctypes.c_void_p(begin.ptr), ctypes.c_void_p(end.ptr))
        self._check((self._driver.CUresult(error), milliseconds.value), "read an event")
        return milliseconds.value * 1e-3

    def reached(self, event: Any) -> bool:
        """Whether an event has fired."""
        return bool(event.done)

    def wait(self, event: Any | None = None) -> None:
        """Block until `event`, or everything queued, is done."""
        (self._stream if event is None else event).synchronize()

    def close(self) -> None:
        """Free everything that is still held. Idempotent."""
        if self._stream is None:
            return
        self.use()
        self._stream.synchronize()
        for graph in self._graphs:
            self._driver.cuGraphExecDestroy(graph)
        for module in self._modules:
            self._driver.cuModuleUnload(module)
        self._graphs.clear()
        self._modules.clear()
        self._functions.clear()
        self._memory.clear()
        self._stream = None
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def _function(self, kernel: CompiledKernel) -> Any:
        """Load `kernel` once; let it use all of the shared memory its launch asks for."""
        key = kernel.spec, kernel.cubin
        if key in self._functions:
            return self._functions[key]
        driver = self._driver
        module = self._check(driver.cuModuleLoadData(kernel.cubin), f"load {kernel.name}")
        self._modules.append(module)
        function = self._check(driver.cuModuleGetFunction(module, kernel.name.encode()), f"find {kernel.name}")
        attributes = driver.CUfunction_attribute
        limit = self._check(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, self.index
            ),
            "shared memory limit",
        )  # fmt: skip
        static = self._check(
            driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), "shared memory"
        )
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, limit - static),
            # The same split of L1 and shared memory for all kernels: a change of split drains the multiprocessor.
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            self._check(driver.cuFuncSetAttribute(function, attribute, value), f"set up {kernel.name}")
        self._functions[key] = function
        return function

    def _check(self, result: tuple[Any, ...], what: str) -> Any:
        """Return what a driver call gave, or raise with the driver's own words."""
        if result[0]:
            _, text = self._driver.cuGetErrorString(result[0])
            message = text.decode() if isinstance(text, bytes) else str(text)
            raise DeviceError(f"{self.name}: {what} failed: {message} ({result[0]!r})")
        return result[1] if len(result) > 1 else None
