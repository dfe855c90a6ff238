"""The live panels: every number drawn beside the chat, from hand-made steps with known times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel
from calmnb.engine.stages import kv_bytes, stage_cost, step_cost
from calmnb.profile.recorder import StepRecord
from calmnb.widgets.panels import LAYER_STAGES, POINT_FIELDS, LivePanels, thin

CONFIG = ModelConfig(
    arch="llama", dtype="fp8", dim=64, hidden_dim=128, head_dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=320
)
KERNELS = (
    Kernel("embed", -1, "embed"),
    *(Kernel(stage, layer, "mv" if "matmul" in stage else "att") for layer in range(2) for stage in LAYER_STAGES),
    Kernel("output", -1, "mv"),
)


def step(
    pos: int, *, at: float = 0.0, row_s: float = 1e-3, sample_s: float = 2e-3, phase: str = "decode", n: int = 1
) -> StepRecord:
    """A step of 12 rows of `row_s` each, a gap of one more, then the choice of a token."""
    starts = at + row_s * np.arange(len(KERNELS))
    end = float(at + row_s * (len(KERNELS) + 1))
    return StepRecord(0, phase, pos, pos + n, n, KERNELS, starts, starts + row_s, at, end, end, end + sample_s, 5)  # type: ignore[arg-type]


def panels(**options: object) -> LivePanels:
    return LivePanels(CONFIG, **({"kv_dtype": "fp16", "seq_len": 1000, "peak_gb_per_s": 10.0} | options))  # type: ignore[arg-type]


def test_a_point_holds_the_time_and_the_rate_of_its_step() -> None:
    points = panels().update([step(7)])
    expected = [7, 15.0, step_cost(CONFIG, 8).bytes_min / 15e-3 / 1e9, 2.0, 8, 0.015]
    assert points.shape == (1, len(POINT_FIELDS))
    np.testing.assert_allclose(points[0], expected, rtol=1e-6)


def test_prefill_is_no_point_but_the_time_to_the_first_token() -> None:
    live = panels()
    assert len(live.update([step(0, phase="prefill", n=4)])) == 0
    summary = live.summary()
    assert summary["first_token_s"] == pytest.approx(0.015)
    assert summary["prompt_tokens"] == 4
    assert summary["prompt_tok_per_s"] == pytest.approx(4 / 0.013)
    assert summary["tok_per_s"] is None


def test_means_leave_out_the_first_decode_step() -> None:
    live = panels()
    live.update([step(1, row_s=1.0), step(2, at=20.0), step(3, at=20.015)])
    summary = live.summary()
    assert summary["tokens"] == 2
    assert summary["ms"] == pytest.approx(15.0)
    assert summary["ms_sd"] == pytest.approx(0.0, abs=1e-9)


def test_the_rate_counts_wall_time_between_tokens_too() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0), step(3, at=1.1)])  # 85 ms of host work between the two
    summary = live.summary()
    assert summary["tok_per_s"] == pytest.approx(2 / 0.115)
    total = step_cost(CONFIG, 3).bytes_min + step_cost(CONFIG, 4).bytes_min
    assert summary["gb_per_s"] == pytest.approx(total / 0.115 / 1e9)
    assert summary["of_peak"] == pytest.approx(summary["gb_per_s"] / 10.0)


def test_stages_with_sample_and_gap_sum_to_the_token() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0)])
    rows = {row["stage"]: row for row in live.stages()}
    assert sum(row["us"] for row in rows.values()) == pytest.approx(15_000)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["gap"]["us"] == pytest.approx(1000)
    assert rows["sample"]["us"] == pytest.approx(2000)
    assert rows["matmul_qkv"]["us"] == pytest.approx(2000)
    assert rows["matmul_qkv"]["bytes"] == 2 * stage_cost(CONFIG, "matmul_qkv", 3).bytes_min
    assert rows["gap"]["gb_per_s"] is None


def test_layers_by_stages() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0), step(3, at=2.0, row_s=3e-3)])
    assert live.layers().shape == (2, len(LAYER_STAGES))
    assert live.layers().dtype == np.float32
    np.testing.assert_allclose(live.layers(), 2000.0, rtol=1e-6)


def test_overlapping_kernels_are_not_counted_twice() -> None:
    live = panels()
    late = step(2, at=1.0)
    late.ends[:] += 0.5e-3  # each kernel still runs while the next begins
    live.update([step(1), late])
    assert sum(row["us"] for row in live.stages()) == pytest.approx(15_000)


def test_kernels_are_told_apart_by_stage_and_sorted_by_time() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0)])
    rows = live.kernels()
    assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
    ffn = next(row for row in rows if row["stage"] == "matmul_ffn_up")
    assert (ffn["name"], ffn["calls"]) == ("mv", 2)
    assert ffn["gb_per_s"] == pytest.approx(2 * stage_cost(CONFIG, "matmul_ffn_up", 3).bytes_min / 2e-3 / 1e9)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_bytes_of_a_stage_with_two_kernels_are_charged_once() -> None:
    kernels = (Kernel("attention", 0, "score"), Kernel("attention", 0, "mix"))
    live = panels()
    for pos in (1, 2):
        starts = np.array([0.0, 1e-3])
        live.update([StepRecord(0, "decode", pos, pos + 1, 1, kernels, starts, starts + 1e-3, 0.0, 2e-3, 2e-3, 2e-3, 1)])
    rows = {row["name"]: row for row in live.kernels()}
    assert rows["score"]["gb_per_s"] == pytest.approx(stage_cost(CONFIG, "attention", 3).bytes_min / 1e-3 / 1e9)
    assert rows["mix"]["gb_per_s"] is None
    assert live.stages()[0]["bytes"] == stage_cost(CONFIG, "attention", 3).bytes_min


def test_old_figures_stay_until_the_next_answer_has_its_own() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0)])
    before = live.summary()
    live.reset()
    assert live.summary()["tok_per_s"] == before["tok_per_s"]
    assert live.layers().sum() > 0
    assert live.own_figures()["tok_per_s"] is None
    live.update([step(1, at=3.0), step(2, at=4.0, row_s=2e-3)])
    assert live.summary()["ms"] == pytest.approx(28.0)


def test_clear_forgets_points_and_figures() -> None:
    live = panels()
    live.update([step(1), step(2, at=1.0)])
    live.clear()
    assert len(live.points()) == 0
    assert live.summary()["tok_per_s"] is None
    assert live.summary()["kv_bytes"] == 0


def test_the_floor_is_all_bytes_at_the_peak() -> None:
    line = panels().floor_line()
    assert line[:, 0].tolist() == [0, 1000]
    np.testing.assert_allclose(line[:, 1], [step_cost(CONFIG, n).bytes_min / 10e9 * 1e3 for n in (0, 1000)], rtol=1e-6)


def test_the_kv_line_bends_at_a_sliding_window() -> None:
    config = CONFIG.replace(sliding_window=300)
    line = LivePanels(config, kv_dtype="fp16", seq_len=1000, peak_gb_per_s=10.0).kv_line()
    assert line[:, 0].tolist() == [0, 300, 1000]
    assert line[1, 1] == line[2, 1] == pytest.approx(kv_bytes(config, 300) / 10e9 * 1e3)


def test_without_a_peak_there_are_no_lines_and_no_percentages() -> None:
    live = panels(peak_gb_per_s=None)
    live.update([step(1), step(2, at=1.0)])
    assert live.floor_line().shape == (0, 2)
    assert live.summary()["of_peak"] is None
    assert live.summary()["kv_full_ms"] is None
    assert live.kernels()[0]["of_peak"] is None


def test_the_trend_of_attention_ignores_a_stutter() -> None:
    live = panels()
    for pos in range(200):
        record = step(pos, at=float(pos))
        attention_s = (0.5 + 0.01 * pos) * 1e-3 * (40 if pos == 150 else 1)
        kernels = (Kernel("attention", 0, "att"),)
        live.update(
            [StepRecord(0, "decode", pos, pos, 1, kernels, np.zeros(1), np.array([attention_s]), 0.0, attention_s, attention_s,
                        attention_s, record.token)]
        )  # fmt: skip
    trend = live.kv_trend()
    assert trend is not None
    assert trend[1] == pytest.approx(0.01, rel=0.02)
    assert live.summary()["kv_trend_ms"] == pytest.approx(0.5 + 0.01 * 1000, rel=0.03)


def test_no_trend_from_a_few_points() -> None:
    live = panels()
    live.update([step(pos, at=float(pos)) for pos in range(20)])
    assert live.kv_trend() is None


def test_the_cost_of_a_token_is_the_step_that_chose_it() -> None:
    live = panels()
    live.update([step(0, phase="prefill", n=4), step(4, at=1.0)])
    assert live.token_cost(5)[0] == pytest.approx(15.0)
    assert math.isnan(live.token_cost(9)[0])


def test_thin_keeps_ends_and_order() -> None:
    points = np.arange(1000, dtype=np.float32).reshape(-1, 1)
    kept = thin(points, 100)[:, 0]
    assert len(kept) == 100
    assert (kept[0], kept[-1]) == (0, 999)
    assert (np.diff(kept) > 0).all()
