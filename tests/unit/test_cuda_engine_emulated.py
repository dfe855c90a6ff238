"""The whole CUDA engine without a GPU: the models of ``tests/gpu/test_engine.py``, their kernels run by ``tests/emulator``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from calmnb.engine import cuda_graphs
from calmnb.engine.cuda import CudaEngine
from calmnb.engine.cuda_weights import weight_regions
from calmnb.engine.reference import ReferenceEngine
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.sampler import Sampler, Sampling
from tests.emulator.gpu import EmulatedGpu
from tests.emulator.launcher import EmulatedLauncher
from tests.engine_models import SPEC, check_spec_vectors, random_weights, scaled_weights
from tests.gpu.test_engine import BASE, MODELS, TOLERANCE, relative, tokens_for

pytestmark = [
    pytest.mark.beside,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run kernels on the CPU"),
]

Open = Callable[..., CudaEngine]


@pytest.fixture
def open_engine(emulated: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> Open:
    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        emulated.compile(specs)
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)

    def open_it(weights: Any, *, order: int = 0, arch: str = "sm_90", **options: Any) -> CudaEngine:
        gpu = EmulatedGpu(emulated, order=order, arch=arch)
        return CudaEngine(weights.config, weight_regions(weights), gpu=gpu, **options)

    return open_it


@pytest.mark.parametrize("name", list(SPEC))
def test_specification_vectors(open_engine: Open, name: str) -> None:
    check_spec_vectors(open_engine, name)


#: Of the GPU's models, smaller; what is wide stays on the GPU.
SMALL = {"dim": 64, "hidden_dim": 96, "head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "rotary_dim": 16}
SMALL_MODELS = {name: model for name, model in MODELS.items() if name != "wide-7b"}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_agrees_with_the_reference(open_engine: Open, name: str) -> None:
    changes, weight_options, options = SMALL_MODELS[name]
    config = BASE.replace(**SMALL | {"vocab_size": 101} | (changes if name != "mha" else {"n_kv_heads": 4}) | {"n_layers": 1})
    weights = random_weights(config, **weight_options)
    reference = ReferenceEngine(weights, seq_len=24, kv_dtype=options.get("kv_dtype", "fp16"))
    with open_engine(weights, seq_len=24, attention={"short_max": 0}, **options) as engine:
        for pos, token in enumerate(tokens_for(config, 20)):
            out, ref = engine.step(token, pos), reference.step(token, pos)
            assert relative(out, ref) < 3 * TOLERANCE * (8 if options.get("kv_dtype") == "fp8" else 1), f"position {pos}"


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "attention"),
    [
        (8, "fp16", {"budget": 1}),  # a row is one copy
        (8, "fp8", {"budget": 1}),
        (24, "fp16", {"blocks_per_sm": 0.2}),  # padding; the newest row stands just behind another block's end
        (20, "fp8", {"single": 1 << 20, "budget": 1}),  # one block, the shortest ring
        (32, "fp16", {}),
    ],
)
def test_every_length_of_a_context_that_wraps_the_ring(
    open_engine: Open, head_dim: int, kv_dtype: Any, attention: dict[str, Any]
) -> None:
    shape = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 64, "head_dim": head_dim}
    config = BASE.replace(**SMALL | shape | {"rotary_dim": min(head_dim, 16)})
    weights, tokens = random_weights(config), tokens_for(config, 200)
    expected = ReferenceEngine(weights, seq_len=200, kv_dtype=kv_dtype).prefill(tokens, all_logits=True)
    with open_engine(weights, seq_len=200, kv_dtype=kv_dtype, attention={"short_max": 0, **attention}) as engine:
        for pos, token in enumerate(tokens):
            out = engine.step(token, pos)
            assert relative(out, expected[pos]) < 2 * TOLERANCE * (16 if kv_dtype == "fp8" else 1), f"position {pos}"


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
def test_rolling_cache(open_engine: Open, kv_dtype: Any) -> None:
    weights = random_weights(BASE.replace(**SMALL, vocab_size=64))
    reference = ReferenceEngine(weights, seq_len=16, kv_dtype=kv_dtype, on_full="roll")
    with open_engine(weights, seq_len=16, kv_dtype=kv_dtype, on_full="roll", attention={"short_max": 0}) as engine:
        for pos, token in enumerate(tokens_for(weights.config, 40)):
            off = relative(engine.step(token, pos), reference.step(token, pos))
            assert off < TOLERANCE * (20 if kv_dtype == "fp8" else 2), f"position {pos}"


@pytest.mark.parametrize("changes", [{}, {"dtype": "gf4", "sliding_window": 20}, {"head_dim": 20, "norm_type": "layernorm"}])
def test_a_prompt_in_batches_equals_steps(open_engine: Open, changes: dict[str, Any]) -> None:
    weights = random_weights(BASE.replace(**SMALL | {"vocab_size": 64} | changes))
    tokens = tokens_for(weights.config, 72)
    with open_engine(weights, seq_len=72, attention={"short_max": 40}) as engine:
        stepped = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])
        engine.reset()
        together = engine.prefill(tokens, all_logits=True).copy()
        engine.reset()
        engine.prefill(tokens[:50])
        last = engine.prefill(tokens[50:], 50).copy()
    assert relative(together, stepped) < 2 * TOLERANCE
    assert relative(last, stepped[-1]) < 2 * TOLERANCE


@pytest.mark.parametrize("dtype", ["fp16", "gf4"])
def test_the_order_of_blocks_changes_no_bit(open_engine: Open, dtype: Any) -> None:
    weights = random_weights(BASE.replace(**SMALL, vocab_size=300, dtype=dtype))
    tokens = tokens_for(weights.config, 40)
    seen = set()
    for order in (0, 1, 6):
        with open_engine(weights, order=order, seq_len=40, attention={"short_max": 0}) as engine:
            seen.add(b"".join(engine.step(token, pos).tobytes() for pos, token in enumerate(tokens)))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=1.3, repetition_range=20),
        Sampling(temperature=0.9, min_p=0.1),
        Sampling(temperature=1.2, top_k=12, top_p=0.8, min_p=0.0, repetition_penalty=1.2),
    ],
    ids=["greedy", "penalty", "min-p", "all"],
)
def test_tokens_chosen_by_the_kernels_are_the_samplers(open_engine: Open, sampling: Sampling) -> None:
    weights = random_weights(BASE.replace(**SMALL | {"n_layers": 1}, vocab_size=300))
    with open_engine(weights, seq_len=48) as engine:
        sampler = Sampler(sampling)
        sampler.rng.state = 77
        history = [3]
        for pos in range(24):
            history.append(sampler.sample(engine.step(history[-1], pos), history))
        engine.reset()
        chosen = [t.token for t in engine.decode_many(3, 0, 24, sampling=sampling, rng_state=77, history=[3])]
    assert chosen == history[1:]


@pytest.mark.parametrize(
    ("arch", "changes", "kv_dtype"),
    [
        ("sm_80", {"dtype": "fp8"}, "fp16"),
        ("sm_86", {"dtype": "gf4", "head_dim": 80, "rotary_dim": 80}, "fp8"),
        ("sm_89", {"head_dim": 128, "n_kv_heads": 4}, "fp16"),
        ("sm_89", {"dtype": "gf4", "n_experts": 4, "n_experts_active": 2}, "fp16"),
        ("sm_120", {"dtype": "fp8", "head_dim": 256, "n_heads": 2, "n_kv_heads": 1}, "fp8"),
    ],
)
def test_plans_of_gpus_that_no_test_runs_on(open_engine: Open, arch: str, changes: dict[str, Any], kv_dtype: Any) -> None:
    """Their grids, rings and shared memory: steps, a prompt in a batch, and drawn tokens."""
    config = BASE.replace(**SMALL | {"n_layers": 1, "vocab_size": 300} | changes)
    weights, tokens = random_weights(config), tokens_for(config, 36)
    reference = ReferenceEngine(weights, seq_len=48, kv_dtype=kv_dtype)
    limit = 3 * TOLERANCE * (12 if kv_dtype == "fp8" else 1)
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.9, min_p=0.0)
    with open_engine(weights, arch=arch, seq_len=48, kv_dtype=kv_dtype) as engine:
        for pos, token in enumerate(tokens):
            expected = reference.step(token, pos)
            assert relative(engine.step(token, pos), expected) < limit, f"position {pos}"
        engine.reset()
        assert relative(engine.prefill(tokens), expected) < limit
        chosen = list(engine.decode_many(tokens[-1], 35, 10, sampling=sampling, rng_state=5, history=tokens))
    assert [t.pos for t in chosen] == list(range(36, 46))


def test_a_prompt_with_massive_activations_is_what_its_steps_are(open_engine: Open) -> None:
    """act(gate) * up of some tokens is beyond a half's 65504; alone they were computed well, in a batch they became NaN."""
    weights = scaled_weights(BASE.replace(**SMALL, vocab_size=64), up=200.0, down=2.0**-10, gate=200.0)
    tokens = tokens_for(weights.config, 24)
    reference = ReferenceEngine(weights, seq_len=24)
    expected = reference.prefill(tokens, all_logits=True)
    with open_engine(weights, seq_len=24) as engine:
        stepped = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])
        for _ in range(2):  # the second time it is known
            engine.reset()
            together = engine.prefill(tokens, all_logits=True).copy()
            assert relative(together, expected) < 2 * TOLERANCE
        engine.reset()
        last = engine.prefill(tokens).copy()
    assert relative(stepped, expected) < 2 * TOLERANCE
    assert relative(last, expected[-1]) < 2 * TOLERANCE


def test_up_alone_may_need_the_wide_kernel(open_engine: Open) -> None:
    weights = scaled_weights(BASE.replace(**SMALL, vocab_size=64), up=1.0, down=2.0**-12)
    weights.layers[0].w3[3] = np.float16(20000.0) * np.sign(weights.layers[0].w3[3])
    reference = ReferenceEngine(weights, seq_len=8)
    with open_engine(weights, seq_len=8) as engine:
        for pos, token in enumerate(tokens_for(weights.config, 6)):
            assert relative(engine.step(token, pos), reference.step(token, pos)) < 2 * TOLERANCE, f"position {pos}"


def test_keys_and_values_beyond_a_half_are_stored_as_the_largest(open_engine: Open) -> None:
    weights = random_weights(BASE.replace(**SMALL, vocab_size=64), bias=True)
    c = weights.config
    for layer in weights.layers:
        layer.qkv_bias[c.q_dim + c.kv_dim + 5] = 7e4
    reference = ReferenceEngine(weights, seq_len=8)
    with open_engine(weights, seq_len=8) as engine:
        for pos, token in enumerate(tokens_for(c, 6)):
            assert relative(engine.step(token, pos), reference.step(token, pos)) < 2 * TOLERANCE, f"position {pos}"
