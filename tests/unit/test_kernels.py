"""The kernel cache: hits, misses, damage, and a key that covers every header."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from calmnb import kernels
from calmnb.errors import CalmnbError, DeviceError
from calmnb.kernels import KernelSpec, compile_kernel, kernels_dir

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

SOURCE = """
#include "scale.cuh"
extern "C" __global__ void scaled(float* x) { x[threadIdx.x] *= SCALE * FACTOR; }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernels folder of our own."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "scaled.cu").write_text(SOURCE)
    (sources / "scale.cuh").write_text("#define SCALE 2.f\n")
    monkeypatch.setattr(kernels, "kernels_dir", lambda: sources)
    kernels._sources.cache_clear()
    yield sources  # type: ignore[misc]
    kernels._sources.cache_clear()


SPEC = KernelSpec("scaled", "scaled.cu", (("FACTOR", 3),))


def test_second_compile_comes_from_the_cache(folder: Path, tmp_path: Path) -> None:
    first = compile_kernel(SPEC, "sm_90", cache_dir=tmp_path / "cache")
    second = compile_kernel(SPEC, "sm_90", cache_dir=tmp_path / "cache")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.cubin == first.cubin
    assert second.resources == first.resources
    assert first.resources.registers > 0


def test_an_edited_header_is_a_miss(folder: Path, tmp_path: Path) -> None:
    first = compile_kernel(SPEC, "sm_90", cache_dir=tmp_path / "cache")
    (folder / "scale.cuh").write_text("#define SCALE 5.f\n")
    kernels._sources.cache_clear()
    second = compile_kernel(SPEC, "sm_90", cache_dir=tmp_path / "cache")
    assert not second.from_cache
    assert second.cubin != first.cubin


def test_defines_and_architecture_are_part_of_the_key(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for spec, arch in ((SPEC, "sm_90"), (SPEC.with_defines(FACTOR=4), "sm_90"), (SPEC, "sm_80")):
        assert not compile_kernel(spec, arch, cache_dir=cache).from_cache
    assert len(list(cache.glob("*.cubin"))) == 3


def test_a_damaged_entry_is_compiled_again(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    good = compile_kernel(SPEC, "sm_90", cache_dir=cache)
    (entry,) = cache.glob("*.cubin")
    raw = bytearray(entry.read_bytes())
    raw[-1] ^= 0xFF
    entry.write_bytes(raw)
    again = compile_kernel(SPEC, "sm_90", cache_dir=cache)
    assert not again.from_cache
    assert again.cubin == good.cubin


def test_a_cache_that_cannot_be_written_only_costs_time(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert compile_kernel(SPEC, "sm_90", cache_dir=blocked / "cache").cubin


def test_sources_are_found_in_a_checkout() -> None:
    assert (kernels_dir() / "matvec.cuh").is_file()


def test_missing_sources_name_the_places_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "calmnb" / "kernels.py"))
    with pytest.raises(DeviceError, match="_kernels"):
        kernels_dir()


def test_missing_headers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    with pytest.raises(CalmnbError, match="pip install"):
        kernels.cuda_include_dir()


@pytest.mark.parametrize("place", ["targets/x86_64-linux/include", "targets/sbsa-linux/include", "Library/include", "include"])
def test_headers_of_a_conda_environment_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no wheels of NVIDIA's
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "cuda_fp16.h").touch()
    assert kernels.cuda_include_dir() == tmp_path / place


def test_nvrtc_never_writes_into_an_object_that_python_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty log has a size of one, and there is but one bytes object for each single byte."""
    given: list[bytes] = []

    def write(program: object, buffer: bytes) -> tuple[int]:
        given.append(buffer)
        return (0,)

    nvrtc = SimpleNamespace(
        nvrtcVersion=lambda: (0, 13, 0),
        nvrtcCreateProgram=lambda *args: (0, object()),
        nvrtcCompileProgram=lambda *args: (0,),
        nvrtcDestroyProgram=lambda program: (0,),
        nvrtcGetProgramLogSize=lambda program: (0, 1),
        nvrtcGetCUBINSize=lambda program: (0, 1),
        nvrtcGetProgramLog=write,
        nvrtcGetCUBIN=write,
    )
    monkeypatch.setattr(kernels, "_load_nvrtc", lambda: nvrtc)
    _, log = kernels._nvrtc(KernelSpec("read_bytes", "cache.cu"), "sm_90")
    assert log == ""
    assert len(given) == 2
    assert not [buffer for buffer in given if any(buffer is bytes([i]) for i in range(256))]
