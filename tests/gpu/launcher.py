"""Launch single kernels from tests: cubins through the driver API, arguments by value, dependent launch on or off."""

from __future__ import annotations

import ctypes
from typing import Any

from calmnb.engine.cuda_matvec import Device, MatvecArgs, MatvecPlan
from calmnb.kernels import KernelSpec, compile_kernel


def check(result: Any) -> Any:
    error, *values = result
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else values


class Launcher:
    """Functions of this GPU, compiled on first use."""

    def __init__(self) -> None:
        import cupy
        from cuda.bindings import driver

        self.cupy, self.driver = cupy, driver
        cupy.cuda.runtime.setDevice(0)
        cupy.zeros(1)
        props = cupy.cuda.runtime.getDeviceProperties(0)
        self.device = Device(
            f"sm_{props['major']}{props['minor']}", props["multiProcessorCount"], props["sharedMemPerMultiprocessor"]
        )
        self.max_shared = props["sharedMemPerBlockOptin"]
        self._functions: dict[KernelSpec, Any] = {}

    def function(self, spec: KernelSpec) -> Any:
        if spec not in self._functions:
            d = self.driver
            kernel = compile_kernel(spec, self.device.arch)
            module = check(d.cuModuleLoadData(kernel.cubin))
            function = check(d.cuModuleGetFunction(module, spec.name.encode()))
            attribute = d.CUfunction_attribute
            static = check(d.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
            room = self.max_shared - static
            check(d.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, room))
            check(d.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
            self._functions[spec] = function
        return self._functions[spec]

    def launch(self, plan: MatvecPlan, args: MatvecArgs, stream: Any = None, *, pdl: bool = True) -> None:
        self.launch_raw(self.function(plan.spec), plan.grid, plan.block, plan.smem, args, stream, pdl=pdl)

    def launch_raw(
        self, function: Any, grid: int, block: int, smem: int, args: ctypes.Structure, stream: Any = None, *, pdl: bool = True
    ) -> None:
        d = self.driver
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = smem
        config.hStream = d.CUstream(stream.ptr if stream is not None else 0)
        if pdl and self.device.has_pdl:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        else:
            config.numAttrs = 0
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        check(d.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
