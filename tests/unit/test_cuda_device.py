"""Launch settings that reach the driver, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from calmnb.engine import cuda_device
from calmnb.engine.cuda_device import CudaDevice, Launch
from calmnb.errors import DeviceError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources

driver = pytest.importorskip("cuda.bindings.driver")

KERNEL = CompiledKernel(KernelSpec("attention", "attention.cu"), "sm_90", b"cubin", Resources(32, 0, 0, 0), "", True)


class NotingDriver(SimpleNamespace):
    """The real bindings' types, and functions that record what they are given."""

    def __init__(self) -> None:
        super().__init__(
            CUlaunchConfig=driver.CUlaunchConfig,
            CUlaunchAttribute=driver.CUlaunchAttribute,
            CUlaunchAttributeID=driver.CUlaunchAttributeID,
            CUlaunchAttributeValue=driver.CUlaunchAttributeValue,
            CUfunction_attribute=driver.CUfunction_attribute,
            CUdevice_attribute=driver.CUdevice_attribute,
            CUstreamCaptureMode=driver.CUstreamCaptureMode,
        )
        self.launches: list[dict[str, Any]] = []
        self.attributes: list[tuple[Any, int]] = []
        self.calls: list[str] = []
        self.error = 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[int]:
        first = (ctypes.c_void_p * 1).from_address(params)[0]
        self.launches.append(
            {
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "attributes": [
                    (a.id, a.value.programmaticStreamSerializationAllowed) for a in (config.attrs or [])[: config.numAttrs]
                ],
                "argument": ctypes.c_int32.from_address(first).value,
            }
        )
        return (self.error,)

    def cuModuleLoadData(self, data: bytes) -> tuple[int, str]:
        self.calls.append("load")
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuDeviceGetAttribute(self, attribute: Any, index: int) -> tuple[int, int]:
        return 0, 232448

    def cuFuncGetAttribute(self, attribute: Any, function: str) -> tuple[int, int]:
        return 0, 448

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[int]:
        self.attributes.append((attribute, value))
        return (0,)

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, b"out of registers"

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[int]:
        self.calls.append("begin")
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, str]:
        self.calls.append("end")
        return 0, "graph"

    def cuGraphInstantiate(self, graph: str, flags: int) -> tuple[int, str]:
        return 0, "executable"

    def cuGraphDestroy(self, graph: str) -> tuple[int]:
        return (0,)

    def cuGraphLaunch(self, executable: str, stream: int) -> tuple[int]:
        self.calls.append("run")
        return (0,)


class NoDriver(Exception):
    """Stands for CuPy's runtime error."""


def make_device(monkeypatch: pytest.MonkeyPatch, *, major: int = 9, **options: Any) -> tuple[CudaDevice, NotingDriver]:
    noting = NotingDriver()
    runtime = SimpleNamespace(
        CUDARuntimeError=NoDriver,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda index: {"name": b"Fake", "major": major, "minor": 0, "multiProcessorCount": 132},
    )
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda index: SimpleNamespace(use=lambda: None),
            Stream=lambda non_blocking: SimpleNamespace(ptr=7),
            runtime=runtime,
        )
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr("cuda.bindings.driver", noting)
    return CudaDevice(**options), noting


def launch(**options: Any) -> Launch:
    return Launch(KERNEL, (3, 2), 128, 1000, (ctypes.c_int32(41),), **options)


def test_launch_hands_over_geometry_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noting = make_device(monkeypatch)
    device.launch([launch(dependent=False)])
    (found,) = noting.launches
    assert found["grid"] == (3, 2, 1)
    assert found["block"] == (128, 1, 1)
    assert (found["shared"], found["argument"], found["attributes"]) == (1000, 41, [])


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = make_device(monkeypatch)

    def none() -> int:
        raise NoDriver("driver too old")

    device._cupy.cuda.runtime.getDeviceCount = none
    with pytest.raises(DeviceError, match=r"CuPy sees none \(driver too old\).*calmnb\[cuda13\].*device='cpu'"):
        CudaDevice()
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"a package is missing.*cupy"):
        CudaDevice()


@pytest.mark.parametrize(("major", "pdl", "expected"), [(9, True, 1), (9, False, 0), (8, True, 0), (12, True, 1)])
def test_dependent_launch_is_asked_for_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, major: int, pdl: bool, expected: int
) -> None:
    device, noting = make_device(monkeypatch, major=major, pdl=pdl)
    device.launch([launch(dependent=False), launch(dependent=True)])
    first, second = noting.launches
    wanted = (driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    assert first["attributes"] == []
    assert second["attributes"] == [wanted] * expected


def test_environment_switches_dependent_launch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALMNB_PDL", "0")
    assert not cuda_device.pdl_default()
    device, _ = make_device(monkeypatch)
    assert not device.has_pdl


def test_kernels_may_use_all_shared_memory_and_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noting = make_device(monkeypatch)
    device.launch([launch(), launch()])
    assert noting.calls == ["load"]
    names = driver.CUfunction_attribute
    assert noting.attributes == [
        (names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448 - 448),
        (names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ]


def test_modules_are_loaded_before_a_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noting = make_device(monkeypatch)
    run = device.capture([launch()])
    assert noting.calls == ["load", "begin", "end"]
    run()
    assert noting.calls[-1] == "run"


def test_driver_errors_are_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noting = make_device(monkeypatch)
    noting.error = 701
    with pytest.raises(DeviceError, match=r"Fake: attention failed: out of registers"):
        device.launch([launch()])


def test_capture_ends_when_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device, noting = make_device(monkeypatch)
    noting.error = 701
    with pytest.raises(DeviceError):
        device.capture([launch()])
    assert noting.calls[-1] == "end"
