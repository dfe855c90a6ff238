"""The CUDA engine against the reference engine, the specification's vectors, and itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel
from calmnb.engine.reference import ReferenceEngine
from calmnb.errors import ContextError, DeviceError
from calmnb.sampler import Sampler, Sampling
from calmnb.shapes import shape_config
from tests.engine_models import SPEC, check_spec_vectors, random_weights, scaled_weights
from tests.gpu.short import IS_SHORT, fewer

pytestmark = pytest.mark.gpu

# Activations are rounded to half before each matrix (2^-11), products are summed two by two in half: a fraction of a
# percent of a logit vector's length after a few layers, whatever the width.
TOLERANCE = 6e-3


def open_engine(weights: Any, **options: Any) -> Any:
    from calmnb.engine.cuda import CudaEngine, open_cuda_engine
    from calmnb.engine.cuda_device import CudaDevice
    from calmnb.engine.cuda_weights import weight_regions

    if "attention" in options:
        gpu = CudaDevice(pdl=options.pop("pdl", True))
        return CudaEngine(weights.config, weight_regions(weights), gpu=gpu, **options)
    return open_cuda_engine(weights, **options)


def relative(out: np.ndarray, ref: np.ndarray) -> float:
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def tokens_for(config: ModelConfig, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, config.vocab_size, n)]


@pytest.mark.parametrize("name", list(SPEC))
def test_specification_vectors(name: str) -> None:
    check_spec_vectors(open_engine, name)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: config changes, weights options, engine options
    "plain": ({}, {}, {}),
    "fp8": ({"dtype": "fp8"}, {}, {}),
    "gf4": ({"dtype": "gf4"}, {}, {}),
    "fp8-kv": ({}, {}, {"kv_dtype": "fp8"}),
    "gf4-fp8-kv": ({"dtype": "gf4"}, {}, {"kv_dtype": "fp8"}),
    "mha": ({"n_kv_heads": 8}, {}, {}),
    "mqa": ({"n_kv_heads": 1}, {}, {}),
    "heads-not-dim": ({"head_dim": 48}, {}, {}),
    "head-256": ({"head_dim": 256, "n_heads": 4, "n_kv_heads": 2, "rotary_dim": 64}, {}, {}),
    "head-128-7": ({"head_dim": 128, "n_heads": 7, "n_kv_heads": 1, "rotary_dim": 128}, {}, {"kv_dtype": "fp8"}),
    "head-80": ({"head_dim": 80, "n_heads": 4, "n_kv_heads": 4, "rotary_dim": 20}, {}, {}),
    "head-100": ({"head_dim": 100, "n_heads": 4, "n_kv_heads": 2, "rotary_dim": 100}, {}, {}),
    "head-100-fp8-kv": ({"head_dim": 100, "n_heads": 4, "n_kv_heads": 2, "rotary_dim": 100}, {}, {"kv_dtype": "fp8"}),
    "mqa-16": ({"n_heads": 16, "n_kv_heads": 1}, {}, {}),
    "odd-vocab": ({"vocab_size": 1013}, {}, {}),
    "odd-hidden": ({"hidden_dim": 520}, {}, {}),
    "odd-dim": ({"dim": 296}, {}, {}),
    "odd-all": ({"dim": 72, "hidden_dim": 104, "vocab_size": 77, "dtype": "gf4"}, {}, {}),
    "bias": ({}, {"bias": True}, {}),
    "tied": ({}, {"tied": True}, {}),
    "clip": ({"qkv_clip": 0.7}, {"bias": True}, {}),
    "gelu": ({"act_type": "gelu"}, {}, {}),
    "layernorm": ({"norm_type": "layernorm"}, {}, {}),
    "parallel": ({"norm_type": "layernorm_par", "dtype": "fp8"}, {}, {}),
    "experts": ({"n_experts": 4, "n_experts_active": 2}, {}, {}),
    # A seed whose 4th and 5th experts are never closer than 0.028 in 8 tokens: nearer than half activations can tell, the
    # choice may differ.
    "experts-gf4": ({"n_experts": 40, "n_experts_active": 4, "dtype": "gf4"}, {"seed": 62}, {}),
    "window": ({"sliding_window": 9}, {}, {}),
    "wide-7b": ({"dim": 4096, "hidden_dim": 1408, "head_dim": 128, "n_heads": 8, "n_layers": 1, "rotary_dim": 128}, {}, {}),
}  # fmt: skip

BASE = ModelConfig("llama", "fp16", 256, 512, 32, fewer(3, 1), 8, 2, 1000, rotary_dim=32, max_seq_len=512)


@pytest.mark.parametrize("name", list(MODELS))
def test_agrees_with_the_reference(name: str) -> None:
    changes, weight_options, options = MODELS[name]
    config = BASE.replace(**changes)
    weights = random_weights(config, **weight_options)
    reference = ReferenceEngine(weights, seq_len=64, kv_dtype=options.get("kv_dtype", "fp16"))
    worst = 0.0
    with open_engine(weights, seq_len=64, attention={"short_max": 0}, **options) as engine:
        for pos, token in enumerate(tokens_for(config, fewer(24, 6))[: 8 if config.n_experts > 8 else 24]):
            out, ref = engine.step(token, pos), reference.step(token, pos)
            assert np.isfinite(out).all(), f"position {pos}"
            worst = max(worst, relative(out, ref))
    assert worst < TOLERANCE * (2 if config.dtype == "gf4" or config.n_experts else 1) * (
        8 if options.get("kv_dtype") == "fp8" else 1
    )


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
@pytest.mark.parametrize("head_dim", [8, 32, 100, 128])  # 8: a row is one copy, so that a warp could take two tiles
@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"short_max": 0},
        {"short_max": 0, "single": 1 << 20, "budget": 1},  # one block, the shortest ring
        {"short_max": 0, "blocks_per_sm": 0.05},  # few splits: the newest row stands just behind another split's end
    ],
)
def test_every_length_of_a_context_that_wraps_the_ring(kv_dtype: Any, head_dim: int, attention: dict[str, Any]) -> None:
    config = BASE.replace(n_layers=1, n_heads=2, n_kv_heads=1, head_dim=head_dim, rotary_dim=min(32, head_dim))
    weights = random_weights(config)
    tokens = tokens_for(config, 600)
    reference = ReferenceEngine(weights, seq_len=600, kv_dtype=kv_dtype)
    expected = reference.prefill(tokens, all_logits=True)
    worst = 0.0
    with open_engine(weights, seq_len=600, kv_dtype=kv_dtype, attention=attention) as engine:
        if IS_SHORT:
            engine.prefill(tokens)
        for pos in (599, 200, 129, 64, 33, 16, 1, 0) if IS_SHORT else range(600):
            worst = max(worst, relative(engine.step(tokens[pos], pos), expected[pos]))
    # An E5M2 value that rounds the other way is an eighth off, and the fewer channels, the more that is.
    assert worst < TOLERANCE * ((16 if head_dim == 8 else 8) if kv_dtype == "fp8" else 1)


@pytest.mark.parametrize(
    ("kv_dtype", "changes"), [("fp16", {}), ("fp8", {}), ("fp16", {"sliding_window": 200}), ("fp16", {"n_kv_heads": 8})]
)
def test_long_context_is_split_and_combined(kv_dtype: Any, changes: dict[str, Any]) -> None:
    config = BASE.replace(n_layers=2, **changes)
    weights = random_weights(config)
    tokens = tokens_for(config, 700)
    reference = ReferenceEngine(weights, seq_len=700, kv_dtype=kv_dtype)
    expected = reference.prefill(tokens)
    with open_engine(weights, seq_len=700, kv_dtype=kv_dtype, attention={"short_max": 0}) as engine:
        engine.prefill(tokens[:-3])
        for pos in range(697, 700):
            out = engine.step(tokens[pos], pos)
    assert relative(out, expected) < TOLERANCE * (4 if kv_dtype == "fp8" else 1)


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
def test_rolling_cache(kv_dtype: Any) -> None:
    weights = random_weights(BASE)
    reference = ReferenceEngine(weights, seq_len=16, kv_dtype=kv_dtype, on_full="roll")
    with open_engine(weights, seq_len=16, kv_dtype=kv_dtype, on_full="roll", attention={"short_max": 0}) as engine:
        for pos, token in enumerate(tokens_for(BASE, fewer(45, 20))):
            worst = relative(engine.step(token, pos), reference.step(token, pos))
            assert worst < TOLERANCE * (20 if kv_dtype == "fp8" else 1), f"position {pos}"


def test_prefill_equals_steps() -> None:
    weights = random_weights(BASE)
    tokens = tokens_for(BASE, fewer(300, 24))
    first = fewer(130, 11)
    with open_engine(weights, seq_len=512, attention={"short_max": fewer(100, 8)}) as engine:
        stepped = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])
        engine.reset()
        together = engine.prefill(tokens, all_logits=True).copy()
        engine.reset()
        engine.prefill(tokens[:first])
        last = engine.prefill(tokens[first:], first).copy()
    assert relative(together, stepped) < TOLERANCE
    assert relative(last, stepped[-1]) < TOLERANCE


def test_a_prompt_with_massive_activations_is_what_its_steps_are() -> None:
    """act(gate) * up beyond a half: the batch is run again with a power of two of each row's own, and the next one at once."""
    weights = scaled_weights(BASE, up=200.0, down=2.0**-10, gate=200.0)
    tokens = tokens_for(BASE, fewer(300, 24))
    expected = ReferenceEngine(weights, seq_len=512).prefill(tokens, all_logits=True)
    with open_engine(weights, seq_len=512) as engine:
        stepped = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])
        for _ in range(2):
            engine.reset()
            together = engine.prefill(tokens, all_logits=True).copy()
            assert relative(together, expected) < TOLERANCE
    assert relative(stepped, expected) < TOLERANCE


