"""Bytes and floating-point operations of each stage, declared once.

Three kinds of bytes are kept apart everywhere in calmnb:

``bytes_min``
    What any implementation must move: the stage's weight matrices as stored, and the KV cache entries it has to read.
    This is the number rooflines and "% of peak" use, and it matches calm's own accounting (SPEC_calm.md 4.4)
    except that attention scores, which need never leave the chip, are not in it.
``bytes_counted``
    What this code touches: `bytes_min` plus norm weights, biases, the router, KV cache entries written, and activations in
    and out.
``bytes_measured``
    What a hardware counter saw; only profilers fill it.
"""

from __future__ import annotations

from typing import NamedTuple

from calmnb.config import DTYPE_BITS, ModelConfig
from calmnb.engine.base import Stage

__all__ = ["StageCost", "calm_stage_bytes", "kv_bytes", "stage_cost", "step_cost", "weight_bytes_per_token"]


class StageCost(NamedTuple):
    """Cost of one stage in one layer (or once, outside the layers): bytes and FLOPs."""

    bytes_min: int
    bytes_counted: int
    flops: int


def _matrix_bytes(config: ModelConfig, rows: int, cols: int) -> int:
    return rows * cols * DTYPE_BITS[config.dtype] // 8


def visible(config: ModelConfig, kv_len: int) -> int:
    """Positions a query really attends to, at most the sliding window."""
    return min(kv_len, config.sliding_window) if config.sliding_window else kv_len


def stage_cost(
    config: ModelConfig, stage: Stage, kv_len: int, *, kv_dtype: str = "fp16", n_tokens: int = 1, has_bias: bool = False
) -> StageCost:
    """Bytes and FLOPs of `stage` in one layer.

    Parameters
    ----------
    config
        The model.
    stage
        A stage name; ``sample`` and ``gap`` cost nothing here.
    kv_len
        Positions the last token of the step attends to.
    kv_dtype
        KV cache storage, "fp16" or "fp8".
    n_tokens
        Tokens computed together. Weights are read once for all of them; activations and FLOPs grow with it.
    has_bias
        Whether q, k and v have a bias.

    Returns
    -------
    StageCost
        A multiply-add counts as two FLOPs. A prefill of n tokens attends causally: token i sees
        ``kv_len - n_tokens + i + 1`` positions. With experts, decoding one token reads `n_experts_active` of them; a
        batch may read up to all.
    """
    c, n, act = config, n_tokens, 4
    if stage == "embed":
        row = _matrix_bytes(c, n, c.dim)
        return StageCost(row, row + n * c.dim * act, 0)
    if stage == "matmul_qkv":
        rows = c.q_dim + 2 * c.kv_dim
        weights = _matrix_bytes(c, rows, c.dim)
        written = n * 2 * c.kv_dim * DTYPE_BITS[kv_dtype] // 8
        extra = c.dim * 4 + (rows * 4 if has_bias else 0) + n * (c.dim + c.q_dim) * act
        return StageCost(weights, weights + written + extra, 2 * n * rows * c.dim)
    if stage == "attention":
        lengths = [visible(c, kv_len - n + i + 1) for i in range(n)] if n > 1 else [visible(c, kv_len)]
        total = sum(lengths)
        # Queries of one batch share each read of the cache, so a batch must read its longest window once.
        read = (max(lengths) if n == 1 else visible_union(c, kv_len, n)) * 2 * c.kv_dim * DTYPE_BITS[kv_dtype] // 8
        scores = 2 * total * c.n_heads * act
        return StageCost(read, read + scores + 2 * n * c.q_dim * act, 4 * total * c.q_dim)
    if stage == "matmul_attn":
        weights = _matrix_bytes(c, c.dim, c.q_dim)
        return StageCost(weights, weights + n * (c.q_dim + 2 * c.dim) * act, 2 * n * c.dim * c.q_dim)
    active = c.n_experts_active if c.is_moe else 1
    read_experts = min(c.n_experts, n * active) if c.is_moe else 1
    if stage == "matmul_ffn_up":
        weights = 2 * _matrix_bytes(c, c.hidden_dim, c.dim) * read_experts
        router = _matrix_bytes(c, c.n_experts, c.dim)
        norm = 0 if c.is_parallel else c.dim * 4
        counted = weights + router + norm + n * (c.dim + active * c.hidden_dim) * act
        return StageCost(weights, counted, 4 * n * c.hidden_dim * c.dim * active + 2 * n * c.n_experts * c.dim)
    if stage == "matmul_ffn_down":
        weights = _matrix_bytes(c, c.dim, c.hidden_dim) * read_experts
        counted = weights + n * (active * c.hidden_dim + 2 * c.dim) * act
        return StageCost(weights, counted, 2 * n * c.hidden_dim * c.dim * active)
    if stage == "output":
        weights = _matrix_bytes(c, c.vocab_size, c.dim)
        # Only the last position of a batch is projected, unless all logits are asked for, which profiling never does.
        return StageCost(weights, weights + c.dim * 4 + c.dim * act + c.vocab_size * act, 2 * c.vocab_size * c.dim)
    return StageCost(0, 0, 0)


