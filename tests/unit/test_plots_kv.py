"""Figures of the KV cache and of rooflines by kernel: several sessions in one figure, memory, caches named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from calmnb import plots
from calmnb.errors import ConfigError
from calmnb.profile.kv import context_limits, kv_milestones
from calmnb.profile.session import Session
from calmnb.shapes import shape_config
from tests.profile_fakes import LLAMA_1B, SMOL, exact_session, noisy_recorder
from tests.unit.test_plots import texts
from tests.unit.test_plots_compare import PEAKS, RATES, check_page

CONTEXTS = (0, 500, 1000, 2000, 4000, 8000, 16000, 32000)


def gpu_session(kv_dtype: str = "fp16", dtype: str = "fp16") -> Session:
    item = 2 if kv_dtype == "fp16" else 1
    config = LLAMA_1B.replace(dtype=dtype)
    return exact_session(
        CONTEXTS, attention_us=lambda n: 40 + n * 16 * 1024 * item / 3.5e6, rest_us=500, config=config, kv_dtype=kv_dtype,
        dtype=dtype, device="NVIDIA H200", threads=0, time_source="stamps", peaks=PEAKS, seq_len=32009,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> list[Session]:
    return [gpu_session(), gpu_session("fp8")]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_text_of_a_kv_figure_leaves_the_page_or_covers_another(
    pair: list[Session], count: int, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [*pair, gpu_session(dtype="fp8"), gpu_session("fp8", "fp8")][:count]
    check_page(plots.kv_cost(sessions, dark=dark), monkeypatch)


def offsets(figure: Figure, axes: int) -> list[Any]:
    return [np.asarray(c.get_offsets()) for c in figure.axes[axes].collections if len(c.get_offsets()) > 1]


def test_two_caches_share_a_figure_and_each_says_its_bytes(pair: list[Session]) -> None:
    figure = plots.kv_cost(pair)
    said = texts(figure)
    for session, name in zip(pair, ("KV fp16", "KV fp8"), strict=True):
        table = session.kv_cost()
        assert f"{name}, measured" in said
        full = session.config.kv_bytes_per_token(session.meta["kv_dtype"]) * 32009 / 1e6  # type: ignore[union-attr]
        assert f"{name}: {full:,.0f} MB at 32,009" in said
        dots = [tuple(map(float, line.get_xdata())) for line in figure.axes[0].lines]
        assert tuple(table["kv_len"]) in dots
    assert [len(points) for points in offsets(figure, 1)] == [8, 8]


def test_a_line_marks_where_a_token_takes_a_tenth_longer(pair: list[Session]) -> None:
    figure = plots.kv_cost(pair)
    at = [float(kv_milestones(session, [0.1])["kv_len"].iloc[0]) for session in pair]
    dotted = [float(line.get_xdata()[0]) for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert dotted == pytest.approx(at)
    assert f"a token takes 10% longer from {float(f'{at[0]:.2g}'):,.0f} tokens (KV fp16)" in texts(figure).replace("\n", " ")


def test_at_most_four_sessions_fit(pair: list[Session]) -> None:
    for wrong in ([], pair * 3):
        with pytest.raises(ConfigError, match="draws one to four"):
            plots.kv_cost(wrong)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("device", ["RTX 4060 Ti", "H200", "RTX 3080", 8.0])
def test_no_text_of_a_memory_figure_leaves_the_page_or_covers_another(
    device: Any, dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(plots.kv_memory(shape_config("mistral-7b"), device, dark=dark), monkeypatch)


def test_bars_of_memory_are_the_tables_contexts() -> None:
    config = shape_config("mistral-7b")
    figure = plots.kv_memory(config, "RTX 3080")
    table = context_limits(config, "RTX 3080")
    assert [bar.get_width() for bar in figure.axes[1].patches] == table["context"].tolist()
    said = texts(figure)
    assert "does not fit" in said
    assert "Which context fits on RTX 3080 (10 GiB)" in said
    assert f"{table['context'].max():,}" in said


@pytest.mark.parametrize("dark", [False, True])
def test_a_roofline_by_kernel_has_a_bar_each(dark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"gb_per_s": RATES, "fixed_s": 3e-7, "peaks": PEAKS, "device": "NVIDIA H200", "stride": 200}
    session = noisy_recorder(LLAMA_1B, tokens=20, **options).session()
    figure = plots.roofline(session, by="kernel", dark=dark)
    check_page(figure, monkeypatch)
    read = session.kernels().query("gb_per_s > 100")
    widths = sorted(bar.get_width() for bar in figure.axes[0].patches)
    assert len(widths) == len(read) + 1
    assert "matvec_fp16\n(ffn up)" in texts(figure)
    with pytest.raises(ConfigError, match="accepted are 'stage' and 'kernel'"):
        plots.roofline(session, by="layer")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SMOL.replace(dtype="gf4", n_layers=2), "fit in the 60 MiB L2 cache"),
        (SMOL, "may stay in the 60 MiB L2 cache"),
        (LLAMA_1B, ""),
    ],
)
@pytest.mark.parametrize("figure", [plots.roofline, plots.intensity_roofline])
def test_steps_that_a_cache_can_hold_are_said_to(config: Any, words: str, figure: Any) -> None:
    session = noisy_recorder(config, tokens=5, gb_per_s=RATES, peaks=PEAKS, device="NVIDIA H200").session()
    said = texts(figure(session)).replace("\n", " ")
    assert ("L2 cache" in said) == bool(words)
    assert words in said


def test_reading_ahead_of_ones_turn_explains_a_bar_beyond_the_peak() -> None:
    """A kernel that begins while the one before runs has read part of its bytes before its exclusive time begins."""
    session = noisy_recorder(SMOL, tokens=5, gb_per_s={"output": 80.0}, fixed_s=0.0).session()
    assert "while the kernel before" not in texts(plots.roofline(session)).replace("\n", " ")
    ahead = Session(session.events.assign(duration_s=1.1 * session.events["exclusive_s"]), session.steps, session.meta)
    said = texts(plots.roofline(ahead)).replace("\n", " ")
    assert "beyond a peak: began to read while the kernel before it ran" in said
    assert "beyond the peak: read ahead, or from a cache" in said
    assert "or while the kernel before ran" in texts(plots.waterfall(ahead)).replace("\n", " ")
