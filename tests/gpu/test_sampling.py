"""The sampling kernels on a GPU: the cases of ``tests/unit/test_sampling_emulated.py``, and the same bits every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calmnb.engine.cuda_ops import plan_sampling
from calmnb.sampler import Sampling, XorShift64
from tests.gpu.launcher import Launcher
from tests.gpu.sample_case import SampleCase, exact_draw, penalised, random_logits, random_sampling, sampler_choice
from tests.gpu.short import fewer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Launcher:
    return Launcher()


@pytest.mark.parametrize("block", range(4))
def test_tokens_are_the_samplers(gpu: Launcher, block: int) -> None:
    rng = np.random.default_rng(block)
    drawn, missed = 0, []
    for _ in range(fewer(60, 15)):
        vocab = int(rng.choice([1, 5, 31, 33, 1000, 4099, 32000, 128256, rng.integers(1, 130000)]))
        # A block keeps its slice of the logits in shared memory, which must have room.
        blocks = int(rng.choice([n for n in (1, 2, 64) if plan_sampling(vocab, n).can_draw]))
        case = SampleCase(
            gpu, random_logits(rng, vocab), best_blocks=int(rng.choice([0, 1, 264])), blocks=blocks,
            rehearse=bool(rng.integers(0, 2)),
        )  # fmt: skip
        for _ in range(5):
            n_ids = vocab if rng.random() < 0.7 else int(rng.integers(1, vocab + 1))
            sampling = random_sampling(rng, vocab)
            history = rng.integers(0, vocab, rng.integers(1, 40)).tolist()
            seed = int(rng.integers(1, 1 << 62))
            case.set(sampling, seed, history, n_ids=n_ids, step=int(rng.integers(0, 9)))
            entry, rng_state = case.run(pdl=bool(rng.integers(0, 2)))
            token, state = sampler_choice(sampling, case.logits, history, seed, n_ids)
            if isinstance(token, str):
                assert f"token {-1 - entry.token} is {entry.logprob}:" in token, sampling
                continue
            assert rng_state == state
            if sampling.is_greedy:
                assert entry.token == token, sampling
                continue
            drawn += 1
            l = penalised(sampling, case.logits[:n_ids], history)  # noqa: E741
            # NumPy's exponential differs in the last bit, which moves a boundary where temperatures are huge.
            draw = exact_draw(sampling, l, XorShift64(seed).coin(), exp=lambda x: gpu.cupy.exp(gpu.cupy.asarray(x)).get())
            if draw.distance(entry.token) > 1e-6:
                missed.append((vocab, n_ids, sampling, seed, entry.token, draw.token))
    assert drawn > fewer(100, 25)
    assert not missed


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_the_same_bits_every_time(gpu: Launcher, vocab: int) -> None:
    rng = np.random.default_rng(3)
    case = SampleCase(gpu, (rng.standard_normal(vocab) * 2).astype(np.float32), best_blocks=264)
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0, top_p=0.9, min_p=0.0),
        Sampling(temperature=1.0, top_k=100, top_p=0.7, min_p=0.0, repetition_penalty=1.2),
    ):
        seen: set[tuple[Any, ...]] = set()
        for i in range(fewer(200, 8)):
            case.set(sampling, 12345, [1, 2, 3])
            entry, state = case.run(pdl=i % 2 == 0)
            seen.add((entry.token, entry.logprob, state))
        assert len(seen) == 1, sampling