def visible_union(config: ModelConfig, kv_len: int, n_tokens: int) -> int:
    """Distinct positions that the queries of one batch attend to."""
    if not config.sliding_window:
        return kv_len
    return min(kv_len, config.sliding_window + n_tokens - 1)


def kv_bytes(config: ModelConfig, kv_len: int, *, kv_dtype: str = "fp16") -> int:
    """KV-cache bytes that decoding one token reads over all layers.

    Parameters
    ----------
    config
        The model; its sliding window bounds what is read.
    kv_len
        Positions that the token attends to, its own included.
    kv_dtype : {"fp16", "fp8"}
        Cache storage.
    """
    return config.kv_bytes_per_token(kv_dtype) * visible(config, kv_len)


def weight_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of weight matrices that decoding one token reads (norms, biases and the router left out)."""
    per_layer = sum(
        stage_cost(config, s, 0).bytes_min for s in ("matmul_qkv", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")
    )  # fmt: skip
    return per_layer * config.n_layers + stage_cost(config, "output", 0).bytes_min


def step_cost(
    config: ModelConfig, kv_len: int, *, kv_dtype: str = "fp16", n_tokens: int = 1, has_bias: bool = False
) -> StageCost:
    """Bytes and FLOPs of a whole step: all layers, embedding and output. Parameters as for `stage_cost`."""
    total = [0, 0, 0]
    for stage, times in (
        ("embed", 1),
        ("matmul_qkv", config.n_layers),
        ("attention", config.n_layers),
        ("matmul_attn", config.n_layers),
        ("matmul_ffn_up", config.n_layers),
        ("matmul_ffn_down", config.n_layers),
        ("output", 1),
    ):
        cost = stage_cost(config, stage, kv_len, kv_dtype=kv_dtype, n_tokens=n_tokens, has_bias=has_bias)  # type: ignore[arg-type]
        for i, value in enumerate(cost):
            total[i] += value * times
    return StageCost(*total)


def calm_stage_bytes(config: ModelConfig, kv_len: int, *, kv_dtype: str = "fp16") -> dict[str, int]:
    """Stage bytes as calm prints them, over all layers, to compare with its figures (SPEC_calm.md 4.4).

    calm charges each of score and mix with one half of the KV cache plus one float32 score a head and position.
    """
    c, layers = config, config.n_layers
    half = c.kv_dim * kv_len * DTYPE_BITS[kv_dtype] // 8 + c.n_heads * kv_len * 4
    out = {
        "matmul_qkv": layers * stage_cost(c, "matmul_qkv", kv_len).bytes_min,
        "attn_score": layers * half,
        "attn_softmax": 0,
        "attn_mix": layers * half,
        "matmul_attn": layers * stage_cost(c, "matmul_attn", kv_len).bytes_min,
        "matmul_ffn_up": layers * stage_cost(c, "matmul_ffn_up", kv_len).bytes_min,
        "matmul_ffn_down": layers * stage_cost(c, "matmul_ffn_down", kv_len).bytes_min,
    }
    out["total"] = sum(out.values())
    out["output"] = stage_cost(c, "output", kv_len).bytes_min
    return out
