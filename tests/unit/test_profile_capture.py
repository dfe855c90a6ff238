"""profile(): what it asks of a model, and what it writes down. The model is a fake with a clock of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest

import calmnb
from calmnb.engine.base import EngineInfo
from calmnb.errors import ConfigError
from calmnb.profile import Session, measure_recording_overhead, profile
from calmnb.profile.bandwidth import Bandwidth
from tests.profile_fakes import SMOL, kernels_of

CONFIG = SMOL.replace(n_layers=1)


class FakeRun:
    """Decodes to a clock that stands still in between."""

    def __init__(self, model: FakeModel, tokens: int, recorder: Any) -> None:
        self.model, self.left, self.recorder, self.closed = model, tokens, recorder, False
        self.pos = 0

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.closed = True

    def __iter__(self) -> FakeRun:
        return self

    def __next__(self) -> object:
        if self.left == 0:
            raise StopIteration
        first, n = self.pos == 0, 5 if self.pos == 0 else 1
        start, kernels = self.model.now, kernels_of(CONFIG)
        recorder = self.recorder or self.model.engine.recorder
        self.model.now += 0.010 + (0.001 if recorder else 0.0)
        if recorder:
            ends = start + 0.001 * np.arange(1, len(kernels) + 1)
            recorder.add(
                "prefill" if first else "decode", self.pos, self.pos + n, n, kernels, ends - 0.001, ends, start, start + 0.01
            )
            recorder.sampled(self.pos + n, 65 + self.pos, start + 0.01, start + 0.0105)
        self.pos += n
        self.left -= 1
        return SimpleNamespace(id=1)


class FakeModel:
    """Has what `profile` needs of a model."""

    def __init__(self, engine: Any = "cpu", room: int = 10_000) -> None:
        info = EngineInfo(engine, "NVIDIA GeForce RTX 4090" if engine == "cuda" else "Fake CPU", 2, "cpu")
        self.engine = SimpleNamespace(info=info, config=CONFIG, seq_len=128, kv_dtype="fp8", recorder=None)
        self.path = Path("/models/fake-135m-fp8.calm")
        self.file = SimpleNamespace(n_params=11, nbytes=22, weights=None)
        self.tokenizer = SimpleNamespace(token_bytes=lambda token: bytes([token]))
        self.now, self.calls, self.room = 5.0, [], room

    def generate(self, prompt: Any, *, max_tokens: int, recorder: Any = None, **options: Any) -> FakeRun:
        self.calls.append({"prompt": prompt, "max_tokens": max_tokens, **options})
        self.run = FakeRun(self, min(max_tokens, self.room), recorder)
        return self.run


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of every measurement, none of which happens."""
    asked: list[int] = []

    def fake(threads: int, **_: Any) -> Bandwidth:
        asked.append(threads)
        return Bandwidth(30.0 + len(asked), 29.0, 20.0, threads, 1, 1 << 29, 3, False, "Fake CPU")

    monkeypatch.setattr("calmnb.profile.bandwidth.measure_bandwidth", fake)
    monkeypatch.setattr("calmnb.profile.bandwidth._MEASURED", {})
    return asked


def test_a_session_says_where_it_came_from(measured: list[int]) -> None:
    session = profile(FakeModel(), "hello", tokens=4, seed=3)
    wanted = {
        "model": "fake-135m-fp8", "engine": "cpu", "device": "Fake CPU", "threads": 2, "dtype": "fp8", "kv_dtype": "fp8",
        "seq_len": 128, "n_params": 11, "model_bytes": 22, "time_source": "cpu",
    }  # fmt: skip
    assert {key: session.meta[key] for key in wanted} == wanted
    assert session.config == CONFIG
    assert session.meta["settings"]["seed"] == 3
    assert {"date", "versions", "git_revision", "peaks"} <= set(session.meta)


def test_steps_and_tokens_are_those_of_the_model(measured: list[int]) -> None:
    session = profile(FakeModel(), "hello", tokens=4)
    assert session.steps["phase"].tolist() == ["prefill", "decode", "decode", "decode"]
    assert session.tokens()["text"].tolist() == ["F", "G", "H"]
    assert session.tokens()["time_ms"].to_numpy() == pytest.approx([10.5] * 3)


