"""The sampler against the specification's vectors, against plain definitions of each filter, and against bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.errors import CalmnbError, ConfigError
from calmnb.sampler import Sampler, Sampling, XorShift64


def draws(logits: list[float], n: int, **kw: float) -> list[int]:
    sampler = Sampler(Sampling(**kw))  # type: ignore[arg-type]
    x = np.array(logits, dtype=np.float32)
    return [sampler.sample(x) for _ in range(n)]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (1, [1206177355, 2882512552, 3117485455, 1303648416, 241277360]),
        (42, [1456360119, 3359763283, 3393612768, 4054632243, 3283045847]),
    ],
)
def test_random_stream_is_calms(seed: int, expected: list[int]) -> None:
    rng = XorShift64(seed)
    assert [rng.u32() for _ in range(5)] == expected


def test_first_coin_is_calms() -> None:
    assert XorShift64(42).coin() == pytest.approx(0.33908522, abs=5e-9)


def test_seed_zero_does_not_stick_at_zero() -> None:
    rng = XorShift64(0)
    assert len({rng.u32() for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("p", "t", "seed", "expected"),
    [
        (0.1, 1.0, 1, [0, 1, 1, 0, 0, 1, 1, 1]),
        (0.1, 1.0, 42, [0, 1, 1, 2, 1, 1, 0, 0]),
        (0.25, 2.0, 1, [0, 1, 1, 0, 0, 1, 2, 1]),
        (0.25, 2.0, 2, [1, 0, 0, 1, 0, 1, 0, 0]),
    ],
)
def test_min_p_draws_are_calms(p: float, t: float, seed: int, expected: list[int]) -> None:
    assert draws([2, 1, 0, -1, -3], 8, min_p=p, temperature=t, seed=seed) == expected


def test_greedy_takes_the_first_maximum_and_no_random_number() -> None:
    sampler = Sampler(Sampling(seed=5))
    state = sampler.rng.state
    assert sampler.sample(np.array([1, 3, 3, 2], np.float32)) == 1
    assert sampler.rng.state == state


@pytest.mark.parametrize(
    "kw", [{"temperature": 0.0}, {"temperature": 1e-9}, {"min_p": 1.0, "temperature": 1.0}, {"top_k": 1, "temperature": 1.0}]
)
def test_tiny_temperatures_and_single_choices_are_greedy(kw: dict[str, float]) -> None:
    assert draws([5, 30000, -30000, 29999.99], 4, **kw) == [1, 1, 1, 1]


def test_smallest_drawn_temperature_gives_no_nan() -> None:
    assert draws([-3e38, 1e4, 0.0], 3, temperature=1e-5, min_p=0.0, seed=1) == [1, 1, 1]


def test_top_k_keeps_the_k_largest() -> None:
    assert set(draws([1, 5, 4.9, 4.8, 0], 200, temperature=5.0, min_p=0.0, top_k=3, seed=3)) == {1, 2, 3}


def test_top_k_keeps_ties_of_the_last_place() -> None:
    assert set(draws([1, 5, 4, 4, 4], 200, temperature=1.0, min_p=0.0, top_k=2, seed=3)) == {1, 2, 3, 4}


def test_top_p_keeps_the_token_that_crosses_p() -> None:
    x = [math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]
    assert set(draws(x, 400, temperature=1.0, min_p=0.0, top_p=0.6, seed=9)) == {0, 1}


def test_top_p_is_applied_after_temperature() -> None:
    x = [math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]
    assert set(draws(x, 400, temperature=100.0, min_p=0.0, top_p=0.6, seed=9)) == {0, 1, 2}


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=60),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
    t=st.floats(0.05, 10.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_only_ids_that_every_filter_keeps_are_drawn(
    logits: list[float], top_k: int, top_p: float, min_p: float, t: float, seed: int
) -> None:
    x = np.array(logits, dtype=np.float32)
    got = Sampler(Sampling(temperature=t, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)).sample(x)
    w = np.exp((x.astype(np.float64) - x.max()) / t)
    assert top_k == 0 or np.count_nonzero(x > x[got]) < top_k
    kept = w if not 0 < top_k < len(x) else w[x >= np.sort(x)[-top_k]]
    assert w[w > w[got]].sum() < top_p * kept.sum() * (1 + 1e-5)
    assert w[got] >= min_p * (1 - 1e-4)


def test_draw_frequencies_follow_the_softmax() -> None:
    got = np.bincount(draws([2, 1, 0, -1, -3], 20000, temperature=1.0, min_p=0.0, seed=7), minlength=5) / 20000
    assert got[1] == pytest.approx(0.2358595, abs=0.012)
    assert got[4] == pytest.approx(0.0043199, abs=0.002)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    x = np.array([3.0, 2.0, -1.0, -1.5], np.float32)
    assert sampler.sample(x, [0, 0, 0]) == 1
    assert sampler.sample(np.array([-1.0, -1.5], np.float32), [0]) == 1
    assert x.tolist() == [3.0, 2.0, -1.0, -1.5]


@pytest.mark.parametrize(("reach", "expected"), [(0, 0), (1, 0), (2, 1), (-1, 1)])
def test_repetition_range_counts_from_the_end(reach: int, expected: int) -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0, repetition_range=reach))
    assert sampler.sample(np.array([3.0, 2.0, 0.0], np.float32), [0, 2]) == expected


def test_penalty_ignores_history_beyond_the_choosable_ids() -> None:
    assert Sampler(Sampling(repetition_penalty=2.0), n_ids=2).sample(np.array([1.0, 2.0, 9.0], np.float32), [2, 7]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_are_never_chosen(temperature: float) -> None:
    x = np.zeros(33, np.float32)
    x[31] = 100.0
    sampler = Sampler(Sampling(temperature=temperature, min_p=0.0, seed=1), n_ids=30)
    assert max(sampler.sample(x) for _ in range(300)) < 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_logit_is_an_error_that_names_it(temperature: float, bad: float) -> None:
    with pytest.raises(CalmnbError, match="token 2"):
        Sampler(Sampling(temperature=temperature)).sample(np.array([1, 2, bad, 0], np.float32))


def test_a_banned_token_is_never_drawn() -> None:
    assert set(draws([-math.inf, 0, 0], 100, temperature=1.0, min_p=0.0, seed=4)) == {1, 2}


@pytest.mark.parametrize(
    "kw",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"temperature": np.complex64(1)},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e39},
        {"repetition_range": -2},
        {"seed": 1.5},
    ],
)
def test_values_out_of_range_are_refused_by_name(kw: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kw))):
        Sampling(**kw)  # type: ignore[arg-type]


@pytest.mark.parametrize("kw", [{"temperature": 1e30}, {"repetition_penalty": 1e-30}, {"repetition_penalty": 1e30}])
@pytest.mark.filterwarnings("error")
def test_values_at_the_ends_of_their_range_are_drawn_with(kw: dict[str, float]) -> None:
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 1} | kw))  # type: ignore[arg-type]
    assert sampler.sample(np.array([-3.0, 2.0, 50.0], np.float32), [0, 1, 2]) in range(3)


def test_an_open_seed_is_drawn_and_can_be_read_back() -> None:
    first = Sampler(Sampling(temperature=1.0))
    again = Sampler(Sampling(temperature=1.0, seed=first.seed))
    x = np.linspace(0, 1, 50).astype(np.float32)
    assert [first.sample(x) for _ in range(20)] == [again.sample(x) for _ in range(20)]
