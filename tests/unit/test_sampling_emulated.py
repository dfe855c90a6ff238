"""The sampling kernels, without a GPU: their source runs on the CPU through ``tests/emulator``.

Every token is compared with exact sums (`tests.gpu.sample_case.exact_draw`) and with calmnb/sampler.py.
"""

from __future__ import annotations

import ctypes
import math
import shutil
from typing import Any

import numpy as np
import pytest

from calmnb.sampler import Sampling, XorShift64
from tests.emulator.launcher import EmulatedLauncher
from tests.gpu.sample_case import SampleCase, exact_draw, penalised, random_logits, random_sampling, sampler_choice

pytestmark = [
    pytest.mark.beside,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run kernels on the CPU"),
]

#: Threads of a block and length of the list: the kernel's own, and so small that every loop goes round and lists overflow.
FEW = {"SAMPLE_THREADS": 64, "SAMPLE_LIST": 256}


@pytest.fixture
def gpu(emulated: EmulatedLauncher) -> EmulatedLauncher:
    return emulated


class Tally:
    """How often calmnb/sampler.py, whose float32 sum rounds, took a neighbour."""

    def __init__(self) -> None:
        self.drawn = self.apart = 0


def check(
    gpu: EmulatedLauncher, case: SampleCase, rng: np.random.Generator, tally: Tally, sampling: Sampling, n_ids: int
) -> None:
    vocab = len(case.logits)
    history = rng.integers(0, vocab, rng.integers(1, 40)).tolist()
    seed = int(rng.integers(1, 1 << 62))
    case.set(sampling, seed, history, n_ids=n_ids, step=int(rng.integers(0, 9)))
    entry, rng_state = case.run(order=int(rng.integers(0, 7)))
    what = f"{sampling} vocab {vocab} ids {n_ids} seed {seed}"
    token, state = sampler_choice(sampling, case.logits, history, seed, n_ids)
    if isinstance(token, str):
        assert f"token {-1 - entry.token} is {entry.logprob}:" in token, what
        return
    assert rng_state == state, what
    used = case.logits[:n_ids].astype(np.float64)
    shifted = used - used.max()
    assert entry.token >= 0, what
    expected = shifted[entry.token] - math.log(np.exp(shifted).sum())
    assert entry.logprob == pytest.approx(expected, abs=2e-5, rel=1e-5), what
    if sampling.is_greedy:
        assert entry.token == token, what
        return
    l = penalised(sampling, case.logits[:n_ids], history)  # noqa: E741
    draw = exact_draw(sampling, l, XorShift64(seed).coin(), exp=lambda x: exponentials(gpu, x))
    assert entry.token == draw.token, what
    tally.drawn += 1
    if entry.token != token:
        tally.apart += 1
        # Where float32 weights tie, the sampler's top-p may cut through the tie.
        if sampling.top_p == 1:
            assert draw.distance(token) <= 2 * draw.rounding() + 1e-6, what


def exponentials(gpu: EmulatedLauncher, x: np.ndarray) -> np.ndarray:
    """The exponential function that emulated kernels use."""
    out = np.array(x, np.float32)
    library = next(iter(gpu._libraries.values()))
    library.exponentials(ctypes.c_void_p(out.ctypes.data), len(out))
    return out


@pytest.mark.parametrize("block", range(8))
def test_tokens_are_the_samplers(gpu: EmulatedLauncher, block: int) -> None:
    rng = np.random.default_rng(block)
    tally = Tally()
    for _ in range(40):
        vocab = int(rng.choice([1, 2, 5, 31, 32, 33, 100, 1000, 1021, 4099, rng.integers(1, 9000)]))
        case = SampleCase(
            gpu, random_logits(rng, vocab), best_blocks=int(rng.choice([0, 1, 3, 264])), blocks=int(rng.choice([1, 2, 4, 7])),
            rehearse=bool(rng.integers(0, 2)), defines=FEW,
        )  # fmt: skip
        for _ in range(3):
            n_ids = vocab if rng.random() < 0.7 else int(rng.integers(1, vocab + 1))
            check(gpu, case, rng, tally, random_sampling(rng, vocab), n_ids)
    assert tally.apart <= 0.1 * tally.drawn


@pytest.mark.parametrize("vocab", [32000, 128256, 130001])
def test_large_vocabularies(gpu: EmulatedLauncher, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal(vocab) * 2.5).astype(np.float32)
    case = SampleCase(gpu, logits, best_blocks=264, blocks=8)
    tally = Tally()
    for sampling in (
        Sampling(temperature=1.0, min_p=0.0),
        Sampling(temperature=0.8, min_p=0.05),
        Sampling(temperature=0.7, min_p=0.0, top_k=40),
        Sampling(temperature=1.3, min_p=0.0, top_p=0.9),
        Sampling(temperature=1.1, min_p=0.02, top_k=50, top_p=0.8, repetition_penalty=1.3),
        Sampling(repetition_penalty=1.3),
        Sampling(),
    ):
        check(gpu, case, rng, tally, sampling, vocab)


def test_the_same_settings_give_the_same_bits(gpu: EmulatedLauncher) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(3000) * 2).astype(np.float32)
    case = SampleCase(gpu, logits, blocks=4, defines=FEW)
    sampling = Sampling(temperature=1.0, top_k=100, top_p=0.7, min_p=0.0, repetition_penalty=1.2)
    seen: set[tuple[Any, ...]] = set()
    for order in range(8):
        case.set(sampling, 12345, [1, 2, 3])
        entry, state = case.run(order=order)
        seen.add((entry.token, entry.logprob, state))
    assert len(seen) == 1
