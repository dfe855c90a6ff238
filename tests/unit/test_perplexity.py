"""Perplexity: the specification's figures, and what windows and strides score."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.errors import BusyError, CalmnbError, ConfigError
from calmnb.model import load
from calmnb.perplexity import MAX_BYTES, from_logprobs, perplexity, sample_text
from tests.unit.fakes import FakeEngine, fake_model, letters


def test_value_and_error_are_calms() -> None:
    value, error = from_logprobs(np.log([0.5, 0.25, 0.125, 0.5]))
    assert (value, error) == (pytest.approx(3.363586, abs=1e-6), pytest.approx(0.966572, abs=1e-6))


def test_equal_probabilities_have_no_error() -> None:
    assert from_logprobs([math.log(0.1)] * 7) == (pytest.approx(10), pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize(("window", "value", "error"), [(64, 26.984, 10.703), (5, 24.156, 9.210)])
def test_a_whole_models_figures_are_calms(spec_model: Callable[[str], Path], window: int, value: float, error: float) -> None:
    with load(spec_model("A"), device="reference") as model:
        found = perplexity(model, "dbefbahc" * 3, window=window)
    assert (found.value, found.error) == (pytest.approx(value, abs=6e-4), pytest.approx(error, abs=6e-4))
    assert (found.n_tokens, found.n_scored, found.window, found.stride, found.bos) == (24, 23, window, window, False)


def test_it_agrees_with_decoding_token_by_token(spec_model: Callable[[str], Path]) -> None:
    """Row 31."""
    ids = [3, 1, 4, 5, 1, 0, 7, 2] * 8
    with load(spec_model("A"), device="reference") as model:
        found = perplexity(model, ids, window=64)
        lp = []
        model.reset()
        for pos, (token, target) in enumerate(itertools.pairwise(ids)):
            logits = model.engine.step(token, pos).astype(np.float64)
            lp.append(logits[target] - np.log(np.exp(logits).sum()))
    assert found.value == pytest.approx(math.exp(-np.mean(lp)), rel=1e-5)


@given(n=st.integers(2, 40), window=st.integers(1, 24), chunk=st.integers(1, 9), data=st.data())
def test_every_token_is_scored_once_with_the_context_its_window_gives(
    n: int, window: int, chunk: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    contexts: list[list[int]] = []

    def reply(cache: list[int]) -> int:
        contexts.append(cache)
        return cache[-1] + 1

    model = fake_model(FakeEngine(reply, seq_len=24))
    model.prefill_chunk = chunk
    ids = list(range(10, 10 + n))
    found = perplexity(model, ids, window=window, stride=stride)
    # The fake engine always predicts the successor, so each scored token has the same probability.
    expected = -(5 - math.log(math.exp(5) + model.config.vocab_size - 1))
    assert found.value == pytest.approx(math.exp(expected), rel=1e-5)
    assert found.n_scored == n - 1
    best: dict[int, int] = {}
    for cache in contexts:
        assert len(cache) <= window
        best[cache[-1] + 1] = max(best.get(cache[-1] + 1, 0), len(cache))
    for target in ids[1:]:
        assert best[target] >= min(target - 10, window - stride + 1)


def test_bos_follows_the_models_rule_or_the_callers() -> None:
    model = fake_model(tokenizer=letters(bos=True))
    assert perplexity(model, "abc", window=8).n_tokens == 4
    assert perplexity(model, "abc", window=8).bos
    assert perplexity(model, "abc", window=8, bos=False).n_tokens == 3
    assert perplexity(model, [5, 6], window=8).n_tokens == 2
    assert perplexity(model, [5, 6], window=8, bos=True).n_tokens == 3
    assert perplexity(model, [0, 6], window=8, bos=True).n_tokens == 2


def test_only_the_first_64_kib_of_a_text_count() -> None:
    model = fake_model()
    assert perplexity(model, "a" * (MAX_BYTES + 9), window=64).n_tokens == MAX_BYTES
    assert perplexity(model, "é" * 9, window=64, max_bytes=5).n_tokens == 4
    assert perplexity(model, "a" * 9, window=64, max_bytes=None).n_tokens == 9


def test_control_tokens_in_a_text_are_plain_text() -> None:
    assert perplexity(fake_model(), "a</s>", window=8).n_tokens == 5


@pytest.mark.parametrize("kw", [{"window": 0}, {"window": 65}, {"stride": 0, "window": 8}, {"stride": 9, "window": 8}])
def test_windows_out_of_range_are_refused(kw: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="stride" if "stride" in kw else "window"):
        perplexity(fake_model(), "abc", **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "a", [], [3]])
def test_texts_with_nothing_to_predict_are_refused(text: str | list[int]) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        perplexity(fake_model(), text, window=8)


@pytest.mark.parametrize("text", [b"abc", bytearray(b"abc"), [5.9, 6.7], [None, "x"], 3])
def test_what_is_neither_text_nor_ids_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="accepted are a str or a sequence of token ids"):
        perplexity(fake_model(), text, window=8)


@pytest.mark.parametrize("max_bytes", [-5, 2.5, "9"])
def test_max_bytes_is_not_negative(max_bytes: Any) -> None:
    with pytest.raises(ConfigError, match="max_bytes is"):
        perplexity(fake_model(), "abc", window=8, max_bytes=max_bytes)


def test_ids_without_a_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="100000"):
        perplexity(fake_model(), [1, 100000], window=8)


def test_it_waits_for_nobody() -> None:
    model = fake_model()
    run = model.generate("a")
    next(run)
    with pytest.raises(BusyError):
        perplexity(model, "abc", window=8)


def test_overflowed_logits_are_an_error() -> None:
    engine = FakeEngine()
    real = engine.prefill
    engine.prefill = lambda *a, **k: real(*a, **k) * np.float32(np.nan)  # type: ignore[method-assign]
    model = fake_model(engine)
    with pytest.raises(CalmnbError, match="overflowed"):
        perplexity(model, "abc", window=8)
    assert not model.is_busy


def test_answers_after_it_are_those_of_a_fresh_model() -> None:
    model = fake_model()
    list(model.generate("abc", max_tokens=3))
    perplexity(model, "abcabc", window=8)
    assert [t.id for t in model.generate("abc", max_tokens=3)] == [t.id for t in fake_model().generate("abc", max_tokens=3)]


def test_progress_counts_up_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    perplexity(fake_model(), "abcdefghij", window=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (10, 10)
    assert seen == sorted(seen)


def test_the_sample_text_is_austens() -> None:
    text = sample_text()
    assert 20_000 < len(text) < 40_000
    assert "It is a truth universally acknowledged" in text
    assert text.isascii()
