"""Comparisons: rows add up to the change, noise is called noise, and whatever else differs is said."""

from __future__ import annotations

import copy
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import calmnb
from calmnb.cli import app
from calmnb.engine.stages import stage_cost
from calmnb.errors import ConfigError
from calmnb.profile.compare import COMPARE_COLUMNS, MIN_STEPS, compare
from calmnb.profile.pivot import PIVOT_KEYS, PIVOT_STATISTICS, PIVOT_VALUES
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from calmnb.profile.settings import distinguishing_labels, setting_differences
from calmnb.profile.typical import at_mean_context, central
from calmnb.profile.waterfall import fit_streams, waterfall
from tests.profile_fakes import LLAMA_1B, SMOL, exact_session, kernels_of, noisy_recorder

SMALL = SMOL.replace(n_layers=3)


def session(seed: int = 0, tokens: int = 30, **options: Any) -> Session:
    return noisy_recorder(options.pop("config", SMALL), tokens=tokens, seed=seed, **options).session()


@pytest.fixture(scope="module")
def fp16() -> Session:
    return session(config=SMALL.replace(dtype="fp16"), dtype="fp16")


@pytest.fixture(scope="module")
def fp8() -> Session:
    return session(seed=1)


# ---------------------------------------------------------------- arithmetic


@settings(deadline=None, max_examples=25)
@given(
    seeds=st.tuples(st.integers(0, 5), st.integers(6, 9)),
    by=st.sampled_from(["stage", "layer", "kernel", "source", ("layer", "stage")]),
    layers=st.integers(1, 4),
    phase=st.sampled_from(["decode", "prefill"]),
)
def test_rows_sum_to_the_whole_change(seeds: tuple[int, int], by: Any, layers: int, phase: Any) -> None:
    a = session(seeds[0], tokens=9, config=SMOL.replace(n_layers=2))
    b = session(seeds[1], tokens=12, config=SMOL.replace(n_layers=layers))
    result = compare(a, b, by=by, phase=phase)
    for column in ("time_us_a", "time_us_b", "difference_us"):
        assert result.table[column].sum() == pytest.approx(result.total[column], abs=1e-6)
    assert result.table["change_percent"].sum() == pytest.approx(100.0)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 20),
    tokens=st.integers(2, 20),
    by=st.sampled_from(["stage", "layer", "kernel", ["layer", "stage"]]),
    stride=st.sampled_from([1, 40]),
)
def test_a_session_compared_with_itself_shows_no_difference(seed: int, tokens: int, by: Any, stride: int) -> None:
    a = session(seed, tokens=tokens, stride=stride)
    result = compare(a, a, by=by)
    assert (result.table["difference_us"] == 0).all()
    assert set(result.table["verdict"]) == {"no difference shown"}
    assert result.total["verdict"] == "no difference shown"
    assert result.settings == ()
    assert result.labels == ("a", "b")


def test_swapping_the_sessions_turns_the_signs(fp16: Session, fp8: Session) -> None:
    there, back = compare(fp16, fp8), compare(fp8, fp16)
    assert there.table["difference_us"].to_numpy() == pytest.approx(-back.table["difference_us"].to_numpy())
    turned = back.table["verdict"].replace({"faster": "slower", "slower": "faster"})
    assert list(there.table["verdict"]) == list(turned)


def test_exact_times_give_exact_differences() -> None:
    def exact(slower: float) -> Session:
        recorder = SessionRecorder({**session().meta, "peaks": {}})
        kernels = kernels_of(SMALL)
        for step in range(12):
            each = np.where([k.stage == "matmul_qkv" for k in kernels], 2e-5 + slower, 1e-5)
            ends = step + np.cumsum(each)
            recorder.add("decode", step, 100, 1, kernels, ends - each, ends, float(step), float(ends[-1]))
        return recorder.session()

    table = compare(exact(0.0), exact(5e-6)).table.set_index("stage")
    assert table.loc["matmul_qkv", "difference_us"] == pytest.approx(3 * 5.0, abs=1e-3)
    assert table.loc["matmul_qkv", "verdict"] == "slower"
    assert table.loc["matmul_qkv", "ratio"] == pytest.approx(1.25, rel=1e-4)
    assert set(table.drop(index="matmul_qkv")["verdict"]) == {"no difference shown"}