def test_engine_stops_at_the_end_of_the_context() -> None:
    with open_engine(random_weights(BASE), seq_len=4) as engine:
        for pos in range(4):
            engine.step(1, pos)
        with pytest.raises(ContextError):
            engine.step(1, 4)


def test_going_back_overwrites_the_cache() -> None:
    with open_engine(random_weights(BASE), seq_len=64) as engine:
        first = [engine.step(t, p).copy() for p, t in enumerate([5, 6, 7, 8])]
        engine.step(9, 2)
        again = [engine.step(t, p).copy() for p, t in enumerate([7, 8], start=2)]
    np.testing.assert_array_equal(again, first[2:])


# -- tokens chosen on the device --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    with open_engine(random_weights(BASE.replace(vocab_size=5003)), seq_len=512) as engine:
        yield engine


def test_greedy_tokens_are_the_steps_maxima(small: Any) -> None:
    small.reset()
    many = list(small.decode_many(3, 0, fewer(100, 12)))
    token = 3
    for pos, decoded in enumerate(many):
        logits = small.step(token, pos)
        token = int(logits.argmax())
        assert (decoded.token, decoded.pos) == (token, pos + 1)
        exact = logits.astype(np.float64) - logits.max()
        assert decoded.logprob == pytest.approx(exact[token] - np.log(np.exp(exact).sum()), abs=1e-4)


