"""Power and clocks: the figure shows the samples, and every figure says when the GPU was held back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Polygon, Rectangle

from calmnb import plots
from calmnb.errors import ConfigError
from calmnb.profile.session import Session
from tests.profile_fakes import SMOL, noisy_recorder
from tests.unit.test_plots import texts
from tests.unit.test_plots_compare import check_page

TIMES = [0.0, 0.05, 0.1, 0.15]


def session(throttled: tuple[str, ...] = ("", "", "", ""), **more: Any) -> Session:
    columns = {
        "time_s": TIMES, "sm_mhz": [1980, 1980, 1500, 1980], "memory_mhz": [3201] * 4, "power_w": [300.0, 690.5, 700.0, 650.0],
        "temperature_c": [40, 41, 43, 42], "throttled": list(throttled),
    }  # fmt: skip
    known = {
        "hz": 20.0, "columns": columns, "seconds": 1.31, "power_limit_w": 700.0, "energy_j": 650.0, "energy_from": "counter",
        "tokens": 650, "energy_per_token_j": 1.0, "context": 4000, **more,
    }  # fmt: skip
    return noisy_recorder(SMOL.replace(n_layers=2), tokens=6, telemetry=known).session()


@pytest.mark.parametrize("dark", [False, True])
def test_the_figure_shows_the_samples_and_the_energy_of_a_token(dark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plots.telemetry(session(), dark=dark)
    check_page(figure, monkeypatch)
    curves = [np.asarray(axes.lines[0].get_ydata(), float).tolist() for axes in figure.axes]
    assert curves == [[300.0, 690.5, 700.0, 650.0], [1980, 1980, 1500, 1980], [40, 41, 43, 42]]
    said = texts(figure).replace("\n", " ")
    for words in ("Energy per token: 1 J", "650 tokens decoded from context 4,000", "counter over 1.31 s", "limit 700 W"):
        assert words in said
    assert "not throttled" in said


def test_moments_of_throttling_are_shaded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plots.telemetry(session(("", "", "power cap", "")))
    check_page(figure, monkeypatch)
    for axes in figure.axes:
        spans = [patch for patch in axes.patches if isinstance(patch, Polygon | Rectangle)]
        assert len(spans) == 1
        box = spans[0].get_extents().transformed(axes.transData.inverted())
        assert (box.x0, box.x1) == (pytest.approx(0.075), pytest.approx(0.125))
    assert "THROTTLED (shaded): power cap in 25% of samples" in texts(figure).replace("\n", " ")


@pytest.mark.parametrize("figure", [plots.roofline, plots.layers, plots.latency, plots.kv_cost, plots.waterfall])
def test_every_figure_of_a_throttled_recording_says_so(figure: Any) -> None:
    said = texts(figure(session(("", "power cap", "power cap", "")))).replace("\n", " ")
    assert "THROTTLED: power cap in 50% of samples" in said
    assert "THROTTLED" not in texts(figure(session()))


def test_without_samples_the_figure_says_why_there_are_none() -> None:
    bare = noisy_recorder(SMOL.replace(n_layers=2), tokens=6)
    with pytest.raises(ConfigError, match="recorded without telemetry"):
        plots.telemetry(bare.session())
    bare.meta["telemetry"] = {"problem": "this engine runs on no GPU"}
    with pytest.raises(ConfigError, match="runs on no GPU"):
        plots.telemetry(bare.session())


def test_energy_that_is_not_known_is_not_in_the_title() -> None:
    said = texts(plots.telemetry(session(energy_per_token_j=None, energy_from="", power_limit_w=None)))
    assert "Power and clocks while recording" in said
    assert "limit" not in said
