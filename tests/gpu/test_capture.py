"""Times, bytes and ranges of the CUDA engine's recordings against each other and against outside tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from calmnb.errors import CalmnbError
from calmnb.profile.cupti import cupti_problem, trace_steps
from calmnb.profile.ncu import attach_measured
from calmnb.profile.nsight import find_tool
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.verify import verify_engine
from calmnb.sampler import Sampling
from calmnb.shapes import shape_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from calmnb.engine.cuda import open_random_engine

    config = shape_config("llama-3.2-1b", "fp8").replace(n_layers=4)
    with open_random_engine(config, is_tied=True, seq_len=600) as opened:
        yield opened


@pytest.fixture(autouse=True)
def as_it_was(engine: Any) -> Iterator[None]:
    yield
    engine.time_source, engine.graphs.overlap, engine.recorder = "stamps", True, None


def record(engine: Any, source: str, n: int = 20, **options: Any) -> tuple[list[int], SessionRecorder]:
    recorder = SessionRecorder({})
    engine.pretend_cached(100)
    engine.time_source, engine.recorder = source, recorder
    tokens = [decoded.token for decoded in engine.decode_many(1, 100, n, **options)]
    engine.recorder = None
    return tokens, recorder


SAMPLINGS = [None, Sampling(temperature=0.8, min_p=0.05, top_k=40, seed=3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("source", ["stamps", "stamps-light", "events"])
def test_tokens_do_not_depend_on_recording(engine: Any, source: str, sampling: Sampling | None) -> None:
    engine.pretend_cached(100)
    plain = [d.token for d in engine.decode_many(1, 100, 40, sampling=sampling, rng_state=7)]
    tokens, recorder = record(engine, source, 40, sampling=sampling, rng_state=7)
    assert tokens == plain
    assert [step.pos for step in recorder.steps] == list(range(100, 140))


@pytest.mark.parametrize("source", ["stamps", "stamps-light", "events"])
def test_steps_follow_each_other(engine: Any, source: str) -> None:
    _, recorder = record(engine, source)
    for before, after in zip(recorder.steps[3:], recorder.steps[4:], strict=False):
        assert (after.starts >= before.starts).all()
        assert after.step_start >= before.step_end - 1e-6
        assert (after.ends >= after.starts).all()
        assert 10e-6 < after.step_end - after.step_start < 0.1


def test_stamps_are_finer_than_a_float_of_nanoseconds_since_1970(engine: Any) -> None:
    _, recorder = record(engine, "stamps", 40)
    ticks = np.unique(np.round(np.concatenate([s.ends - s.starts for s in recorder.steps]) * 1e9) % 256)
    assert len(ticks) > 2, f"durations are multiples of 256 ns: {ticks}"


def test_events_agree_with_stamps_of_kernels_alone(engine: Any) -> None:
    engine.graphs.overlap = False
    times = {}
    for source in ("stamps", "events"):
        _, recorder = record(engine, source, 30)
        times[source] = np.median([s.ends - s.starts for s in recorder.steps[5:]], axis=0)
    off = np.abs(times["events"] - times["stamps"])
    assert (off <= np.maximum(1.5e-6, 0.05 * times["stamps"])).all(), f"worst {1e6 * off.max():.2f} us"


def test_reading_stamps_does_not_stall_decoding(engine: Any) -> None:
    engine.pretend_cached(100)
    recorder = SessionRecorder({})
    off = min(engine.time_graph(100, 100) for _ in range(3))
    engine.recorder = recorder
    for _ in engine.decode_many(1, 100, 400):
        pass
    engine.recorder = None
    pitch = np.median(np.diff([step.step_start for step in recorder.steps[10:]]))
    assert pitch < 1.15 * off, f"a recorded step every {1e6 * pitch:.1f} us, {1e6 * off:.1f} us without recording"


def test_cupti_names_every_kernel(engine: Any) -> None:
    problem = cupti_problem()
    if problem:
        pytest.skip(problem)
    engine.pretend_cached(100)
    for n in (5, 8):  # a second use must work too
        steps = trace_steps(engine, 100, n)
        assert [step.pos for step in steps] == list(range(100, 100 + n))
        for step in steps:
            assert step.kernels == engine.program_at("greedy", step.pos).kernels
            assert (step.ends > step.starts).all()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="ncu wants the GPU's counters to itself")
def test_ncu_measures_the_bytes_that_are_declared() -> None:
    from calmnb.profile.ncu_step import measure_step

    try:
        find_tool("ncu")
    except CalmnbError as error:
        pytest.skip(str(error))
    lines: list[str] = []
    session, launches, _ = measure_step(shape_config("llama-3.2-1b", "fp16"), is_tied=True, layers=2, output=lines.append)
    table = attach_measured(session, launches).set_index("stage")
    weights = ["matmul_qkv", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output"]
    off = table.loc[weights, "measured_to_counted"] - 1
    assert off.abs().max() < 0.02, table.to_string()


def test_the_whole_check_runs(engine: Any) -> None:
    found = verify_engine(engine, "1b of 4 layers", context=100, steps=24, rounds=3)
    assert {row["stage"] for row in found.kernels} >= {"embed", "matmul_qkv", "attention", "output", "sample"}
    print("\n".join(f"{c.what:45s} {c.shown:>16s} {c.bound:45s} {c.result} {c.note}" for c in found.checks))
