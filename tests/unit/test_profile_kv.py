"""What a context costs in time and in memory: milestones along a chosen line, and what fits on a card."""

from __future__ import annotations

from typing import Any

import pytest

from calmnb.errors import ConfigError
from calmnb.profile import Session
from calmnb.profile.device import Device
from calmnb.profile.kv import LIMIT_COLUMNS, MILESTONE_COLUMNS, context_limits, kv_milestones
from calmnb.shapes import shape_config
from tests.profile_fakes import SMOL, exact_session, noisy_recorder

MISTRAL = shape_config("mistral-7b", "fp8")


def line_session(contexts: tuple[int, ...] = (0, 1000, 2000, 4000)) -> Session:
    """A token takes 1 ms, and attention 100 us plus 0.1 us a position of that and beyond."""
    return exact_session(contexts, attention_us=lambda kv_len: 100 + 0.1 * kv_len, rest_us=900)


def test_milestones_stand_where_the_line_says() -> None:
    table = kv_milestones(line_session(), [0.05, 0.1, 1.0])
    assert list(table.columns) == list(MILESTONE_COLUMNS)
    first = 3  # mean of what the settled steps of the first run see
    token_us = 1000 + 0.1 * first
    wanted = [first + growth * token_us / 0.1 for growth in (0.05, 0.1, 1.0)]
    assert table["kv_len"].tolist() == pytest.approx(wanted)
    assert table["source"].tolist() == ["measured", "measured", "extrapolated"]
    assert table["growth_percent"].tolist() == pytest.approx([5, 10, 100])
    assert table["kv_bytes"].tolist() == pytest.approx([n * SMOL.kv_bytes_per_token("fp16") for n in wanted])
    assert table["attention_ms"].tolist() == pytest.approx([0.1 + 1e-4 * n for n in wanted])


def test_attention_that_never_grows_has_no_milestone() -> None:
    flat = exact_session((0, 1000), attention_us=lambda kv_len: 100, rest_us=900)
    assert kv_milestones(flat, [0.1])["kv_len"].isna().all()


@pytest.mark.parametrize("growths", [[], [0.0], [-1.0, 0.5]])
def test_growths_must_be_positive(growths: list[float]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        kv_milestones(line_session(), growths)


def test_one_context_tells_nothing() -> None:
    with pytest.raises(ConfigError, match="has 1 context; record at two or more"):
        kv_milestones(exact_session((5,), attention_us=lambda n: 1, rest_us=1, tokens=2), [0.1])


def test_a_bin_never_mixes_contexts_far_apart() -> None:
    session = noisy_recorder(SMOL.replace(n_layers=2), tokens=12, first=100, stride=3000).session()
    assert session.kv_cost()["kv_len"].tolist() == [3101.0 + 3000 * i for i in range(11)]
    few = line_session((0, 500, 8000))
    assert few.kv_cost()["kv_len"].tolist() == pytest.approx([3, 503, 8003])  # each run's three settled steps
    assert len(few.kv_cost(bins="steps")) == 9


def test_what_fits_is_memory_less_weights_over_bytes_a_position() -> None:
    table = context_limits(MISTRAL, "RTX 4090").set_index(["dtype", "kv_dtype"])
    assert list(table.reset_index().columns) == list(LIMIT_COLUMNS)
    params = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 2 * 32000 * 4096
    for dtype, bits in (("fp16", 16), ("fp8", 8), ("gf4", 4)):
        for kv_dtype, item in (("fp16", 2), ("fp8", 1)):
            row = table.loc[dtype, kv_dtype]
            assert row["weights_bytes"] == params * bits // 8
            assert row["kv_bytes_per_token"] == 2 * 32 * 1024 * item
            assert row["context"] == ((24 << 30) - params * bits // 8 - (500 << 20)) // (2 * 32 * 1024 * item)
            assert row["fits"] == (row["context"] >= 32768)


def test_weights_too_large_leave_no_context() -> None:
    assert context_limits(MISTRAL, 8.0, dtypes=["fp16"])["context"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "RTX 9999"}, "not in the table"),
        ({"device": 0}, "must be positive"),
        ({"device": Device("Mine", 100, 1)}, "memory of Mine is not known"),
        ({"device": "H200", "dtypes": ["int4"]}, "dtypes has int4; accepted are fp16, fp8, gf4"),
        ({"device": "H200", "kv_dtypes": ["gf4"]}, "kv_dtypes has gf4; accepted are fp16, fp8"),
    ],
)
def test_what_is_unknown_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        context_limits(MISTRAL, **options)
