"""Bytes and FLOPs of each stage against real buffers and the specification's figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.config import ModelConfig
from calmnb.engine.cpu import CpuEngine
from calmnb.engine.stages import StageCost, calm_stage_bytes, kv_bytes, stage_cost, step_cost, weight_bytes_per_token
from tests.engine_models import SPEC_CONFIG, random_weights

MISTRAL = ModelConfig("mistral", "fp16", 4096, 14336, 128, 32, 32, 8, 32000, max_seq_len=32768, rotary_dim=128)
LLAMA2 = ModelConfig("llama", "fp16", 4096, 11008, 128, 32, 32, 32, 32000, rotary_dim=128)
LLAMA3 = MISTRAL.replace(dtype="fp8", vocab_size=128256)
LLAMA32_1B = ModelConfig("llama", "fp16", 2048, 8192, 64, 16, 32, 8, 128256, rotary_dim=64)
MIXTRAL = MISTRAL.replace(dtype="gf4", n_experts=8, n_experts_active=2)
LAYER_STAGES = ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")


@pytest.mark.parametrize(
    ("config", "kv_dtype", "kv_len", "expected"),
    [
        (MISTRAL, "fp16", 1, 131_072),
        (MISTRAL, "fp16", 1000, 131_072_000),
        (MISTRAL, "fp16", 4096, 536_870_912),
        (MISTRAL, "fp8", 16384, 1_073_741_824),
        (LLAMA2, "fp16", 4096, 2_147_483_648),
    ],
)
def test_kv_bytes_of_the_specification(config: ModelConfig, kv_dtype: str, kv_len: int, expected: int) -> None:
    assert kv_bytes(config, kv_len, kv_dtype=kv_dtype) == expected
    attention = stage_cost(config, "attention", kv_len, kv_dtype=kv_dtype)
    assert attention.bytes_min * config.n_layers == expected


# The specification's per-token figures count norms (float32) and the router; bytes_min counts matrices alone.
def norm_bytes(config: ModelConfig) -> int:
    return (2 * config.n_layers + 1) * config.dim * 4


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (MISTRAL, 14_221_852_672),
        (MISTRAL.replace(dtype="fp8"), 7_111_458_816),
        (MISTRAL.replace(dtype="gf4"), 3_556_261_888),
        (LLAMA3, 7_505_723_392),
        (LLAMA32_1B, 2_471_763_968),
    ],
)
def test_weight_bytes_per_token_of_the_specification(config: ModelConfig, per_token: int) -> None:
    assert weight_bytes_per_token(config) + norm_bytes(config) == per_token


def test_weight_bytes_per_token_of_experts_of_the_specification() -> None:
    router = MIXTRAL.n_layers * MIXTRAL.n_experts * MIXTRAL.dim // 2
    assert weight_bytes_per_token(MIXTRAL) + norm_bytes(MIXTRAL) + router == 6_375_358_464


@pytest.mark.parametrize(("kv_len", "score", "total"), [(1, 69_632, 6_979_461_120), (4096, 285_212_672, 7_549_747_200)])
def test_calm_stage_bytes_of_the_specification(kv_len: int, score: int, total: int) -> None:
    got = calm_stage_bytes(MISTRAL.replace(dtype="fp8"), kv_len)
    assert got["attn_score"] == got["attn_mix"] == score
    assert (got["matmul_qkv"], got["matmul_attn"]) == (805_306_368, 536_870_912)
    assert (got["matmul_ffn_up"], got["matmul_ffn_down"]) == (3_758_096_384, 1_879_048_192)
    assert (got["total"], got["output"]) == (total, 131_072_000)


CONFIGS = {
    "dense": SPEC_CONFIG,
    "fp8": SPEC_CONFIG.replace(dtype="fp8"),
    "gf4": SPEC_CONFIG.replace(dtype="gf4"),
    "experts": SPEC_CONFIG.replace(n_experts=4, n_experts_active=2),
    "parallel": SPEC_CONFIG.replace(norm_type="layernorm_par"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_matrix_bytes_are_the_nbytes_of_the_matrices(name: str) -> None:
    weights = random_weights(CONFIGS[name])
    config, layer = weights.config, weights.layers[0]
    active = config.n_experts_active / config.n_experts if config.is_moe else 1
    costs = {stage: stage_cost(config, stage, 1).bytes_min for stage in (*LAYER_STAGES, "embed", "output")}
    assert costs["matmul_qkv"] == layer.wq.nbytes + layer.wk.nbytes + layer.wv.nbytes
    assert costs["matmul_attn"] == layer.wo.nbytes
    assert costs["matmul_ffn_up"] == (layer.w1.nbytes + layer.w3.nbytes) * active
    assert costs["matmul_ffn_down"] == layer.w2.nbytes * active
    assert costs["output"] == weights.output.nbytes
    assert costs["embed"] == weights.embed[0].nbytes


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_bytes_add_norms_biases_router_and_activations(name: str) -> None:
    weights = random_weights(CONFIGS[name], bias=True)
    config, layer = weights.config, weights.layers[0]
    c, f = config, 4
    assert layer.qkv_bias is not None
    cost = stage_cost(c, "matmul_qkv", 1, has_bias=True)
    stored = 2 * c.kv_dim * 2  # one key and one value in fp16
    assert (
        cost.bytes_counted - cost.bytes_min == layer.attn_norm.nbytes + layer.qkv_bias.nbytes + (c.dim + c.q_dim) * f + stored
    )
    active = c.n_experts_active if c.is_moe else 1
    cost = stage_cost(c, "matmul_ffn_up", 1)
    norm = 0 if layer.mlp_norm is None else layer.mlp_norm.nbytes
    router = 0 if layer.moegate is None else layer.moegate.nbytes
    assert cost.bytes_counted - cost.bytes_min == norm + router + (c.dim + active * c.hidden_dim) * f
    cost = stage_cost(c, "output", 1)
    assert cost.bytes_counted - cost.bytes_min == weights.final_norm.nbytes + (c.dim + c.vocab_size) * f


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
def test_cache_bytes_are_the_nbytes_of_the_cache(kv_dtype: Any) -> None:
    engine = CpuEngine(random_weights(SPEC_CONFIG), seq_len=64, kv_dtype=kv_dtype, threads=1)
    assert engine._state is not None
    assert kv_bytes(SPEC_CONFIG, 64, kv_dtype=kv_dtype) == engine._state.kv_cache.nbytes
    engine.close()


def test_flops_are_two_a_multiply_add() -> None:
    c = SPEC_CONFIG
    assert stage_cost(c, "matmul_qkv", 1).flops == 2 * np.prod((64, 32))
    assert stage_cost(c, "attention", 10).flops == 2 * (2 * 10 * c.q_dim)
    assert stage_cost(c, "output", 1).flops == 2 * c.vocab_size * c.dim


def test_a_batch_reads_weights_once_and_attends_causally() -> None:
    one, batch = (stage_cost(SPEC_CONFIG, "matmul_ffn_up", n, n_tokens=n) for n in (1, 8))
    assert batch.bytes_min == one.bytes_min
    assert batch.flops == 8 * one.flops
    steps = sum(stage_cost(SPEC_CONFIG, "attention", n).flops for n in range(1, 9))
    assert stage_cost(SPEC_CONFIG, "attention", 8, n_tokens=8).flops == steps


def test_a_window_bounds_what_attention_reads() -> None:
    windowed = SPEC_CONFIG.replace(sliding_window=16)
    assert stage_cost(windowed, "attention", 60) == stage_cost(SPEC_CONFIG, "attention", 16)
    assert kv_bytes(windowed, 60) == kv_bytes(SPEC_CONFIG, 16)
    # Four queries at positions 56 to 59 see positions 41 to 59 between them.
    assert stage_cost(windowed, "attention", 60, n_tokens=4).bytes_min == stage_cost(SPEC_CONFIG, "attention", 19).bytes_min


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    kv_len=st.integers(1, 200),
    n=st.integers(1, 200),
    kv_dtype=st.sampled_from(["fp16", "fp8"]),
    stage=st.sampled_from([*LAYER_STAGES, "embed", "output"]),
)
def test_counted_is_never_below_minimum(name: str, kv_len: int, n: int, kv_dtype: str, stage: Any) -> None:
    cost = stage_cost(CONFIGS[name], stage, max(kv_len, n), kv_dtype=kv_dtype, n_tokens=n)
    assert 0 <= cost.bytes_min <= cost.bytes_counted
    assert cost.flops >= 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_the_sum_of_its_stages(name: str) -> None:
    config = CONFIGS[name]
    parts = [stage_cost(config, s, 9) for s in LAYER_STAGES] * config.n_layers + [
        stage_cost(config, "embed", 9),
        stage_cost(config, "output", 9),
    ]
    assert step_cost(config, 9) == StageCost(*(sum(column) for column in zip(*parts, strict=True)))


@pytest.mark.parametrize("stage", ["sample", "gap"])
def test_choosing_and_waiting_cost_nothing(stage: Any) -> None:
    assert stage_cost(SPEC_CONFIG, stage, 9) == StageCost(0, 0, 0)
