"""What the recorder keeps, how it numbers runs, and what a step's rows add up to. Every time here is chosen."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calmnb.engine.base import Kernel
from calmnb.profile.events import EVENT_COLUMNS, STEP_COLUMNS, exclusive_times
from calmnb.profile.recorder import SessionRecorder
from tests.profile_fakes import SMOL, kernels_of, meta_of, noisy_recorder

KERNELS = (Kernel("embed", -1, "embed"), Kernel("matmul_qkv", 0, "mv"), Kernel("output", -1, "mv"))


def add(recorder: SessionRecorder, pos: int, start: float, *, phase: str = "decode", n: int = 1) -> None:
    starts = start + np.array([0.0, 1.0, 3.0])
    recorder.add(phase, pos, pos + n, n, KERNELS, starts, starts + np.array([1.0, 1.5, 2.0]), start, start + 6.0)  # type: ignore[arg-type]


def test_times_are_copied_because_engines_reuse_their_buffers() -> None:
    recorder, starts = SessionRecorder({}), np.array([1.0, 2.0, 3.0])
    recorder.add("decode", 0, 1, 1, KERNELS, starts, starts + 1, 1.0, 4.0)
    starts[:] = -1
    assert recorder.steps[0].starts.tolist() == [1.0, 2.0, 3.0]


def test_the_choice_of_a_token_goes_with_the_step_before_it() -> None:
    recorder = SessionRecorder({})
    add(recorder, 7, 0.0)
    recorder.sampled(8, 42, 6.5, 7.0)
    assert (recorder.steps[0].token, recorder.steps[0].sample_end) == (42, 7.0)


def test_a_choice_without_a_step_is_kept_as_a_step_of_no_tokens() -> None:
    recorder = SessionRecorder({})
    recorder.sampled(8, 42, 6.5, 7.0)
    session = recorder.session()
    assert session.steps[["n_tokens", "sample_s"]].to_numpy().tolist() == [[0, 0.5]]
    assert session.events["stage"].tolist() == ["sample", "gap"]


@pytest.mark.parametrize(
    ("second", "runs"),
    [
        ({"pos": 1}, [0, 0]),
        ({"pos": 5}, [0, 1]),
        ({"pos": 0}, [0, 1]),
        ({"pos": 1, "phase": "prefill", "n": 3}, [0, 1]),
    ],
)
def test_runs_are_told_apart_by_position_and_by_a_prompt_after_an_answer(second: dict[str, object], runs: list[int]) -> None:
    recorder = SessionRecorder({})
    add(recorder, 0, 0.0)
    add(recorder, start=10.0, **second)  # type: ignore[arg-type]
    assert [step.run for step in recorder.steps] == runs


def test_new_run_is_counted_even_where_positions_continue() -> None:
    recorder = SessionRecorder({})
    recorder.new_run()
    add(recorder, 0, 0.0)
    recorder.new_run()
    add(recorder, 1, 10.0)
    assert [step.run for step in recorder.steps] == [0, 1]


@pytest.mark.timed
def test_adding_a_step_of_a_30_layer_model_takes_under_20_microseconds() -> None:
    recorder, kernels = SessionRecorder({}), kernels_of(SMOL)
    starts = np.linspace(0, 1, len(kernels))

    def once(pos: int) -> float:
        begin = time.perf_counter()
        recorder.add("decode", pos, pos + 1, 1, kernels, starts, starts, 0.0, 1.0)
        return time.perf_counter() - begin

    assert sorted(once(pos) for pos in range(500))[250] < 20e-6


def test_a_reader_in_another_thread_sees_every_step_once_in_order() -> None:
    recorder, seen, done = SessionRecorder({}), [], threading.Event()

    def read() -> None:
        while True:
            finished = done.is_set()
            seen.extend(step.pos for step in recorder.since(len(seen)))
            if finished:
                return

    reader = threading.Thread(target=read)
    reader.start()
    for pos in range(2000):
        add(recorder, pos, pos * 10.0)
        recorder.sampled(pos + 1, 1, 0.0, 0.0)
    done.set()
    reader.join(10)
    assert seen == list(range(2000))


def test_rows_of_a_step_and_its_gap_sum_to_the_step() -> None:
    recorder = SessionRecorder({})
    add(recorder, 0, 100.0)
    recorder.sampled(1, 42, 106.0, 106.25)
    events = recorder.session().events
    assert events["stage"].tolist() == ["embed", "matmul_qkv", "output", "sample", "gap"]
    assert events["exclusive_s"].tolist() == [1.0, 1.5, 2.0, 0.25, 1.5]
    assert recorder.session().steps["duration_s"].tolist() == [6.25]


def test_an_overlapping_kernel_owns_only_what_its_predecessor_leaves() -> None:
    starts, ends = np.array([0.0, 1.0, 1.5]), np.array([2.0, 3.0, 2.5])
    assert exclusive_times(starts, ends, 0.0, 4.0).tolist() == [2.0, 1.0, 0.0]


def test_what_lies_outside_the_step_is_not_counted() -> None:
    assert exclusive_times(np.array([-1.0, 3.0]), np.array([1.0, 9.0]), 0.0, 4.0).tolist() == [1.0, 1.0]


times = st.floats(0.0, 10.0)


@settings(deadline=None)
@given(st.lists(st.tuples(times, times), max_size=12), times, times)
def test_exclusive_times_never_exceed_the_step(rows: list[tuple[float, float]], a: float, b: float) -> None:
    starts, ends = (np.array([pick(row) for row in rows], float) for pick in (min, max))
    own = exclusive_times(starts, ends, min(a, b), max(a, b))
    assert (own >= 0).all()
    assert own.sum() <= max(a, b) - min(a, b) + 1e-9


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 3))
def test_stage_times_never_exceed_the_step_and_counted_bytes_are_never_below_the_minimum(seed: int, tokens: int) -> None:
    session = noisy_recorder(SMOL.replace(n_layers=2), tokens=tokens, seed=seed).session()
    rows = session.events.groupby("step")["exclusive_s"].sum()
    assert np.allclose(rows, session.steps["duration_s"], rtol=1e-9, atol=1e-12)
    stages = session.events[session.events["stage"] != "gap"].groupby("step")["exclusive_s"].sum()
    assert (stages <= session.steps["duration_s"] + 1e-12).all()
    assert (session.events["bytes_counted"] >= session.events["bytes_min"]).all()


def test_bytes_of_a_step_are_those_its_stages_declare() -> None:
    from calmnb.engine.stages import step_cost

    session = noisy_recorder(SMOL, tokens=3, prompt=5).session()
    last = session.steps.iloc[-1]
    assert tuple(last[["bytes_min", "bytes_counted", "flops"]]) == step_cost(SMOL, int(last["kv_len"]))


def test_of_several_kernels_in_a_stage_the_first_carries_the_bytes() -> None:
    kernels = (Kernel("attention", 0, "split"), Kernel("attention", 0, "combine"))
    recorder = SessionRecorder(meta_of(SMOL))
    recorder.add("decode", 9, 10, 1, kernels, np.array([0.0, 1.0]), np.array([1.0, 2.0]), 0.0, 2.0)
    assert (recorder.session().events["bytes_min"] > 0).tolist() == [True, False, False]


def test_every_column_is_documented() -> None:
    session = noisy_recorder(SMOL, tokens=2).session()
    assert list(session.events.columns) == list(EVENT_COLUMNS)
    assert list(session.steps.columns) == list(STEP_COLUMNS)


def test_a_token_chosen_inside_the_step_has_one_row() -> None:
    kernels = (Kernel("output", -1, "mv"), Kernel("sample", -1, "argmax"))
    recorder = SessionRecorder({})
    recorder.add("decode", 0, 1, 1, kernels, np.array([0.0, 1.0]), np.array([1.0, 1.5]), 0.0, 1.5)
    recorder.sampled(1, 42, 2.0, 2.0)
    session = recorder.session()
    assert session.events["kernel"].tolist() == ["mv", "argmax", "gap"]
    assert session.steps["token"].tolist() == [42]


def test_an_empty_recording_makes_an_empty_session() -> None:
    session = SessionRecorder({}).session()
    assert (len(session.events), len(session.steps)) == (0, 0)
