"""Engines: one protocol, several implementations (`reference`, `cpu`, `cuda`), opened by `open_engine`."""

from __future__ import annotations

import importlib.util
import operator
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np

from calmnb.config import KvDtype
from calmnb.engine.base import STAGES, Engine, EngineInfo, FullPolicy, Kernel, LayerWeights, Phase, Recorder, Stage, Weights
from calmnb.engine.positions import check_kv_dtype
from calmnb.errors import ConfigError, DeviceError

__all__ = [
    "DEVICES",
    "STAGES",
    "DeviceName",
    "Engine",
    "EngineInfo",
    "FullPolicy",
    "Kernel",
    "LayerWeights",
    "Phase",
    "Recorder",
    "Stage",
    "Weights",
    "open_engine",
]

DeviceName = Literal["auto", "cpu", "cuda", "reference"]
DEVICES: tuple[DeviceName, ...] = ("auto", "cpu", "cuda", "reference")

#: Oldest GPUs that the kernels run on: they use cp.async and mma of sm_80.
MIN_CAPABILITY = (8, 0)
_TOO_OLD = "has compute capability"

#: Called with a line of text while something slow happens (the first compilation).
Progress = Callable[[str], None]


def open_engine(
    weights: Weights,
    *,
    device: DeviceName = "auto",
    seq_len: int | None = None,
    kv_dtype: KvDtype = "fp16",
    on_full: FullPolicy = "stop",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Make an engine for a model.

    Parameters
    ----------
    weights
        The model, as stored; the engine reads it in place.
    device
        "cuda", "cpu", "reference" (NumPy, slow, the oracle), or "auto": CUDA where CuPy sees a device of compute capability
        8.0 or newer, else the CPU (with a warning about an older one). Asking for "cuda" never falls back.
    seq_len
        Context in tokens; default ``min(config.max_seq_len, 4096)``.
    kv_dtype
        KV-cache storage, "fp16" or "fp8".
    on_full
        At the end of the context: "stop" raises `ContextError`, "roll" keeps two sinks and the newest positions.
    threads
        CPU worker threads; default: the physical cores this process may use.
    progress
        Called with a line of text while kernels compile for the first time.

    Raises
    ------
    ConfigError
        For an argument outside its range.
    DeviceError
        If the device is missing, or weights and cache do not fit in its memory.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; accepted are {', '.join(DEVICES)}")
    check_kv_dtype(kv_dtype)
    seq_len = _whole("seq_len", seq_len, 2**31 - 1)
    threads = _whole("threads", threads, 1024)
    if device == "auto":
        problem = _cuda_problem()
        device = "cpu" if problem else "cuda"
        if _TOO_OLD in problem:
            warnings.warn(f"the CPU is used: {problem}", stacklevel=2)
    length = min(weights.config.max_seq_len, 4096) if seq_len is None else seq_len
    if device == "cuda":
        problem = _cuda_problem()
        if problem:
            raise DeviceError(
                f"device 'cuda' was asked for, but {problem}. It needs an NVIDIA GPU with its driver and "
                "pip install 'calmnb[cuda12]' or 'calmnb[cuda13]'; device='cpu' runs without one"
            )
        from calmnb.engine.cuda import open_cuda_engine

        engine: Engine = open_cuda_engine(weights, seq_len=length, kv_dtype=kv_dtype, on_full=on_full, progress=progress)
        return engine
    _check_memory(weights, length, kv_dtype, expanded=device == "reference")
    if device == "reference":
        from calmnb.engine.reference import ReferenceEngine

        return ReferenceEngine(weights, seq_len=length, kv_dtype=kv_dtype, on_full=on_full)
    from calmnb.engine.cpu import CpuEngine

    return CpuEngine(weights, seq_len=length, kv_dtype=kv_dtype, on_full=on_full, threads=threads, progress=progress)


def _whole(name: str, value: int | None, most: int) -> int | None:
    """`value` as an int, if it is None or a whole number from 1 to `most`."""
    try:
        found = None if value is None else operator.index(value)
    except TypeError:
        found = 0
    if isinstance(value, bool) or (found is not None and not 1 <= found <= most):
        raise ConfigError(f"{name} is {value!r}; accepted are whole numbers from 1 to {most}, and None for the default")
    return found


def _cuda_problem() -> str:
    """Why CUDA cannot be used, or an empty string."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy sees no CUDA device ({error})"
    if count == 0:
        return "CuPy sees no CUDA device"
    found = cupy.cuda.runtime.getDeviceProperties(0)
    if (found["major"], found["minor"]) < MIN_CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in ((found["major"], found["minor"]), MIN_CAPABILITY))
        return f"the GPU ({found['name'].decode()}) {_TOO_OLD} {has}; the kernels need {needs} (Ampere) or newer"
    return ""


def _check_memory(weights: Weights, seq_len: int, kv_dtype: str, *, expanded: bool) -> None:
    """Refuse what cannot fit, with numbers, before anything is allocated.

    Mapped weights count: they can be evicted, but a step reads all of them, so a model larger than memory would run at
    the speed of the disk.
    """
    import psutil

    arrays = [weights.embed, *([] if weights.is_tied else [weights.output])]
    for layer in weights.layers:
        arrays += [a for a in (layer.wq, layer.wk, layer.wv, layer.wo, layer.w1, layer.w2, layer.w3) if a is not None]
    stored = sum(a.nbytes for a in arrays)
    if expanded:
        per_word = {2: 1, 1: 1, 4: 8}
        stored += sum(4 * a.size * per_word[a.itemsize] for a in arrays)
    cache = weights.config.kv_bytes_per_token(kv_dtype) * max(seq_len, 0)
    free = psutil.virtual_memory().available + _resident(arrays)
    if stored + cache > free:
        gib = 1024**3
        raise DeviceError(
            f"the model needs {stored / gib:.2f} GiB for its weights and {cache / gib:.2f} GiB for a KV cache of {seq_len} "
            f"tokens ({kv_dtype}), but {free / gib:.2f} GiB of memory are free; use a smaller seq_len, kv_dtype='fp8', or a "
            "model converted to a smaller dtype"
        )


def _resident(arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> int:
    """Bytes of `arrays` that are ordinary memory already, hence not part of what is free but not needed again either."""
    return sum(a.nbytes for a in arrays if not _is_mapped(a))


def _is_mapped(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return base is not None
