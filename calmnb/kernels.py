"""Find, specialise, compile and cache the CUDA kernels of ``kernels/``.

A kernel is one ``extern "C"`` entry of one ``.cu`` file plus the macros that specialise it. Compilation is NVRTC's, to
machine code for one architecture, and needs no GPU and no toolkit: the compiler and its headers come as pip wheels.
Results are kept on disk under a key that covers every source and header, so an edited file never meets an old binary.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calmnb.errors import CompileError, DeviceError

__all__ = [
    "CompiledKernel",
    "KernelSpec",
    "Resources",
    "compile_all",
    "compile_kernel",
    "compile_text",
    "cuda_include_dir",
    "kernels_dir",
]

_FORMAT = 2  # of the cache entries
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of one kernel.

    Attributes
    ----------
    name : str
        The ``extern "C"`` entry.
    source : str
        File of ``kernels/`` that has it.
    defines : tuple of (str, int or str)
        Macros, in order.
    """

    name: str
    source: str
    defines: tuple[tuple[str, int | str], ...] = ()

    def with_defines(self, **defines: int | str) -> KernelSpec:
        """Return a copy with macros added or changed."""
        merged = dict(self.defines) | defines
        return KernelSpec(self.name, self.source, tuple(merged.items()))

    def options(self) -> tuple[str, ...]:
        """Compiler options of this specialisation."""
        return tuple(f"-D{key}={value}" for key, value in self.defines)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.defines)})"


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a compiled kernel takes, as the assembler reports it.

    Attributes
    ----------
    registers : int
        Per thread.
    spill_bytes : int
        Stores plus loads that registers did not hold, per thread; 0 in every kernel of calmnb.
    stack_bytes : int
        Local memory of a thread.
    shared_bytes : int
        Static shared memory of a block (dynamic shared memory is the launch's).
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture."""

    spec: KernelSpec
    arch: str
    cubin: bytes
    resources: Resources
    log: str
    from_cache: bool

    @property
    def name(self) -> str:
        """The entry's name in the module."""
        return self.spec.name


def kernels_dir() -> Path:
    """Return the folder of CUDA sources: inside an installed wheel, or beside the package in a checkout.

    Raises
    ------
    DeviceError
        If neither place has them.
    """
    package = Path(__file__).parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise DeviceError(
        f"the CUDA sources are missing: looked for common.cuh in {package / '_kernels'} and {package.parent / 'kernels'}; "
        "reinstall calmnb"
    )


def cuda_include_dir() -> Path:
    """Return the folder with ``cuda_fp16.h``: pip's nvidia wheels, then conda, then a toolkit.

    Raises
    ------
    DeviceError
        If there is none.
    """
    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates += [Path(root) / "cu13" / "include", Path(root) / "cuda_runtime" / "include"]
    for variable in ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            prefix = Path(os.environ[variable])
            candidates += [prefix / "include", prefix / "Library" / "include", *sorted(prefix.glob("targets/*/include"))]
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise DeviceError(
        "CUDA's headers (cuda_fp16.h) were not found in pip's nvidia packages, a conda environment, $CUDA_HOME or "
        "/usr/local/cuda; install them with: pip install 'calmnb[cuda13]' (or cuda12)"
    )


def compile_kernel(spec: KernelSpec, arch: str = "sm_90", *, cache_dir: Path | None = None) -> CompiledKernel:
    """Compile one specialisation, or take it from the cache.

    Parameters
    ----------
    spec
        What to compile.
    arch
        Real architecture, ``"sm_90"``.
    cache_dir
        Where results are kept; by default in `calmnb.cache.cache_folder`.

    Raises
    ------
    CompileError
        With kernel, options, architecture and the compiler's log.
    DeviceError
        If NVRTC or its headers are missing.
    """
    folder = cache_dir or default_cache_dir()
    path = folder / f"{spec.name}-{arch}-{_key(spec, arch)}.cubin"
    cached = _read_entry(path)
    if cached is not None:
        cubin, resources, log = cached
        return CompiledKernel(spec, arch, cubin, resources, log, True)
    cubin, log = _nvrtc(spec, arch)
    resources = _parse_resources(log, spec.name)
    _write_entry(path, cubin, resources, log)
    return CompiledKernel(spec, arch, cubin, resources, log, False)


def compile_text(text: str, spec: KernelSpec, arch: str = "sm_90") -> CompiledKernel:
    """Compile a source that is no file of ``kernels/``: a student's, say. The headers there can be included; nothing is cached.

    Parameters
    ----------
    text
        CUDA C++.
    spec
        Entry, macros, and as `source` the name that the compiler's messages give the text.
    arch
        Real architecture, ``"sm_90"``.

    Raises
    ------
    CompileError, DeviceError
        As for `compile_kernel`.
    """
    cubin, log = _nvrtc(spec, arch, text)
    return CompiledKernel(spec, arch, cubin, _parse_resources(log, spec.name), log, False)


def compile_all(
    specs: Iterable[KernelSpec], arch: str = "sm_90", *, cache_dir: Path | None = None, threads: int | None = None
) -> dict[KernelSpec, CompiledKernel]:
    """Compile several specialisations, a few at a time (NVRTC releases the interpreter lock while it works)."""
    from concurrent.futures import ThreadPoolExecutor

    unique = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        done = pool.map(lambda spec: compile_kernel(spec, arch, cache_dir=cache_dir), unique)
        return dict(zip(unique, done, strict=True))


def default_cache_dir() -> Path:
    """Return where compiled kernels are kept."""
    from calmnb.cache import cache_folder

    return cache_folder("kernels")


@functools.cache
def _sources(folder: Path) -> dict[str, str]:
    """Text of every source by its path inside `folder`, subfolders included: ``one_kernel/v6_ring.cu``."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh"))
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in paths}


def _key(spec: KernelSpec, arch: str) -> str:
    """Digest of everything the machine code depends on: compiler, options and the text of the source and all headers."""
    sources = _sources(kernels_dir())
    digest = hashlib.sha256()
    for part in (str(_FORMAT), arch, spec.name, *_OPTIONS, *spec.options(), str(_nvrtc_version()), str(cuda_include_dir())):
        digest.update(part.encode() + b"\0")
    for name, text in sources.items():
        if name.endswith(".cuh") or name == spec.source:
            digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _read_entry(path: Path) -> tuple[bytes, Resources, str] | None:
    """Read a cache entry; a damaged one counts as absent."""
    try:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        cubin = raw[8 + size :]
        if hashlib.sha256(cubin).hexdigest() != header["sha256"]:
            return None
        return cubin, Resources(**header["resources"]), header["log"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_entry(path: Path, cubin: bytes, resources: Resources, log: str) -> None:
    """Write through a temporary name; a cache that cannot be written only costs time."""
    header = json.dumps({"sha256": hashlib.sha256(cubin).hexdigest(), "resources": asdict(resources), "log": log}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header + cubin)
        Path(name).replace(path)
    except OSError:
        return


def _parse_resources(log: str, name: str) -> Resources:
    """Read ``ptxas -v``'s lines about `name`."""
    text = log[log.rfind(f"'{name}'") :] if f"'{name}'" in log else log

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    nvrtc = _load_nvrtc()
    error, major, minor = nvrtc.nvrtcVersion()
    return (int(major), int(minor)) if int(error) == 0 else (0, 0)


def _load_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(
            "compiling CUDA kernels needs the package cuda-bindings and NVRTC; install them with: "
            f"pip install 'calmnb[cuda13]' (or cuda12 for an older driver). Python says: {error}"
        ) from error
    return nvrtc


def _nvrtc(spec: KernelSpec, arch: str, text: str | None = None) -> tuple[bytes, str]:
    """Machine code and the compiler's log of `text`, or of the file that `spec` names."""
    nvrtc = _load_nvrtc()
    folder = kernels_dir()
    sources = _sources(folder)
    source = sources.get(spec.source) if text is None else text
    if source is None:
        raise CompileError(f"kernel {spec}: there is no {spec.source} in {folder}; it has {', '.join(sorted(sources))}")
    headers = {name: text for name, text in sources.items() if name.endswith(".cuh")}
    options = (f"--gpu-architecture={arch}", *_OPTIONS, *spec.options(), f"-I{cuda_include_dir()}")

    def check(result: Sequence[object]) -> object:
        if int(result[0]) != 0:  # type: ignore[call-overload]
            raise CompileError(f"NVRTC failed on {spec} for {arch}: {result[0]}")
        return result[1] if len(result) > 1 else None

    program = check(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            spec.source.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        failed = int(nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]) != 0
        buffer = _writable(int(check(nvrtc.nvrtcGetProgramLogSize(program))))  # type: ignore[call-overload]
        check(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0 ").decode(errors="replace")
        if failed:
            raise CompileError(
                f"kernel {spec.name} of {spec.source} does not compile for {arch}\noptions: {' '.join(options)}\n{log}"
            )
        cubin = _writable(int(check(nvrtc.nvrtcGetCUBINSize(program))))  # type: ignore[call-overload]
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _writable(size: int) -> bytes:
    """Bytes that NVRTC may write into, at least `size` long.

    Python keeps one object for each bytes of length one and shares it with everybody: an empty log, written as a lone zero
    into ``b" " * 1``, would make every ``b" "`` of the process a zero byte, and with it the headers of NumPy's files.
    """
    return bytes(max(size, 2))