SAMPLINGS = [
    Sampling(temperature=1.0, min_p=0.1, seed=42),
    Sampling(temperature=1.0, min_p=0.0, seed=7),
    Sampling(temperature=0.7, min_p=0.0, top_k=40, seed=3),
    Sampling(temperature=1.3, min_p=0.0, top_p=0.9, seed=4),
    Sampling(temperature=1.1, min_p=0.02, top_k=50, top_p=0.8, seed=5),
    Sampling(temperature=0.9, repetition_penalty=1.3, repetition_range=16, seed=6),
    Sampling(temperature=0.0, repetition_penalty=1.5, repetition_range=-1),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=[str(i) for i in range(len(SAMPLINGS))])
def test_drawn_tokens_are_the_cpu_samplers(small: Any, sampling: Sampling) -> None:
    small.reset()
    sampler = Sampler(sampling, n_ids=5000)
    history = [11, 12, 13]
    small.prefill(history[:-1])
    many = list(
        small.decode_many(13, 2, fewer(60, 8), sampling=sampling, rng_state=sampler.rng.state, history=history, n_ids=5000)
    )  # fmt: skip
    misses = 0
    for decoded in many:
        logits = small.step(history[-1], len(history) - 1)
        misses += sampler.sample(logits, history) != decoded.token
        history.append(decoded.token)
    # The device adds weights in another order, so a coin within 1e-6 of a boundary may fall on the other side.
    assert misses <= 1


