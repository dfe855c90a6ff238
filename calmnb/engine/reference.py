"""The reference engine: plain NumPy in float32, written to be read. Every other engine is tested against it.

One function, `ReferenceEngine._forward`, is the whole transformer. It takes n tokens at once; decoding is n = 1. Matrices
are decoded to float32 when first used and kept, so a model costs four bytes a weight here: no speed or thrift is asked.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine.base import EngineInfo, FullPolicy, Kernel, LayerWeights, Phase, Recorder, Stage, Weights
from calmnb.engine.positions import N_SINKS, Positions, check_kv_dtype, check_tokens, rope_table
from calmnb.errors import ConfigError
from calmnb.quant import decode

__all__ = ["ReferenceEngine", "activation", "choose_experts", "normalise", "rotate"]

Array = NDArray[np.float32]

_LAYER_STAGES: tuple[Stage, ...] = ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")


def normalise(x: Array, gain: Array, config: ModelConfig) -> Array:
    """RMS norm, or layer norm without bias, over the last axis.

    Examples
    --------
    >>> config = ModelConfig("llama", "fp16", 4, 4, 4, 1, 1, 1, 4)
    >>> normalise(np.float32([1, -2, 3, 4]), np.float32([1, 1, 2, 0.5]), config).round(4).tolist()
    [0.36509999632835388, -0.7303000092506409, 2.190900087356567, 0.7303000092506409]
    """
    if config.norm_type != "rmsnorm":
        x = x - x.mean(axis=-1, keepdims=True)
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    scaled: Array = x / np.sqrt(mean_square + np.float32(config.norm_eps)) * gain
    return scaled


def rotate(x: Array, table: Array) -> Array:
    """Rotary embedding of neighbouring channel pairs.

    Parameters
    ----------
    x : float32 (n, heads, head_dim)
    table : float32 (n, 2, rotary_dim // 2)
        From `rope_table`. Channels from rotary_dim on pass unchanged.
    """
    out = x.copy()
    half = table.shape[-1]
    cos, sin = table[:, None, 0], table[:, None, 1]
    a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    out[..., 0 : 2 * half : 2] = a * cos - b * sin
    out[..., 1 : 2 * half : 2] = a * sin + b * cos
    return out


def activation(x: Array, kind: str) -> Array:
    """SiLU, or the tanh form of GELU."""
    if kind == "gelu":
        gelu: Array = np.float32(0.5) * x * (1 + np.tanh(np.float32(0.797885) * (x + np.float32(0.044715) * x * x * x)))
        return gelu
    # exp overflows to infinity below -88, where x / infinity is the right limit, -0.
    with np.errstate(over="ignore"):
        silu: Array = x / (1 + np.exp(-x))
    return silu


def choose_experts(gate: Array, k: int) -> tuple[NDArray[np.int64], Array]:
    """Pick the `k` largest router outputs (ties: lower index) and softmax over those alone.

    Examples
    --------
    >>> choose_experts(np.float32([2, 2, 1, 2]), 2)[0].tolist()
    [0, 1]
    """
    chosen = np.argsort(-gate, kind="stable")[:k]
    weights = np.exp(gate[chosen] - gate[chosen[0]])
    return chosen, weights / weights.sum()


class ReferenceEngine:
    """Compute logits with NumPy.

    Parameters
    ----------
    weights
        A model, as stored.
    seq_len
        KV-cache slots; default ``min(config.max_seq_len, 4096)``.
    kv_dtype
        "fp16" or "fp8" (E5M2). Stores round to nearest even and saturate at the largest finite value.
    on_full
        "stop" or "roll".

    Attributes
    ----------
    info, config, seq_len, kv_dtype, on_full, recorder
        As in `calmnb.engine.Engine`.
    """

    def __init__(
        self, weights: Weights, *, seq_len: int | None = None, kv_dtype: KvDtype = "fp16", on_full: FullPolicy = "stop"
    ) -> None:
        check_kv_dtype(kv_dtype)
        self.config = config = weights.config
        self.seq_len = min(config.max_seq_len, 4096) if seq_len is None else seq_len
        self.kv_dtype: KvDtype = kv_dtype
        self.on_full: FullPolicy = on_full
        self.recorder: Recorder | None = None
        self.info = EngineInfo("reference", platform.processor() or platform.machine(), 0, "cpu")
        self._positions = Positions(config, self.seq_len, on_full)
        self._weights: Weights | None = weights
        self._decoded: dict[int, Array] = {}
        store = np.float16 if kv_dtype == "fp16" else ml_dtypes.float8_e5m2
        self._kv_max = np.float32(65504 if kv_dtype == "fp16" else 57344)
        # (layer, key or value, slot, kv head, channel)
        self._cache = np.zeros((config.n_layers, 2, self.seq_len, config.n_kv_heads, config.head_dim), dtype=store)
        self._turn = _turn(config)
        layers = [Kernel(s, layer, f"numpy_{s}") for layer in range(config.n_layers) for s in _LAYER_STAGES]
        self._kernels = (Kernel("embed", -1, "numpy_embed"), *layers, Kernel("output", -1, "numpy_output"))

    def step(self, token: int, pos: int) -> Array:
        """Decode one token; see `calmnb.engine.Engine.step`."""
        logits: Array = self._run([token], pos, "decode", False)[-1]
        return logits

    def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> Array:
        """Feed several tokens; see `calmnb.engine.Engine.prefill`."""
        logits = self._run(tokens, pos, "prefill", all_logits)
        last: Array = logits[-1]
        return logits if all_logits else last

    def reset(self) -> None:
        """Forget the sequence, so that the next position is 0."""
        self._positions.end = 0

    def close(self) -> None:
        """Drop the weights and the cache. Idempotent."""
        self._weights = None
        self._decoded.clear()
        self._cache = self._cache[:0]

    # -- the transformer ------------------------------------------------------------------------------------------

    def _run(self, tokens: Sequence[int], pos: int, phase: Phase, all_logits: bool) -> Array:
        if self._weights is None:
            raise ConfigError("this engine was closed; open the model again")
        ids = check_tokens(self.config, tokens)
        self._positions.check(pos, len(ids))
        # What fits runs as one batch; once the cache rolls, every token changes what the next one can see.
        n_plain = max(0, min(len(ids), self.seq_len - pos))
        batches = ([ids[:n_plain]] if n_plain else []) + [ids[i : i + 1] for i in range(n_plain, len(ids))]
        out = []
        for i, batch in enumerate(batches):
            wanted = len(batch) if all_logits else int(i == len(batches) - 1)
            out.append(self._forward(batch, pos, phase, wanted))
            pos += len(batch)
        return np.concatenate(out)

    def _forward(self, ids: NDArray[np.int64], pos: int, phase: Phase, n_logits: int) -> Array:
        """Logits of the last `n_logits` of the tokens `ids`, the first of which stands at `pos`."""
        config, weights, n = self.config, self._weights, len(ids)
        assert weights is not None
        marks = [time.perf_counter()]
        x = decode(weights.embed[ids], config.dtype)
        marks.append(time.perf_counter())
        table = rope_table(config, range(pos, pos + n))
        slots = [self._positions.slot(p) for p in range(pos, pos + n)]
        for index, layer in enumerate(weights.layers):
            xb = normalise(x, layer.attn_norm, config)
            q, k, v = self._qkv(layer, xb, table)
            cache = self._cache[index]
            if self._positions.rolls(pos):
                sinks = cache[0, :N_SINKS].astype(np.float32)
                cache[0, :N_SINKS] = self._store(rotate(sinks, np.repeat(self._turn, N_SINKS, axis=0)))
            cache[0, slots], cache[1, slots] = self._store(k), self._store(v)
            marks.append(time.perf_counter())
            mixed = self._attend(q, cache, pos)
            marks.append(time.perf_counter())
            x = x + mixed @ self._matrix(layer.wo).T
            marks.append(time.perf_counter())
            if layer.mlp_norm is not None and not config.is_parallel:
                xb = normalise(x, layer.mlp_norm, config)
            if config.is_moe:
                hidden, route = self._experts_up(layer, xb)
                marks.append(time.perf_counter())
                x = x + self._experts_down(layer, hidden, route)
            else:
                gate = activation(xb @ self._matrix(layer.w1).T, config.act_type)
                hidden = [gate * (xb @ self._matrix(layer.w3).T)]
                marks.append(time.perf_counter())
                x = x + hidden[0] @ self._matrix(layer.w2).T
            marks.append(time.perf_counter())
        logits = normalise(x[n - n_logits :], weights.final_norm, config) @ self._matrix(weights.output).T
        marks.append(time.perf_counter())
        self._positions.end = pos + n
        if self.recorder is not None:
            starts, ends = np.array(marks[:-1]), np.array(marks[1:])
            kv_len = self._positions.length(pos + n - 1)
            self.recorder.add(phase, pos, kv_len, n, self._kernels, starts, ends, marks[0], marks[-1])
        return logits

    def _matrix(self, stored: NDArray[np.generic]) -> Array:
        """Return the stored matrix in float32, decoded once."""
        key = stored.__array_interface__["data"][0]
        if key not in self._decoded:
            self._decoded[key] = decode(stored, self.config.dtype)
        return self._decoded[key]

    def _store(self, x: Array) -> NDArray[np.generic]:
        rounded: NDArray[np.generic] = np.clip(x, -self._kv_max, self._kv_max).astype(self._cache.dtype)
        return rounded

    def _qkv(self, layer: LayerWeights, xb: Array, table: Array) -> tuple[Array, Array, Array]:
        """Return queries (n, n_heads, head_dim), keys and values (n, n_kv_heads, head_dim); q and k rotated."""
        c, n = self.config, len(xb)
        rows = np.concatenate([xb @ self._matrix(w).T for w in (layer.wq, layer.wk, layer.wv)], axis=1)
        if layer.qkv_bias is not None:
            rows = rows + layer.qkv_bias
        rows = np.clip(rows, np.float32(-c.qkv_clip), np.float32(c.qkv_clip))
        q = rows[:, : c.q_dim].reshape(n, c.n_heads, c.head_dim)
        k = rows[:, c.q_dim : c.q_dim + c.kv_dim].reshape(n, c.n_kv_heads, c.head_dim)
        v = rows[:, c.q_dim + c.kv_dim :].reshape(n, c.n_kv_heads, c.head_dim)
        return rotate(q, table), rotate(k, table), v

    def _attend(self, q: Array, cache: NDArray[np.generic], pos: int) -> Array:
        """Softmax attention of q (n, n_heads, head_dim) over the cached positions; returns (n, q_dim)."""
        c = self.config
        group = c.n_heads // c.n_kv_heads
        scale = np.float32(1 / np.sqrt(c.head_dim))
        out = np.empty_like(q)
        for i in range(len(q)):
            length = self._positions.length(pos + i)
            first = max(0, length - c.sliding_window) if c.sliding_window else 0
            keys, values = cache[:, first:length].astype(np.float32)
            for head in range(c.n_heads):
                scores = keys[:, head // group] @ q[i, head] * scale
                weights = np.exp(scores - scores.max())
                out[i, head] = (weights / weights.sum()) @ values[:, head // group]
        return out.reshape(len(q), c.q_dim)

    def _experts_up(self, layer: LayerWeights, xb: Array) -> tuple[list[Array], list[tuple[NDArray[np.int64], Array]]]:
        """For every token, the hidden vectors of its experts (n_experts_active, hidden_dim) and the route there."""
        assert layer.moegate is not None
        w1, w3 = self._matrix(layer.w1), self._matrix(layer.w3)
        hidden, route = [], []
        for row, gate in zip(xb, xb @ self._matrix(layer.moegate).T, strict=True):
            chosen, weights = choose_experts(gate, self.config.n_experts_active)
            hidden.append(activation(w1[chosen] @ row, self.config.act_type) * (w3[chosen] @ row))
            route.append((chosen, weights))
        return hidden, route

    def _experts_down(self, layer: LayerWeights, hidden: list[Array], route: list[tuple[NDArray[np.int64], Array]]) -> Array:
        w2 = self._matrix(layer.w2)
        out = [
            sum((w * (w2[e] @ h) for e, w, h in zip(chosen, weights, rows, strict=True)), np.zeros(self.config.dim, np.float32))
            for rows, (chosen, weights) in zip(hidden, route, strict=True)
        ]
        return np.stack(out)


def _turn(config: ModelConfig) -> Array:
    """Rotation by one position, without yarn's factor: turning a key must not lengthen it."""
    freqs, _ = config.rope_frequencies()
    return np.stack([np.cos(freqs), np.sin(freqs)])[None].astype(np.float32)
