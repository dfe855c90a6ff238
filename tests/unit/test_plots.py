"""Figures: each draws, in light and dark, with labelled axes, nothing clipped, and what must be said in its caption."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from calmnb import plots
from calmnb.engine.base import STAGES
from calmnb.errors import ConfigError
from calmnb.plots.style import duration, ink_on, plain, spread
from calmnb.profile import speed_of_light
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from tests.profile_fakes import LLAMA_1B, SMOL, noisy_recorder

DRAW: list[Callable[..., Figure]] = [
    plots.roofline, plots.intensity_roofline, plots.layers, plots.latency, plots.kv_cost, plots.speed_of_light,
]  # fmt: skip
H200_RATES = {"matmul_qkv": 3400.0, "attention": 2300.0, "matmul_attn": 3100.0, "matmul_ffn_up": 4200.0, "output": 4500.0}


@pytest.fixture(scope="module")
def sessions() -> dict[str, Session]:
    peaks = {"measured": {"gb_per_s": 4640.0}, "datasheet": {"gb_per_s": 4800.0}}
    rates = {**H200_RATES, "matmul_ffn_down": 4100.0, "embed": 50.0}
    return {
        "cpu": noisy_recorder(SMOL, tokens=60).session(),
        "gpu": noisy_recorder(
            LLAMA_1B, tokens=40, stride=100, gb_per_s=rates, fixed_s=3e-7, peaks=peaks, device="NVIDIA H200", threads=0,
            time_source="stamps", seq_len=8192,
        ).session(),
        "two tokens": noisy_recorder(SMOL.replace(n_layers=2), tokens=2, peaks={}).session(),
        "cached": noisy_recorder(SMOL.replace(n_layers=2), tokens=5, gb_per_s={"output": 80.0}, fixed_s=0.0).session(),
    }  # fmt: skip


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def draw(function: Callable[..., Figure], session: Session, **options: Any) -> Figure:
    if function is plots.speed_of_light and session.peak() is None:
        options["peak"] = 10.0
    return function(session, **options)


def drawn(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Bbox, float]]:
    """Text, place in pixels and rotation of all that is really drawn; labels of ticks beyond the limits are not."""
    seen: list[Text] = []
    original = Text.draw

    def record(self: Text, renderer: Any) -> None:
        original(self, renderer)
        if self.get_visible() and self.get_text().strip():
            seen.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.savefig(io.BytesIO(), format="png", dpi=100)
    renderer: Any = figure._get_renderer()  # type: ignore[attr-defined]
    unique = {id(text): text for text in seen}.values()
    return [(text.get_text(), text.get_window_extent(renderer), text.get_rotation()) for text in unique]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["cpu", "gpu", "two tokens", "cached"])
@pytest.mark.parametrize("function", DRAW, ids=lambda function: function.__name__)
def test_no_text_leaves_the_page_or_covers_another(
    function: Callable[..., Figure], sessions: dict[str, Session], name: str, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = draw(function, sessions[name], dark=dark)
    texts = drawn(figure, monkeypatch)
    width, height = figure.get_size_inches() * 100
    assert width == 800
    outside = [(text, box) for text, box, _ in texts if box.x0 < -1 or box.x1 > width + 1 or box.y0 < -1 or box.y1 > height + 1]
    assert outside == []
    level = [(text, box.padded(-1.5)) for text, box, rotation in texts if rotation in (0, 90)]
    assert [(a, b) for (a, box), (b, other) in itertools.combinations(level, 2) if box.overlaps(other)] == []


@pytest.mark.parametrize("function", DRAW, ids=lambda function: function.__name__)
def test_captions_say_what_was_measured_where_and_how(function: Callable[..., Figure], sessions: dict[str, Session]) -> None:
    said = texts(function(sessions["gpu"]))
    for fact in ("fake-model", "NVIDIA H200", "fp16", "context", "times: stamps", "decode steps"):
        assert fact in said


@pytest.mark.parametrize("function", [plots.roofline, plots.intensity_roofline, plots.speed_of_light])
def test_a_peak_line_says_which_peak_it_is(function: Callable[..., Figure], sessions: dict[str, Session]) -> None:
    assert "4800 GB/s (datasheet)" in texts(function(sessions["gpu"], "datasheet"))
    assert "123 GB/s (user)" in texts(function(sessions["gpu"], 123.0))


@pytest.mark.parametrize("function", DRAW, ids=lambda function: function.__name__)
def test_every_axis_has_a_name_with_its_unit(function: Callable[..., Figure], sessions: dict[str, Session]) -> None:
    units = ("GB/s", "FLOP", "µs", "ms", "tok", "MB", "layer", "once a token", "µs (own scale)")
    for axes in function(sessions["cpu"]).axes:
        assert any(unit in axes.get_xlabel() for unit in units), axes
        assert axes.get_ylabel() == "" or any(unit in axes.get_ylabel() for unit in units), axes


def test_bars_of_the_roofline_are_the_tables_rates(sessions: dict[str, Session]) -> None:
    table = sessions["cpu"].stages().set_index("stage")["gb_per_s"]
    widths = [patch.get_width() for patch in plots.roofline(sessions["cpu"]).axes[0].patches]  # type: ignore[attr-defined]
    wanted = [
        table[stage] for stage in ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output")
    ]
    assert widths[:-1] == pytest.approx(wanted)


def test_a_bar_beyond_the_peak_is_labelled_and_not_clipped(sessions: dict[str, Session]) -> None:
    figure = plots.roofline(sessions["cached"])
    assert "beyond the peak: cached, or the peak was read in a busy moment" in texts(figure)
    axes = figure.axes[0]
    assert max(patch.get_width() for patch in axes.patches) <= axes.get_xlim()[1]  # type: ignore[attr-defined]
    assert "beyond the peak" not in texts(plots.roofline(sessions["cpu"]))


def test_nothing_but_a_cache_beats_a_datasheet() -> None:
    peaks = {"datasheet": {"gb_per_s": 50.0}, "measured": {"gb_per_s": 40.0}}
    rates = {"output": 80.0}
    session = noisy_recorder(SMOL.replace(n_layers=2), tokens=5, gb_per_s=rates, fixed_s=0.0, peaks=peaks).session()
    assert "beyond the peak: read from a cache" in texts(plots.roofline(session))


def test_stacked_layers_add_up_to_the_table(sessions: dict[str, Session]) -> None:
    axes = plots.layers(sessions["cpu"]).axes[0]
    drawn = sum(patch.get_height() for patch in axes.patches)  # type: ignore[attr-defined]
    table = sessions["cpu"].layers()
    assert drawn == pytest.approx(table[table["layer"] >= 0]["time_us"].sum())


def test_slow_tokens_are_counted_at_the_edge_not_dropped() -> None:
    recorder = noisy_recorder(SMOL.replace(n_layers=2), tokens=50, fixed_s=1e-3, seed=1)
    step = recorder.steps[30]
    step.step_end += 10.0
    assert "slower than shown, up to 10" in texts(plots.latency(recorder.session()))


def test_the_kv_panel_reaches_to_the_full_context(sessions: dict[str, Session]) -> None:
    config = sessions["cpu"].config
    assert config is not None
    said = texts(plots.kv_cost(sessions["cpu"]))
    assert f"{config.kv_bytes_per_token() * 4096 / 1e6:.1f} MB at 4,096 tokens" in said


def test_speed_of_light_draws_predictions_without_a_session() -> None:
    limits = [speed_of_light(LLAMA_1B, name, kv_len=4096) for name in ("RTX 4090", "H200")]
    said = texts(plots.speed_of_light(limits))
    assert "1,008 GB/s (datasheet)" in said
    assert f"{plain(limits[1].tok_per_s)} tok/s" in said


def test_speed_of_light_of_a_session_compares_it_with_its_limit(sessions: dict[str, Session]) -> None:
    session = sessions["cpu"]
    said = texts(plots.speed_of_light(session))
    assert "limit" in said
    assert "% of the speed of light" in said


@pytest.mark.parametrize("function", DRAW, ids=lambda function: function.__name__)
def test_a_session_without_tokens_is_refused(function: Callable[..., Figure]) -> None:
    with pytest.raises(ConfigError, match="no decoded token"):
        function(SessionRecorder({}).session())


def test_a_peak_that_the_session_lacks_is_refused(sessions: dict[str, Session]) -> None:
    with pytest.raises(ConfigError, match="no peak 'datasheet'"):
        plots.roofline(sessions["cpu"], "datasheet")


def test_figures_show_themselves_in_notebooks(sessions: dict[str, Session]) -> None:
    assert plots.roofline(sessions["cpu"])._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


@pytest.mark.beside
def test_drawing_neither_imports_pyplot_nor_changes_global_settings() -> None:
    code = (
        "import sys, matplotlib as m\n"
        "def now(): return {k: m.rcParams[k] for k in m.rcParams if k != 'backend'}  # reading that one imports pyplot\n"
        "before = now()\n"
        "from calmnb import plots; from tests.profile_fakes import SMOL, noisy_recorder\n"
        "s = noisy_recorder(SMOL.replace(n_layers=1), tokens=3).session()\n"
        "plots.roofline(s)._repr_png_(); plots.latency(s, dark=True)._repr_png_()\n"
        "print('matplotlib.pyplot' in sys.modules, now() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_every_stage_has_a_colour_of_its_own_that_stands_out_on_both_pages() -> None:
    assert set(plots.STAGE_COLORS) == set(STAGES) == set(plots.STAGE_LABELS)
    assert len(set(plots.STAGE_COLORS.values())) == len(STAGES)
    for color in plots.STAGE_COLORS.values():
        for page in ("#ffffff", "#15181c"):
            low, high = sorted((_luminance(color), _luminance(page)))
            assert (high + 0.05) / (low + 0.05) >= 2.3, (color, page)


def test_text_on_a_bar_is_black_or_white_by_its_lightness() -> None:
    assert (ink_on("#ffffff"), ink_on("#000000")) == ("#000000", "#ffffff")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.5"), (20, "20"), (1500, "1,500"), (123.4, "123"), (0.00123, "0.00123")]
)
def test_numbers_are_written_plainly(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(("ms", "text"), [(1500, "1.5 s"), (12.34, "12.3 ms"), (0.0456, "45.6 µs")])
def test_times_take_the_unit_that_fits(ms: float, text: str) -> None:
    assert duration(ms) == text


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_are_moved_apart_in_order_and_stay_inside(wanted: list[float]) -> None:
    placed = spread(wanted, 0.1, 0.0, 1.0)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = [placed[i] for i in order]
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(heights))
    assert heights[0] >= -1e-9
    assert heights[-1] <= 1 + 1e-9