# ---------------------------------------------------------------- certainty


def test_weights_of_half_the_size_are_faster_and_attention_is_not(fp16: Session, fp8: Session) -> None:
    table = compare(fp16, fp8).table.set_index("stage")
    weights = ["matmul_qkv", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output"]
    assert set(table.loc[weights, "verdict"]) == {"faster"}
    assert table.loc[["attention", "sample", "gap"], "verdict"].eq("no difference shown").all()


def test_a_verdict_is_given_exactly_where_the_interval_excludes_zero(fp16: Session, fp8: Session) -> None:
    table = compare(fp16, fp8, by=["layer", "stage"]).table
    assert ((table["low_us"] <= table["difference_us"]) & (table["difference_us"] <= table["high_us"])).all()
    sure = (table["low_us"] > 1e-3) | (table["high_us"] < -1e-3)
    assert (sure == (table["verdict"] != "no difference shown")).all()


def test_false_alarms_are_rare_among_all_rows_together() -> None:
    """Recordings that differ in nothing but noise: 5% may raise any alarm; with 40 pairs, 7 has a chance of 1%."""
    recordings = [session(seed, tokens=40) for seed in range(80)]
    pairs = list(zip(recordings[::2], recordings[1::2], strict=True))
    alarms = sum((compare(a, b).table["verdict"] != "no difference shown").any() for a, b in pairs)
    assert alarms <= 6


def test_a_few_slow_steps_do_not_count() -> None:
    calm, disturbed = noisy_recorder(SMALL, tokens=60), noisy_recorder(SMALL, tokens=60)
    for step in disturbed.steps[10:20]:
        step.ends[5:] += 0.05
        step.starts[6:] += 0.05
        step.step_end += 0.05
    result = compare(calm.session(), disturbed.session())
    assert abs(result.total["ratio"] - 1) < 0.03


def test_a_longer_answer_is_no_noise_of_attention() -> None:
    """Attention grows with the context; taken for noise, the growth would hide all but the largest differences."""
    a, b = (session(seed, tokens=60, stride=60, config=SMOL.replace(n_layers=2)) for seed in (0, 1))
    row = compare(a, b).table.set_index("stage").loc["attention"]
    spread = a.pivot("step", "stage")["attention"].std()
    assert row["high_us"] - row["low_us"] < 0.5 * spread


def drifting(tokens: int, runs: int, seed: int) -> Session:
    """Each run is slower than the others by a factor of its own, as on a machine that others use too."""
    random = np.random.default_rng(seed)
    whole = SessionRecorder(session().meta)
    for run in range(runs):
        factor, now = random.lognormal(0.0, 0.1), 1000.0 * run
        for step in noisy_recorder(SMALL, tokens=tokens, seed=int(random.integers(1 << 30))).steps:
            spans = [now + factor * (times - 1000.0) for times in (step.starts, step.ends)]
            ends = (now + factor * (step.step_start - 1000.0), now + factor * (step.step_end - 1000.0))
            whole.add(step.phase, step.pos, step.kv_len, step.n_tokens, step.kernels, *spans, *ends)
    return whole.session()


def test_runs_that_drift_are_no_difference_where_there_are_several() -> None:
    pairs = [compare(drifting(8, 8, seed), drifting(8, 8, seed + 100)) for seed in range(12)]
    assert all(pair.by_runs for pair in pairs)
    assert sum((pair.table["verdict"] != "no difference shown").any() for pair in pairs) <= 2


def test_what_the_intervals_cover_is_said(fp16: Session, fp8: Session) -> None:
    assert "not between runs" in compare(fp16, fp8).method
    assert "whole runs" in compare(drifting(4, 5, 0), drifting(4, 6, 1)).method
    assert "whole runs" not in compare(drifting(4, 5, 0), drifting(9, 4, 1)).method


def test_a_machine_that_was_not_equally_free_is_noted() -> None:
    notes = compare(session(), session(peaks={"measured": {"gb_per_s": 20.0}})).notes
    assert any("34.2 GB/s (measured) and 20 GB/s (measured)" in note for note in notes)


def test_more_confidence_takes_wider_intervals(fp16: Session, fp8: Session) -> None:
    some, more = (compare(fp16, fp8, confidence=level).table for level in (0.8, 0.99))
    assert (more["high_us"] - more["low_us"]).sum() > (some["high_us"] - some["low_us"]).sum()


def test_the_same_sessions_give_the_same_intervals(fp16: Session, fp8: Session) -> None:
    assert compare(fp16, fp8).table.equals(compare(fp16, fp8).table)


def test_too_few_steps_show_nothing_and_say_so(fp16: Session) -> None:
    result = compare(fp16, session(tokens=MIN_STEPS))  # one of them is the warm-up
    assert set(result.table["verdict"]) == {"no difference shown"}
    assert result.table["low_us"].isna().all()
    assert any("too few" in note for note in result.notes)
    assert json.loads(json.dumps(result.to_dict()))["steps"] == [29, MIN_STEPS - 1]


# ---------------------------------------------------------------- different things


def test_rows_that_one_session_lacks_are_kept_and_named() -> None:
    table = compare(session(), session(config=SMOL.replace(n_layers=5)), by="layer").table.set_index("layer")
    assert list(table.index) == [0, 1, 2, 3, 4, -1]
    assert set(table.loc[[3, 4], "verdict"]) == {"only in b"}
    assert (table.loc[[3, 4], "time_us_a"] == 0).all()
    assert table.loc[[3, 4], "ratio"].isna().all()


def test_kernels_of_other_names_stand_side_by_side(fp16: Session, fp8: Session) -> None:
    table = compare(fp16, fp8, by="kernel").table
    found = dict(table.groupby("verdict")["kernel"].unique())
    assert set(found["only in a"]) == {"matvec_fp16"}
    assert set(found["only in b"]) == {"matvec_fp8"}


def test_every_setting_that_differs_is_listed_and_shown() -> None:
    a = session()
    where = {"device": "NVIDIA H200", "threads": 0, "time_source": "stamps", "peaks": {"measured": {"gb_per_s": 4640.0}}}
    config = LLAMA_1B.replace(n_layers=2)
    b = session(config=config, model="other", first=400, kv_dtype="fp8", git_revision="def", **where)
    result = compare(a, b)
    names = {name for name, _, _ in result.settings}
    assert {
        "model",
        "weights",
        "KV cache",
        "device",
        "times",
        "context",
        "config.n_layers",
        "measured peak",
        "git_revision",
    } <= names
    assert len(result.notes) == 3
    for shown in (repr(result), result._repr_html_()):
        for name, _, value in result.settings:
            assert name in shown
            assert value in shown


def test_a_peak_read_twice_is_no_other_setting() -> None:
    a, b = session(), session(peaks={"measured": {"gb_per_s": 34.9}})
    assert setting_differences(a, b) == ()


@pytest.mark.parametrize(
    ("changed", "labels"),
    [
        ({"dtype": "gf4"}, ("fp8", "gf4")),
        ({"kv_dtype": "fp8"}, ("KV fp16", "KV fp8")),
        ({"git_revision": "def"}, ("revision abc1234", "revision def")),
        ({"model": "other", "git_revision": "def"}, ("fake-model", "other")),
        ({"model": "other", "dtype": "gf4", "device": "H200"}, ("fake-model, fp8", "other, gf4")),
        ({"versions": {}}, ("a", "b")),
        ({"model": "fake-model-gf4", "dtype": "gf4"}, ("fp8", "gf4")),
    ],
)
def test_labels_are_what_tells_the_sessions_apart(changed: dict[str, Any], labels: tuple[str, str]) -> None:
    assert distinguishing_labels(session(tokens=3), session(tokens=3, **changed)) == labels


# ---------------------------------------------------------------- how it shows itself


def test_the_table_has_the_documented_columns(fp16: Session, fp8: Session) -> None:
    result = compare(fp16, fp8, by=["layer", "stage"])
    assert list(result.table.columns) == ["layer", "stage", *COMPARE_COLUMNS]
    assert list(result.total) == list(COMPARE_COLUMNS)


def test_the_summary_is_one_line_with_the_change_and_its_certainty(fp16: Session, fp8: Session) -> None:
    line = compare(fp16, fp8).summary()
    assert "\n" not in line
    for fact in ("fake-model", "Fake CPU", "fp16 -> fp8", "ms/token", "95%:", "faster", "most in", "calmnb 0.1.0"):
        assert fact in line


def test_reports_escape_what_comes_from_files(fp8: Session) -> None:
    html = compare(fp8, session(model="<script>alert(1)</script>"))._repr_html_()
    assert "<script" not in html
    assert "&lt;script" in html


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"by": "step"}, "'stage', 'layer', 'kernel'"),
        ({"by": ["stage", "pos"]}, "stage, layer, kernel, source"),
        ({"by": []}, "stage, layer, kernel, source"),
        ({"phase": "both"}, "'decode' and 'prefill'"),
        ({"confidence": 95}, "between 0 and 1"),
    ],
)
def test_what_is_not_accepted_is_answered_with_what_is(fp8: Session, options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        compare(fp8, fp8, **options)


def test_a_path_or_an_empty_session_is_refused(fp8: Session) -> None:
    with pytest.raises(ConfigError, match=r"Session\.load"):
        compare("a.calmprof", fp8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="b: the session has no decode step"):
        compare(fp8, SessionRecorder({}).session())


def test_compare_stays_a_function_after_its_module_is_imported() -> None:
    import_module("calmnb.profile.compare")
    assert calmnb.profile.compare is calmnb.compare
    assert calmnb.compare(session(), session()).total["difference_us"] == 0


# ---------------------------------------------------------------- typical steps and the waterfall


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_middle_has_as_many_faster_as_slower_steps_beside_it(times: list[float]) -> None:
    middle = central(np.array(times))
    cut = int(0.2 * len(times))
    assert len(middle) == len(times) - 2 * cut
    assert sorted(times)[cut : len(times) - cut] == sorted(np.array(times)[middle])


def test_steps_on_a_straight_line_become_the_one_at_their_mean_context() -> None:
    context = np.arange(10.0, 30.0)
    seconds = np.stack([2 * context, np.full(20, 7.0)], axis=1)
    flat, nbytes = at_mean_context(seconds, 3 * seconds, context)
    assert flat == pytest.approx(np.tile([39.0, 7.0], (20, 1)))
    assert nbytes == pytest.approx(3 * flat)


@pytest.mark.parametrize("by", ["stage", "cause"])
@pytest.mark.parametrize("options", [{}, {"gb_per_s": {"output": 80.0}}, {"stride": 50}])
def test_the_waterfall_sums_to_the_measured_step(options: dict[str, Any], by: Any) -> None:
    recording = session(**options)
    table = waterfall(recording, by=by).set_index("part")
    parts = table[table["kind"] != "total"].drop(index="host", errors="ignore")
    assert parts["time_us"].sum() == pytest.approx(table.loc["step", "time_us"])
    assert table.loc["step", "time_us"] == pytest.approx(1e3 * recording.tokens().query("~warmup")["time_ms"].median(), rel=0.1)
    assert parts["start_us"].to_numpy() == pytest.approx(np.cumsum([0, *parts["time_us"].to_numpy()[:-1]]))


def test_the_waterfall_begins_with_bytes_over_the_peak_asked_for() -> None:
    table = waterfall(session(), 10.0).set_index("part")
    steps = session().steps.query("phase == 'decode' and not warmup")
    assert table.loc["weights", "time_us"] == pytest.approx((steps["bytes_min"] - steps["kv_bytes"]).iloc[0] / 10e3)
    assert table.loc["kv", "time_us"] == pytest.approx(steps["kv_bytes"].mean() / 10e3, rel=0.02)
    with pytest.raises(ConfigError, match="datasheet"):
        waterfall(session(), "datasheet")


def test_a_stage_read_from_a_cache_falls_below_its_bytes() -> None:
    table = waterfall(session(gb_per_s={"output": 80.0}, fixed_s=0.0)).set_index("part")
    assert table.loc["output", "time_us"] < 0


def streaming(fixed_us: float, gb_per_s: float, **options: Any) -> Session:
    """Weight kernels take a fixed time and their bytes over a rate, to the last bit; attention takes ten times its bytes."""

    def stage_us(stage: str) -> float:
        nbytes = stage_cost(SMOL, stage, 1).bytes_min  # type: ignore[arg-type]
        return 7.0 if stage == "embed" else fixed_us + nbytes / gb_per_s / 1e3

    kv_us = SMOL.kv_bytes_per_token("fp16") / 10.0 / 1e3
    return exact_session((0,), attention_us=lambda n: 10 * n * kv_us, rest_us=0, tokens=12, stage_us=stage_us, **options)


def test_a_line_through_the_weight_kernels_gives_back_their_fixed_time_and_rate() -> None:
    fit = fit_streams(streaming(3.0, 20.0))
    assert (fit.fixed_us, fit.gb_per_s) == (pytest.approx(3.0, rel=1e-6), pytest.approx(20.0, rel=1e-6))
    assert fit.kernels == 4 * SMOL.n_layers + 1
    assert fit.residual_percent == pytest.approx(0, abs=1e-6)
    assert str(fit).startswith("3.00 us + bytes at 20 GB/s, for each of 121 weight kernels")


def test_each_cause_gets_the_time_that_it_costs() -> None:
    recording = streaming(3.0, 20.0, gap_us=11.0)
    table = waterfall(recording, 40.0, by="cause").set_index("part")["time_us"]
    read = (
        sum(
            SMOL.n_layers * stage_cost(SMOL, stage, 1).bytes_min  # type: ignore[arg-type]
            for stage in ("matmul_qkv", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")
        )
        + stage_cost(SMOL, "output", 1).bytes_min
    )
    kv = float(recording.steps.query("not warmup")["kv_bytes"].mean())
    row = stage_cost(SMOL, "embed", 1).bytes_min
    assert table["ramp"] == pytest.approx(3.0 * 121)
    assert table["rate"] == pytest.approx(read / 20e3 - read / 40e3)
    assert table["weights"] == pytest.approx((read + row) / 40e3)
    assert table["kv"] == pytest.approx(kv / 40e3)
    assert table["attention"] == pytest.approx(kv / 1e3 - kv / 40e3)
    assert table["small"] == pytest.approx(7.0 - row / 40e3)
    assert table["gap"] == pytest.approx(11.0)


def test_kernels_that_have_no_fixed_time_are_not_given_a_negative_one() -> None:
    fit = fit_streams(session(gb_per_s={"output": 10.0}, fixed_s=0.0))
    assert fit.fixed_us == 0.0
    assert fit.gb_per_s > 0


def test_a_session_whose_kernels_declare_no_bytes_has_no_line() -> None:
    with pytest.raises(ConfigError, match="reads weights"):
        fit_streams(Session(session().events.assign(bytes_min=0), session().steps, session().meta))
    with pytest.raises(ConfigError, match="accepted are 'stage' and 'cause'"):
        waterfall(session(), by="layer")  # type: ignore[arg-type]


# ---------------------------------------------------------------- pivot


def test_pivot_gives_the_tables_numbers(fp8: Session) -> None:
    by_hand = fp8.layers().pivot(index="layer", columns="stage", values="time_us")
    assert fp8.pivot("layer", "stage")[list(by_hand)].to_numpy() == pytest.approx(by_hand.to_numpy(), nan_ok=True)
    rates = fp8.stages().set_index("stage")["gb_per_s"]
    assert fp8.pivot("stage", values="gb_per_s")["gb_per_s"].to_numpy() == pytest.approx(rates.to_numpy(), nan_ok=True)


def test_pivoted_times_of_a_step_add_up_to_it(fp8: Session) -> None:
    table = fp8.pivot("step", ["layer", "stage"], statistic="sum")
    durations = fp8.steps.set_index("step").loc[table.index, "duration_s"] * 1e6
    assert table.sum(axis=1).to_numpy() == pytest.approx(durations.to_numpy())


def test_shares_of_a_pivot_sum_to_one_hundred(fp8: Session) -> None:
    table = fp8.pivot(["phase", "stage"], values="share_percent", phase=None, statistic="mean")["share_percent"]
    assert table.groupby(level="phase", observed=True).sum().to_numpy() == pytest.approx([100.0, 100.0])


@pytest.mark.parametrize("key", PIVOT_KEYS)
@pytest.mark.parametrize("values", PIVOT_VALUES)
def test_every_documented_column_can_be_pivoted_on(fp8: Session, key: str, values: str) -> None:
    table = fp8.pivot(key, values=values)
    assert table.index.name == key
    assert list(table.columns) == [values]


@pytest.mark.parametrize("statistic", PIVOT_STATISTICS)
def test_every_statistic_is_a_number_for_each_stage(fp8: Session, statistic: str) -> None:
    assert np.isfinite(fp8.pivot("stage", statistic=statistic)["time_us"]).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"index": "colour"}, "kv_len, n_tokens, layer"),
        ({"index": "layer", "columns": "colour"}, "columns names 'colour'"),
        ({"index": "layer", "values": "speed"}, "gb_per_s"),
        ({"index": "layer", "statistic": "mode"}, "median, mean"),
        ({"index": "layer", "columns": "layer"}, "layer is named twice"),
        ({"index": []}, "index names no column"),
        ({"index": "layer", "phase": "both"}, "None for both"),
    ],
)
def test_pivot_names_what_it_accepts(fp8: Session, options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fp8.pivot(**options)


def test_what_an_outside_tool_added_can_be_pivoted_on_and_compared_by() -> None:
    read = session()
    read.events["nvtx"] = ["my range" if layer == 1 else "" for layer in read.events["layer"]]
    read.events["bytes_measured"] = 2 * read.events["bytes_min"]
    layer = read.pivot("layer").loc[1, "time_us"]
    assert read.pivot("nvtx").loc["my range", "time_us"] == pytest.approx(layer)
    double = 2 * read.pivot("stage", values="bytes_min")["bytes_min"]
    assert list(read.pivot("stage", values="bytes_measured")["bytes_measured"]) == list(double)
    assert set(compare(read, read, by="nvtx").table["nvtx"]) == {"", "my range"}
    with pytest.raises(ConfigError, match="source"):
        compare(read, session(), by="nvtx")
    with pytest.raises(ConfigError, match="source, nvtx"):
        read.pivot("colour")


def test_contexts_that_nobody_knows_are_not_made_up() -> None:
    read = session()
    read.steps["kv_len"] = 0
    result = compare(read, session())
    assert ("context", "unknown", "26-54") in result.settings
    assert result.notes == ()


# ---------------------------------------------------------------- command


def test_the_command_prints_json_alone_and_writes_the_figure(fp16: Session, fp8: Session, tmp_path: Path) -> None:
    paths = [str(s.save(tmp_path / name)) for s, name in ((fp16, "a.calmprof"), (fp8, "b.calmprof"))]
    picture = tmp_path / "difference.png"
    done = CliRunner().invoke(app, ["compare", *paths, "--by", "layer,stage", "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["labels"] == ["fp16", "fp8"]
    assert math.isclose(sum(row["difference_us"] for row in facts["table"]), facts["total"]["difference_us"], abs_tol=1e-6)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_settings_table_and_summary(fp16: Session, fp8: Session, tmp_path: Path) -> None:
    paths = [str(s.save(tmp_path / name)) for s, name in ((fp16, "a.calmprof"), (fp8, "b.calmprof"))]
    done = CliRunner().invoke(app, ["compare", *paths])
    assert done.exit_code == 0, done.output
    for text in ("settings that differ", "matmul_ffn_up", "whole step", "faster", compare(fp16, fp8).summary()):
        assert text in done.stdout


def test_a_session_that_was_held_back_is_told(fp16: Session, fp8: Session) -> None:
    def held(session: Session, *reasons: str) -> Session:
        held_back = copy.copy(session)
        held_back.meta = {**session.meta, "telemetry": {"columns": {"throttled": list(reasons)}}}
        return held_back

    slow = held(fp16, "power cap", "", "", "")
    note = "a was held back by power cap in 25% of samples, b was not: part of the difference may be that"
    assert note in compare(slow, fp8).notes
    assert note in repr(compare(slow, fp8))
    both = compare(slow, held(fp8, "thermal slowdown, power cap")).notes
    assert any("a was held back" in note and "b was held back" in note for note in both)
    assert not any("held back" in n for n in compare(fp16, held(fp8, "", "")).notes)
    assert "THROTTLED: power cap" in slow.summary()