def test_caller_may_stop_anywhere(small: Any) -> None:
    n, cut = fewer(40, 14), fewer(11, 5)
    small.reset()
    whole = [d.token for d in small.decode_many(3, 0, n)]
    small.reset()
    run = small.decode_many(3, 0, n)
    first = [next(run).token for _ in range(cut)]
    run.close()
    rest = [d.token for d in small.decode_many(first[-1], cut, n - cut)]
    assert first + rest == whole


def test_rolling_tokens_do_not_depend_on_who_drives() -> None:
    weights = random_weights(BASE)
    with open_engine(weights, seq_len=16, on_full="roll") as engine:
        many = [d.token for d in engine.decode_many(3, 0, fewer(40, 20))]
        engine.reset()
        token, single = 3, []
        for pos in range(len(many)):
            token = int(engine.step(token, pos).argmax())
            single.append(token)
    assert many == single


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_same_bits_with_and_without_dependent_launch_and_twice(dtype: Any) -> None:
    from calmnb.engine.cuda import open_random_engine
    from calmnb.engine.cuda_device import CudaDevice

    config = shape_config("smollm2-135m", dtype)
    digests = []
    for pdl in (True, True, False):
        with open_random_engine(config, is_tied=True, seq_len=1024, gpu=CudaDevice(pdl=pdl)) as engine:
            token, rows = 1, []
            for pos in range(1000):
                logits = engine.step(token, pos)
                assert np.isfinite(logits).all(), f"position {pos}"
                rows.append(hash(logits.tobytes()))
                token = int(logits.argmax())
            digests.append(rows)
    assert digests[0] == digests[1], "two runs differ"
    first = next((i for i, (a, b) in enumerate(zip(digests[0], digests[2], strict=True)) if a != b), None)
    assert first is None, f"logits differ without dependent launch from position {first} on"


# -- memory, stamps ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other test processes use the GPU's memory meanwhile")
def test_memory_comes_back() -> None:
    import cupy

    weights = random_weights(BASE)
    free = []
    for _ in range(6):
        with open_engine(weights, seq_len=512) as engine:
            list(engine.decode_many(1, 0, 8))
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert abs(free[-1] - free[0]) < 1 << 20


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(DeviceError, match=r"needs .* GiB"):
        open_engine(random_weights(BASE), seq_len=2_000_000_000)


class Steps:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def add(
        self, phase: str, pos: int, kv_len: int, n: int, kernels: Any, starts: Any, ends: Any, begin: float, end: float
    ) -> None:
        self.steps.append((phase, pos, kv_len, kernels, starts.copy(), ends.copy(), begin, end))

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        raise AssertionError("the engine does not sample here")


def test_stamps_cover_every_kernel(small: Any) -> None:
    small.reset()
    n = fewer(30, 6)
    plain = [d.token for d in small.decode_many(3, 0, n)]
    small.recorder = recorder = Steps()
    try:
        small.reset()
        stamped = [d.token for d in small.decode_many(3, 0, n)]
        small.step(1, n)
    finally:
        small.recorder = None
    assert stamped == plain
    assert [s[1] for s in recorder.steps] == list(range(n + 1))
    for _, _, kv_len, kernels, starts, ends, begin, end in recorder.steps:
        assert len(kernels) == len(starts) == len(ends)
        assert isinstance(kernels[0], Kernel)
        assert kernels[0].stage == "embed"
        assert (ends >= starts).all()
        assert (np.diff(ends) >= 0).all(), "a kernel ended before the one it depends on"
        assert begin <= starts.min()
        assert 1e-6 < end - begin < (60 if IS_SHORT else 0.05)
        assert 1 <= kv_len <= 31
