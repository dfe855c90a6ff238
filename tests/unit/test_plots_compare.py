"""Waterfalls: bars carry on where the one above ended, doubt is hatched, and nothing is clipped or covered."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from calmnb import plots
from calmnb.errors import ConfigError
from calmnb.profile.compare import Comparison, compare
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from calmnb.profile.waterfall import fit_streams, waterfall
from tests.profile_fakes import LLAMA_1B, SMOL, noisy_recorder
from tests.unit.test_plots import drawn, texts

PEAKS = {"measured": {"gb_per_s": 4640.0}, "datasheet": {"gb_per_s": 4800.0}}
RATES = {"matmul_qkv": 3400.0, "attention": 2300.0, "matmul_attn": 3100.0, "matmul_ffn_up": 4200.0, "output": 4500.0,
         "matmul_ffn_down": 4100.0, "embed": 50.0}  # fmt: skip


@pytest.fixture(scope="module")
def sessions() -> dict[str, Session]:
    small = SMOL.replace(n_layers=2)
    gpu: dict[str, Any] = {"gb_per_s": RATES, "fixed_s": 3e-7, "peaks": PEAKS, "device": "NVIDIA H200 NVL with a long name",
                           "threads": 0, "time_source": "stamps", "stride": 100}  # fmt: skip
    return {
        "fp16": noisy_recorder(SMOL.replace(dtype="fp16"), tokens=40).session(),
        "fp8": noisy_recorder(SMOL, tokens=40, seed=1).session(),
        "slower": noisy_recorder(SMOL, tokens=40, seed=2, gb_per_s={"matmul_qkv": 19}, git_revision="def0123").session(),
        "h200": noisy_recorder(LLAMA_1B, tokens=30, **gpu).session(),
        "few": noisy_recorder(small, tokens=3).session(),
        "cached": noisy_recorder(small, tokens=5, gb_per_s={"output": 80.0}, fixed_s=0.0).session(),
    }


@pytest.fixture(scope="module")
def comparisons(sessions: dict[str, Session]) -> dict[str, Comparison]:
    fp16, fp8, gpu = sessions["fp16"], sessions["fp8"], sessions["h200"]
    return {
        "stages": compare(fp16, fp8),
        "small change": compare(fp8, sessions["slower"]),
        "itself": compare(fp8, fp8),
        "apples and pears": compare(fp16, gpu),
        "few": compare(sessions["few"], sessions["few"]),
        "layers": compare(fp16, fp8, by="layer"),
        "kernels": compare(gpu, fp8, by="kernel"),
        "prompt": compare(fp16, fp8, phase="prefill"),
    }


def bars(figure: Figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def check_page(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawn(figure, monkeypatch)
    width, height = figure.get_size_inches() * 100
    assert width == 800
    assert [text for text, box, _ in found if box.x0 < -1 or box.x1 > width + 1 or box.y0 < -1 or box.y1 > height + 1] == []
    level = [(text, box.padded(-1.5)) for text, box, rotation in found if rotation in (0, 90)]
    assert [(a, b) for (a, box), (b, other) in itertools.combinations(level, 2) if box.overlaps(other)] == []


DRAW = {"stages": False, "small change": True, "itself": False, "apples and pears": True, "few": False, "layers": False,
        "kernels": False, "prompt": True}  # fmt: skip


@pytest.mark.parametrize(("name", "dark"), DRAW.items())
def test_no_text_of_a_comparison_leaves_the_page_or_covers_another(
    comparisons: dict[str, Comparison], name: str, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(plots.compare(comparisons[name], dark=dark), monkeypatch)


@pytest.mark.parametrize(("name", "dark"), [("fp8", False), ("h200", True), ("few", False), ("cached", True)])
def test_no_text_of_a_waterfall_leaves_the_page_or_covers_another(
    sessions: dict[str, Session], name: str, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(plots.waterfall(sessions[name], dark=dark), monkeypatch)
    check_page(plots.waterfall(sessions[name], by="cause", dark=dark), monkeypatch)


def test_bars_lead_from_one_step_to_the_other(comparisons: dict[str, Comparison]) -> None:
    comparison = comparisons["stages"]
    first, *between, last = bars(plots.compare(comparison))
    at = first.get_width()
    for bar, difference in zip(between, comparison.table["difference_us"] / 1e3, strict=True):
        assert bar.get_x() == pytest.approx(at)
        assert bar.get_width() == pytest.approx(difference)
        at += difference
    assert last.get_width() == pytest.approx(at) == pytest.approx(comparison.total["time_us_b"] / 1e3)


def test_many_rows_still_lead_from_one_step_to_the_other(comparisons: dict[str, Comparison]) -> None:
    first, *between, last = bars(plots.compare(comparisons["layers"]))
    assert len(between) < len(comparisons["layers"].table)
    assert first.get_width() + sum(bar.get_width() for bar in between) == pytest.approx(last.get_width())


def test_uncertain_bars_are_hatched_and_named(comparisons: dict[str, Comparison]) -> None:
    comparison = comparisons["small change"]
    figure = plots.compare(comparison)
    hatched = [bar.get_hatch() is not None for bar in bars(figure)[1:-1]]
    assert hatched == list(comparison.table["verdict"] == "no difference shown")
    assert any(hatched)
    assert not all(hatched)
    assert "unclear" in texts(figure)


def test_stages_keep_their_colours(comparisons: dict[str, Comparison]) -> None:
    comparison = comparisons["apples and pears"]
    colors = [tuple(bar.get_facecolor()) for bar in bars(plots.compare(comparison))[1:-1]]
    wanted = [Rectangle((0, 0), 1, 1, color=plots.STAGE_COLORS[stage]).get_facecolor() for stage in comparison.table["stage"]]
    sure = comparison.table["verdict"] != "no difference shown"
    assert [c for c, s in zip(colors, sure, strict=True) if s] == [c for c, s in zip(wanted, sure, strict=True) if s]


def test_an_axis_that_does_not_start_at_zero_says_so(comparisons: dict[str, Comparison]) -> None:
    for name, is_cut in (("stages", False), ("small change", True)):
        axes = plots.compare(comparisons[name]).axes[0]
        assert (axes.get_xlim()[0] > 0) == is_cut == ("does not start at 0" in axes.get_xlabel())


def test_a_comparisons_caption_names_what_differs_and_what_does_not(comparisons: dict[str, Comparison]) -> None:
    said = texts(plots.compare(comparisons["apples and pears"]))
    for fact in ("fake-model", "NVIDIA H200", "times: cpu / stamps", "context 26-64 / 125-", "decode steps",
                 "more settings differ", "the models differ in size", "95% for all rows together"):  # fmt: skip
        assert fact in said


def test_the_title_says_no_more_than_was_shown(comparisons: dict[str, Comparison]) -> None:
    assert "fp16 → fp8: 1.8" in texts(plots.compare(comparisons["stages"]))
    assert "more time" in texts(plots.compare(comparisons["small change"]))
    assert "a → b: no difference shown" in texts(plots.compare(comparisons["itself"]))


@pytest.mark.parametrize("name", ["fp8", "h200", "cached"])
def test_the_waterfalls_bars_are_the_tables(sessions: dict[str, Session], name: str) -> None:
    figure = plots.waterfall(sessions[name])
    table = waterfall(sessions[name])
    scale = 1e-3 if figure.axes[0].get_xlabel().startswith("ms") else 1.0
    assert [bar.get_width() for bar in bars(figure)] == pytest.approx(list(table["time_us"] * scale))
    assert [bar.get_x() for bar in bars(figure)] == pytest.approx(list(table["start_us"] * scale))


def test_a_waterfall_says_which_peak_and_what_a_bar_to_the_left_means(sessions: dict[str, Session]) -> None:
    assert "peak 4800 GB/s (datasheet)" in texts(plots.waterfall(sessions["h200"], "datasheet"))
    assert "read from a cache" in texts(plots.waterfall(sessions["cached"]))
    assert "read from a cache" not in texts(plots.waterfall(sessions["fp8"]))


def test_causes_are_named_and_the_line_behind_them_is_in_the_caption(sessions: dict[str, Session]) -> None:
    figure = plots.waterfall(sessions["h200"], by="cause")
    widths = [bar.get_width() for bar in bars(figure)]
    table = waterfall(sessions["h200"], by="cause")
    assert sorted(widths) == pytest.approx(sorted(table["time_us"]), abs=1e-6)
    said = texts(figure)
    for words in ("kernels' ramp-up and tail", "weights below the peak", "no kernel running"):
        assert words in said
    fit = fit_streams(sessions["h200"])
    assert f"{fit.fixed_us:.2f} us + bytes at {fit.gb_per_s:.0f} GB/s" in said.replace("\n", " ")


def test_a_waterfall_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no decoded token"):
        plots.waterfall(SessionRecorder({}).session())
