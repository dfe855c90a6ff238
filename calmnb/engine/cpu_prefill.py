"""Prompts in batches: weights are decoded tile by tile to float32 and multiplied by BLAS.

A tile of weights is read once for all tokens of the batch, so a prompt is bound by arithmetic, not by memory. Each of
the engine's threads decodes and multiplies tiles of its own, with BLAS held to one thread: the user's thread count is
kept, and no BLAS thread is left spinning (OpenBLAS: for 26 ms) while the next token is decoded. Norms,
rotary embedding, cache stores, softmax and activations run on the engine's own threads.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from calmnb.engine import cpu_kernels as k
from calmnb.engine.base import LayerWeights, Weights
from calmnb.engine.cpu_blas import one_blas_thread
from calmnb.engine.cpu_state import CpuState, address_of
from calmnb.engine.positions import rope_table

__all__ = ["prefill_batch"]

Array = NDArray[np.float32]

#: float32 numbers of one thread's decoded tile of weights (1 MiB: stays in a core's second-level cache).
_TILE = 1 << 18
#: float32 numbers of one block of attention scores (16 MiB).
_SCORES = 1 << 22


class _Batch:
    """Scratch of one batch; see `prefill_batch`."""

    def __init__(self, state: CpuState, weights: Weights, n: int) -> None:
        self.state, self.weights, self.config, self.n = state, weights, weights.config, n
        c = self.config
        widest = max(c.dim, c.q_dim, c.hidden_dim)
        self.tiles = [np.empty(max(_TILE, widest), dtype=np.float32) for _ in range(state.threads)]

    def product(self, x: Array, stored: NDArray[np.generic], out: Array) -> None:
        """``out = x @ W.T`` for a stored matrix W of shape (rows, x.shape[1])."""
        rows, cols, state = out.shape[1], x.shape[1], self.state
        dtype, source, row_bytes = int(state.context[k.DTYPE]), address_of(stored), stored.nbytes // rows

        def slice_of(thread: int) -> None:
            first, last = rows * thread // state.threads, rows * (thread + 1) // state.threads
            step = self.tiles[thread].size // cols
            for r in range(first, last, step):
                m = min(step, last - r)
                tile = self.tiles[thread][: m * cols].reshape(m, cols)
                state.run_alone(thread, k.J_DECODE, m, cols, dtype, source + r * row_bytes, address_of(tile))
                np.matmul(x, tile.T, out=out[:, r : r + m])

        state.spread(slice_of)

    def norm(self, x: Array, gain: Array, out: Array) -> None:
        """Normalise the rows of x."""
        self.state.run(k.J_NORM, len(x), address_of(x), address_of(gain), address_of(out))

    def gate(self, a: Array, b: Array) -> None:
        """``a = act(a) * b`` in place; both padded to a multiple of 16 numbers."""
        self.state.run(k.J_GATE, a.size, address_of(a), address_of(b))

    def attention(self, qkv: Array, index: int, pos: int, out: Array) -> None:
        """Causal attention of the batch's queries over the cache, written to out (n, q_dim)."""
        c, n, state = self.config, self.n, self.state
        group, layer = c.n_heads // c.n_kv_heads, state.layer_address(index)
        first = max(0, pos + 1 - c.sliding_window) if c.sliding_window else 0
        block0 = first // 16
        blocks = (pos + n + 15) // 16 - block0
        hd, hd_pad, width = c.head_dim, (c.head_dim + 15) // 16 * 16, 16 * blocks
        keys, values = np.empty((hd, width), np.float32), np.empty((width, hd_pad), np.float32)
        rows = max(1, min(n, _SCORES // (width * group)))
        scores, mixed = np.empty((rows * group, width), np.float32), np.empty((rows * group, hd_pad), np.float32)
        for head in range(c.n_kv_heads):
            state.run(k.J_KV, head, layer, blocks, block0, address_of(keys), address_of(values))
            columns = slice(head * group * hd, (head + 1) * group * hd)
            for start in range(0, n, rows):
                m = min(rows, n - start)
                q = np.ascontiguousarray(qkv[start : start + m, columns]).reshape(m * group, hd)
                s, o = scores[: m * group], mixed[: m * group]
                self._matmul(q, keys, s)
                state.run(k.J_SOFTMAX, m * group, width, address_of(s), pos + start - 16 * block0, group)
                self._matmul(s, values, o)
                out[start : start + m, columns] = o[:, :hd].reshape(m, group * hd)

    def _matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b``, rows shared by the threads."""
        n, threads = len(a), self.state.threads

        def rows_of(thread: int) -> None:
            rows = slice(n * thread // threads, n * (thread + 1) // threads)
            np.matmul(a[rows], b, out=out[rows])

        self.state.spread(rows_of)

    def feed_forward(self, x: Array, xb: Array, layer: LayerWeights, marks: list[float]) -> None:
        """``x += FFN(xb)``, dense or by experts; notes the time between up and down."""
        c = self.config
        if not c.is_moe:
            up, gated = (_padded(self.n, c.hidden_dim) for _ in range(2))
            self.product(xb, layer.w1, gated[1])
            self.product(xb, layer.w3, up[1])
            self.gate(gated[0], up[0])
            marks.append(time.perf_counter())
            down = np.empty((self.n, c.dim), np.float32)
            self.product(gated[1], layer.w2, down)
            x += down
            return
        assert layer.moegate is not None
        scores = np.empty((self.n, c.n_experts), np.float32)
        self.product(xb, layer.moegate, scores)
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : c.n_experts_active]
        top = np.take_along_axis(scores, chosen, axis=1)
        shares = np.exp(top - top[:, :1])
        shares /= shares.sum(axis=1, keepdims=True)
        hidden = []
        for expert in range(c.n_experts):
            tokens, ranks = np.nonzero(chosen == expert)
            if not len(tokens):
                continue
            rows = np.ascontiguousarray(xb[tokens])
            up, gated = (_padded(len(tokens), c.hidden_dim) for _ in range(2))
            self.product(rows, layer.w1[expert], gated[1])
            self.product(rows, layer.w3[expert], up[1])
            self.gate(gated[0], up[0])
            hidden.append((expert, tokens, shares[tokens, ranks], gated[1]))
        marks.append(time.perf_counter())
        for expert, tokens, share, rows in hidden:
            down = np.empty((len(tokens), c.dim), np.float32)
            self.product(rows, layer.w2[expert], down)
            x[tokens] += share[:, None] * down


def _padded(rows: int, cols: int) -> tuple[Array, Array]:
    """Return a flat buffer padded to sixteen numbers, and its view as (rows, cols)."""
    flat = np.zeros((rows * cols + 15) // 16 * 16, dtype=np.float32)
    return flat, flat[: rows * cols].reshape(rows, cols)


def prefill_batch(state: CpuState, weights: Weights, ids: NDArray[np.int64], pos: int, logits: Array) -> list[float]:
    """Run the tokens `ids`, the first of which stands at `pos`, through the model.

    Parameters
    ----------
    logits : float32 (m, vocab_size)
        Receives the logits of the last m tokens; m may be 0.

    Returns
    -------
    list of float
        Times (``time.perf_counter``) that delimit the kernels of the engine's batch rows.
    """
    with one_blas_thread():
        return _prefill(state, weights, ids, pos, logits)


def _prefill(state: CpuState, weights: Weights, ids: NDArray[np.int64], pos: int, logits: Array) -> list[float]:
    c, n = weights.config, len(ids)
    batch = _Batch(state, weights, n)
    marks = [time.perf_counter()]
    embedded = np.ascontiguousarray(weights.embed[ids])
    x = np.empty((n, c.dim), np.float32)
    state.run(k.J_DECODE, n, c.dim, int(state.context[k.DTYPE]), address_of(embedded), address_of(x))
    table = rope_table(c, np.arange(pos, pos + n))
    xb, qkv = np.empty_like(x), np.empty((n, c.q_dim + 2 * c.kv_dim), np.float32)
    mixed, added = np.empty((n, c.q_dim), np.float32), np.empty_like(x)
    marks.append(time.perf_counter())
    for index, layer in enumerate(weights.layers):
        batch.norm(x, layer.attn_norm, xb)
        batch.product(xb, layer.wq, qkv[:, : c.q_dim])
        batch.product(xb, layer.wk, qkv[:, c.q_dim : c.q_dim + c.kv_dim])
        batch.product(xb, layer.wv, qkv[:, c.q_dim + c.kv_dim :])
        state.run(k.J_ROPE, n, address_of(qkv), state.layer_address(index), pos, address_of(table))
        marks.append(time.perf_counter())
        batch.attention(qkv, index, pos, mixed)
        marks.append(time.perf_counter())
        batch.product(mixed, layer.wo, added)
        x += added
        marks.append(time.perf_counter())
        if layer.mlp_norm is not None and not c.is_parallel:
            batch.norm(x, layer.mlp_norm, xb)
        batch.feed_forward(x, xb, layer, marks)
        marks.append(time.perf_counter())
    if len(logits):
        last = np.ascontiguousarray(x[n - len(logits) :])
        normed = np.empty_like(last)
        batch.norm(last, weights.final_norm, normed)
        batch.product(normed, weights.output, logits)
    marks.append(time.perf_counter())
    return marks
