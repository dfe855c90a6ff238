"""The five tables, exact: one layer, times that are round numbers, a peak of 10 GB/s."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel
from calmnb.engine.stages import stage_cost
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from calmnb.profile.tables import TABLE_COLUMNS
from tests.profile_fakes import SMOL, meta_of, noisy_recorder

TINY = ModelConfig("llama", "fp16", dim=32, hidden_dim=64, head_dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=50)
KERNELS = (Kernel("matmul_qkv", 0, "mv"), Kernel("attention", 0, "att"), Kernel("output", -1, "mv"))
QKV, OUTPUT = 64 * 32 * 2, 50 * 32 * 2
KV = 2 * 16 * 2  # bytes a position


@pytest.fixture
def session() -> Session:
    """A prompt, a slow first token, then three tokens in which qkv takes 2, 4 and 6 us, attention 1, output 5, gap 1."""
    recorder = SessionRecorder(meta_of(TINY, peaks={"measured": {"gb_per_s": 10.0, "source": "fake"}}))
    now = 50.0

    def step(phase: str, pos: int, n: int, qkv: float) -> None:
        nonlocal now
        ends = now + 1e-6 * np.cumsum([qkv, 1.0, 5.0])
        starts = np.concatenate(([now], ends[:-1]))
        recorder.add(phase, pos, pos + n, n, KERNELS, starts, ends, now, float(ends[-1]) + 1e-6)  # type: ignore[arg-type]
        recorder.sampled(pos + n, pos, float(ends[-1]) + 1e-6, float(ends[-1]) + 3e-6)
        now = float(ends[-1]) + 5e-6

    step("prefill", 0, 8, 500.0)
    for pos, qkv in enumerate((900.0, 2.0, 4.0, 6.0), start=8):
        step("decode", pos, 1, qkv)
    return recorder.session()


def test_stages_are_medians_of_settled_decode_steps(session: Session) -> None:
    table = session.stages().set_index("stage")
    assert list(table.index) == ["matmul_qkv", "attention", "output", "sample", "gap"]
    assert table["time_us"].to_numpy() == pytest.approx([4.0, 1.0, 5.0, 2.0, 1.0], abs=1e-4)
    assert table.loc["matmul_qkv", ["p20_us", "p80_us"]].to_numpy(float) == pytest.approx([2.8, 5.2], abs=1e-4)


def test_shares_are_of_all_time_and_add_up(session: Session) -> None:
    table = session.stages().set_index("stage")
    assert table["share_percent"].sum() == pytest.approx(100.0)
    assert table.loc["matmul_qkv", "share_percent"] == pytest.approx(100 * 12 / 39, rel=1e-4)


def test_rates_are_minimal_bytes_over_exclusive_time_and_refer_to_the_peak(session: Session) -> None:
    row = session.stages().set_index("stage").loc["output"]
    assert row["gb_per_s"] == pytest.approx(OUTPUT / 5e-6 / 1e9, rel=1e-4)
    assert row["percent_of_peak"] == pytest.approx(10 * OUTPUT / 5e-6 / 1e9, rel=1e-4)
    assert row["flop_per_byte"] == pytest.approx(1.0)


def test_stages_that_move_no_bytes_have_no_rate(session: Session) -> None:
    table = session.stages().set_index("stage")
    assert table.loc[["sample", "gap"], "gb_per_s"].isna().all()


def test_prompt_and_decode_are_never_mixed(session: Session) -> None:
    table = session.stages("prefill").set_index("stage")
    assert table.loc["matmul_qkv", "time_us"] == pytest.approx(500.0)
    assert table.loc["matmul_qkv", "flops"] == stage_cost(TINY, "matmul_qkv", 8, n_tokens=8).flops


def test_another_peak_changes_only_the_percentage(session: Session) -> None:
    ours, theirs = session.stages(), session.stages(peak=20.0)
    assert theirs["percent_of_peak"].to_numpy() == pytest.approx(ours["percent_of_peak"].to_numpy() / 2, nan_ok=True)
    pd.testing.assert_frame_equal(ours.drop(columns="percent_of_peak"), theirs.drop(columns="percent_of_peak"))


def test_layers_keep_what_is_outside_them_at_minus_one(session: Session) -> None:
    table = session.layers()
    assert list(zip(table["layer"], table["stage"], strict=True)) == [
        (-1, "output"), (-1, "sample"), (-1, "gap"), (0, "matmul_qkv"), (0, "attention"),
    ]  # fmt: skip


def test_kernels_count_calls_and_spread(session: Session) -> None:
    table = session.kernels().set_index(["kernel", "stage"])
    row = table.loc[("mv", "matmul_qkv")]
    assert row["calls"] == 3
    assert row[["mean_us", "std_us", "min_us", "median_us", "max_us"]].to_numpy(float) == pytest.approx(
        [4.0, np.sqrt(8 / 3), 2.0, 4.0, 6.0], abs=1e-4
    )
    assert row["gb_per_s"] == pytest.approx(QKV / 4e-6 / 1e9, rel=1e-4)


def test_kernels_say_how_long_they_ran_beside_the_one_before() -> None:
    recorder = SessionRecorder(meta_of(TINY, settings={"warmup": 0}))
    rows = (Kernel("matmul_qkv", 0, "a"), Kernel("attention", 0, "b"))
    starts, ends = np.array([0.0, 2e-6]), np.array([5e-6, 9e-6])
    for i in range(2):
        recorder.add("decode", i, i + 1, 1, rows, starts + i, ends + i, float(i), i + 9e-6)
    table = recorder.session().kernels().set_index("kernel")
    assert table.loc[["a", "b"], "overlap_us"].to_numpy() == pytest.approx([0.0, 3.0], abs=1e-6)
    assert table.loc[["a", "b"], "mean_us"].to_numpy() == pytest.approx([5.0, 4.0], abs=1e-6)


def test_kernels_come_most_expensive_first(session: Session) -> None:
    assert session.kernels()["total_ms"].is_monotonic_decreasing


def test_tokens_list_every_decoded_token_and_mark_the_warm_up(session: Session) -> None:
    table = session.tokens()
    assert table["pos"].tolist() == [8, 9, 10, 11]
    assert table["warmup"].tolist() == [True, False, False, False]
    assert table["time_ms"].to_numpy() == pytest.approx([0.909, 0.011, 0.013, 0.015], abs=1e-6)
    assert table["token"].tolist() == [8, 9, 10, 11]
    assert table["gb_per_s"].iloc[1] == pytest.approx((QKV + OUTPUT + 10 * KV) / 11e-6 / 1e9, rel=1e-3)


def test_intervals_include_the_host_and_begin_anew_with_a_run(session: Session) -> None:
    table = session.tokens()
    assert np.isnan(table["interval_ms"].iloc[0])
    assert table["interval_ms"].iloc[2] == pytest.approx(0.013, abs=1e-6)


def test_kv_cost_predicts_from_the_weights_own_rate(session: Session) -> None:
    table = session.kv_cost(bins="steps")
    rate = (QKV + OUTPUT) / 9e-6
    assert session.nonkv_gb_per_s() == pytest.approx(rate / 1e9, rel=1e-4)
    assert table["kv_len"].tolist() == [10, 11, 12]
    assert table["kv_bytes"].tolist() == [10 * KV, 11 * KV, 12 * KV]
    assert table["predicted_ms"].iloc[0] == pytest.approx(10 * KV / rate * 1e3, rel=1e-4)
    assert table["attention_ms"].to_numpy() == pytest.approx([1e-3] * 3, abs=1e-7)
    assert table["cache_bytes"].tolist() == [10 * KV, 11 * KV, 12 * KV]


def test_kv_cost_bins_hold_equal_numbers_of_steps() -> None:
    table = noisy_recorder(SMOL.replace(n_layers=1), tokens=101).session().kv_cost(bins=10)
    assert table["steps"].tolist() == [10] * 10
    assert table["kv_len"].is_monotonic_increasing


def test_the_cache_never_takes_more_memory_than_it_has_room() -> None:
    recorder = SessionRecorder(meta_of(TINY, seq_len=16))
    recorder.add("decode", 99, 100, 1, KERNELS, np.zeros(3), np.ones(3), 0.0, 3.0)
    assert recorder.session().kv_cost()["cache_bytes"].tolist() == [16 * KV]


def test_a_lone_warm_up_step_is_used_rather_than_nothing() -> None:
    recorder = SessionRecorder(meta_of(TINY))
    recorder.add("decode", 0, 1, 1, KERNELS, np.zeros(3), np.ones(3), 0.0, 3.0)
    assert len(recorder.session().stages()) == 4


@pytest.mark.parametrize("name", sorted(TABLE_COLUMNS))
def test_every_column_of_every_table_is_documented_and_none_is_missing_when_empty(session: Session, name: str) -> None:
    empty = SessionRecorder({}).session()
    assert list(getattr(session, name)().columns) == list(TABLE_COLUMNS[name])
    assert list(getattr(empty, name)().columns) == list(TABLE_COLUMNS[name])
    assert len(getattr(empty, name)()) == 0
