"""Which engine opens where, and what is refused before anything is allocated."""

from __future__ import annotations

import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import calmnb.engine as engine_package
from calmnb.config import ModelConfig
from calmnb.engine import Weights, open_engine
from calmnb.errors import ConfigError, ContextError, DeviceError
from tests.engine_models import SPEC_CONFIG, spec_weights


def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_package, "_cuda_problem", lambda: "CuPy is not installed")


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    engine = open_engine(spec_weights("A"), threads=1)
    engine.close()
    assert engine.info.engine == "cpu"


def test_asking_for_cuda_without_a_gpu_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch)
    with pytest.raises(DeviceError, match=r"CuPy is not installed.*pip install 'calmnb\[cuda12\]'.*device='cpu'"):
        open_engine(spec_weights("A"), device="cuda")


def test_a_driver_that_fails_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenError(Exception):
        pass

    def count() -> int:
        raise BrokenError("no CUDA-capable device is detected")

    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=BrokenError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __spec__=object()))
    with pytest.raises(DeviceError, match="no CUDA-capable device"):
        open_engine(spec_weights("A"), device="cuda")


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda _: {"name": b"Tesla T4", "major": 7, "minor": 5, "totalGlobalMem": 16 << 30},
        CUDARuntimeError=RuntimeError,
    )
    module = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __spec__=object(), __version__="14.2.0")
    monkeypatch.setitem(sys.modules, "cupy", module)


def test_a_gpu_that_is_too_old_is_told_and_the_cpu_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from calmnb.doctor import examine

    old_gpu(monkeypatch)
    with pytest.warns(UserWarning, match=r"the CPU is used: the GPU \(Tesla T4\) has compute capability 7.5; .* 8.0"):
        engine = open_engine(spec_weights("A"), threads=1)
    engine.close()
    assert engine.info.engine == "cpu"
    with pytest.raises(DeviceError, match=r"compute capability 7\.5"):
        open_engine(spec_weights("A"), device="cuda")
    gpu = next(finding for finding in examine() if finding.name == "GPU")
    assert (gpu.state, "7.5" in gpu.found, "8.0" in gpu.remedy) == ("missing", True, True)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tpu'; accepted are auto, cpu, cuda, reference"):
        open_engine(spec_weights("A"), device="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_dtype", "int4"),
        ("kv_dtype", None),
        *(("seq_len", value) for value in (64.0, float("nan"), "x", 0, True, 2**31)),
        *(("threads", value) for value in ("2", 1.5, 0, False)),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(device: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; accepted are"):
        open_engine(spec_weights("A"), device=device, **{name: value})


def test_whole_numbers_of_numpy_are_accepted() -> None:
    with closing(open_engine(spec_weights("A"), device="cpu", seq_len=np.int64(9), threads=np.int32(1))) as engine:  # type: ignore[arg-type]
        assert (engine.seq_len, type(engine.seq_len)) == (9, int)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_default_context_is_the_models(device: Any) -> None:
    engine = open_engine(spec_weights("A"), device=device)
    engine.close()
    assert engine.seq_len == 64


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_default_context_is_at_most_4096(device: Any) -> None:
    weights = spec_weights("A")
    longer = Weights(SPEC_CONFIG.replace(max_seq_len=131072), weights.embed, weights.layers, weights.final_norm, weights.output)
    engine = open_engine(longer, device=device)
    engine.close()
    assert engine.seq_len == 4096


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_cache_that_does_not_fit_is_refused_with_numbers(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("allocated before the check")

    weights = spec_weights("A")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    monkeypatch.setattr(np, "zeros", allocate)
    with pytest.raises(DeviceError, match=r"KV cache of 9000000 tokens \(fp16\), but 1.00 GiB of memory are free"):
        open_engine(weights, device=device, seq_len=9_000_000)


def test_one_byte_too_little_is_refused_and_enough_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = spec_weights("A")
    layers = [getattr(layer, n).nbytes for layer in weights.layers for n in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")]
    held = weights.embed.nbytes + weights.output.nbytes + sum(layers)
    cache = weights.config.kv_bytes_per_token("fp16") * 64
    monkeypatch.setattr(engine_package, "_resident", lambda arrays: 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=held + cache))
    open_engine(weights, device="cpu", threads=1).close()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=held + cache - 1))
    with pytest.raises(DeviceError, match="use a smaller seq_len"):
        open_engine(weights, device="cpu", threads=1)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_engine_stops_at_the_end_of_its_context(device: Any) -> None:
    engine = open_engine(spec_weights("A"), device=device, seq_len=3)
    engine.prefill([1, 2, 3])
    with pytest.raises(ContextError, match="on_full='roll'"):
        engine.step(4, 3)
    engine.close()


def test_refusing_to_roll_a_window_names_the_window() -> None:
    config: ModelConfig = SPEC_CONFIG.replace(sliding_window=8)
    weights = spec_weights("A")
    windowed = Weights(config, weights.embed, weights.layers, weights.final_norm, weights.output)
    with pytest.raises(ConfigError, match="sliding window of 8"):
        open_engine(windowed, device="cpu", on_full="roll")