def test_decoding_is_greedy_and_runs_past_stop_ids_unless_told_otherwise(measured: list[int]) -> None:
    model = FakeModel()
    profile(model, "hello", tokens=4)
    profile(model, "hello", tokens=4, temperature=0.7, stop_ids=(2,))
    assert [(call["temperature"], call["stop_ids"]) for call in model.calls] == [(0.0, ()), (0.7, (2,))]


def test_the_run_is_closed(measured: list[int]) -> None:
    model = FakeModel()
    profile(model, "hello", tokens=2)
    assert model.run.closed


def test_bandwidth_is_measured_with_the_engines_threads_before_and_after(measured: list[int]) -> None:
    session = profile(FakeModel(), "hello", tokens=2)
    assert measured == [2, 2]
    assert str(session.peak()) == "32 GB/s (measured)"


def test_a_peak_of_ones_own_is_used_and_nothing_measured(measured: list[int]) -> None:
    session = profile(FakeModel(), "hello", tokens=2, peak=50.0)
    assert measured == []
    assert str(session.peak()) == "50 GB/s (user)"


def test_a_gpu_gets_its_datasheet_and_no_measurement_of_the_host(measured: list[int]) -> None:
    session = profile(FakeModel("cuda"), "hello", tokens=2)
    assert measured == []
    assert str(session.peak()) == "1008 GB/s (datasheet)"


def test_a_gpu_is_measured_with_its_own_read_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([940.0, 955.0])
    monkeypatch.setattr("calmnb.bench.measure_read", lambda gpu: next(rates))
    model = FakeModel("cuda")
    model.engine.gpu = object()
    session = profile(model, "hello", tokens=2)
    assert str(session.peak("measured")) == "955 GB/s (measured)"
    assert session.meta["peaks"]["measured"]["readings_gb_per_s"] == [940.0, 955.0]


@pytest.mark.parametrize("options", [{"tokens": 1}, {"warmup": -1}, {"peak": 0.0}, {"peak": float("nan")}])
def test_impossible_arguments_are_refused_before_anything_runs(options: dict[str, Any]) -> None:
    model = FakeModel()
    with pytest.raises(ConfigError):
        profile(model, "hello", **options)
    assert model.calls == []


def test_warm_up_steps_are_as_many_as_asked_for(measured: list[int]) -> None:
    session = profile(FakeModel(), "hello", tokens=6, warmup=3)
    assert session.tokens()["warmup"].tolist() == [True, True, True, False, False]


def test_calmnb_profile_is_the_function_and_the_package(measured: list[int]) -> None:
    assert isinstance(calmnb.profile(FakeModel(), "hello", tokens=2), Session)


@pytest.mark.parametrize(("engine", "runs", "pairs"), [("cpu", 3, 3 * 4), ("cuda", 6, 3)])
def test_recording_overhead_compares_neighbours(engine: str, runs: int, pairs: int) -> None:
    model = FakeModel(engine)
    result = measure_recording_overhead(model, "hello", tokens=10, rounds=3, clock=lambda: model.now)
    assert (result.off_ms, result.on_ms) == (pytest.approx(10.0), pytest.approx(11.0))
    assert result.percent == pytest.approx(10.0)
    assert result.error_percent == pytest.approx(0.0, abs=1e-6)
    assert (len(model.calls), result.pairs) == (runs, pairs)
    assert "+10.00%" in str(result)


def test_recording_overhead_leaves_the_engines_recorder_as_it_was() -> None:
    model = FakeModel()
    model.engine.recorder = before = object()
    with pytest.raises(ConfigError, match="only 3 tokens fit"):
        measure_recording_overhead(FakeModel(room=3), "hello", tokens=8)
    measure_recording_overhead(model, "hello", tokens=8, rounds=1, clock=lambda: model.now)
    assert model.engine.recorder is before


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_is_profiled_end_to_end(smollm2: Any) -> None:
    with calmnb.load(smollm2("fp8")) as model:
        session = calmnb.profile(model, "Once upon a time", tokens=12)
    assert session.tokens()["pos"].diff().dropna().eq(1).all()
    assert len(session.tokens()) == 11
    assert 0.3 < session.stages()["share_percent"].sum() / 100 < 1.0001
    assert session.stages()["stage"].tolist()[:2] == ["embed", "matmul_qkv"]
    assert 0 < session.stages().set_index("stage").loc["gap", "share_percent"] + 1e-9 < 20
