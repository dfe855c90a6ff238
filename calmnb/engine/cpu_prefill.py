"""Prompts in batches: weights are decoded tile by tile to float32 and multiplied by BLAS.

A tile of weights is read once for all tokens of the batch, so a prompt is bound by arithmetic, not by memory. Each of
the engine's threads decodes and multiplies tiles of its own, with BLAS held to one thread: the user's thread count is
kept, and no BLAS thread is left spinning (OpenBLAS: for 26 ms) while the next token is decoded. Norms,
rotary embedding, cache stores, softmax and activations run on the engine's own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from calmnb.engine import cpu_kernels as k
from calmnb.engine.base import LayerWeights, PromptStopped, Weights
from calmnb.engine.cpu_blas import one_blas_thread
from calmnb.engine.cpu_state import CpuState, address_of
from calmnb.engine.positions import rope_table

__all__ = ["prefill_batch"]

Array = NDArray[np.float32]

#: float32 numbers of one thread's decoded tile of weights (1 MiB: stays in a core's second-level cache).
_TILE = 1 << 18
#: float32 numbers of one block of attention scores (16 MiB), and queries in one: later queries see more of the cache, so
#: that short blocks leave out most of what the causal mask would hide.
_SCORES, _QUERIES = 1 << 22, 128


class _Batch:
    """Scratch of one batch; see `prefill_batch`."""

    def __init__(self, state: CpuState, weights: Weights, n: int, should_stop: Callable[[], bool] | None) -> None:
        self.state, self.weights, self.config, self.n = state, weights, weights.config, n
        self.should_stop = should_stop or (lambda: False)
        c = self.config
        widest = max(c.dim, c.q_dim, c.hidden_dim)
        self.tiles = [np.empty(max(_TILE, widest), dtype=np.float32) for _ in range(state.threads)]
        # Kept from layer to layer: fresh megabytes would be mapped page by page each time.
        self.up, self.gated = _padded(n, c.hidden_dim), _padded(n, c.hidden_dim)
        self.added = np.empty((n, c.dim), np.float32)
        self.scores = [np.empty(0, np.float32) for _ in range(state.threads)]

    def product(self, x: Array, *matrices: tuple[NDArray[np.generic], Array]) -> None:
        """``out = x @ W.T`` for pairs of a stored matrix W of shape (rows, x.shape[1]) and its out."""
        cols, state, dtype = x.shape[1], self.state, int(self.state.context[k.DTYPE])

        def slice_of(thread: int) -> None:
            step = self.tiles[thread].size // cols
            for stored, out in matrices:
                rows = out.shape[1]
                source, row_bytes = address_of(stored), stored.nbytes // rows
                first, last = rows * thread // state.threads, rows * (thread + 1) // state.threads
                for r in range(first, last, step):
                    if self.should_stop():
                        return
                    m = min(step, last - r)
                    tile = self.tiles[thread][: m * cols].reshape(m, cols)
                    state.run_alone(thread, k.J_DECODE, m, cols, dtype, source + r * row_bytes, address_of(tile))
                    np.matmul(x, tile.T, out=out[:, r : r + m])

        state.spread(slice_of)
        if self.should_stop():
            raise PromptStopped

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
        rows = max(1, min(n, _QUERIES, _SCORES // (width * group)))
        starts = list(range(0, n, rows))[::-1]  # the longest first, so that the threads end together
        if self.scores[0].size < rows * group * width:
            self.scores = [np.empty(rows * group * width, np.float32) for _ in range(state.threads)]

        def some_queries(head: int, thread: int) -> None:
            columns = slice(head * group * hd, (head + 1) * group * hd)
            for start in starts[thread :: state.threads]:
                m = min(rows, n - start)
                seen = 16 * ((pos + start + m + 15) // 16 - block0)
                q = np.ascontiguousarray(qkv[start : start + m, columns]).reshape(m * group, hd)
                scores = self.scores[thread][: m * group * seen].reshape(m * group, seen)
                np.matmul(q, keys[:, :seen], out=scores)
                column = pos + start - 16 * block0
                state.run_alone(thread, k.J_SOFTMAX, m * group, seen, address_of(scores), column, group)
                out[start : start + m, columns] = (scores @ values[:seen])[:, :hd].reshape(m, group * hd)

        for head in range(c.n_kv_heads):
            state.run(k.J_KV, head, layer, blocks, block0, address_of(keys), address_of(values))
            state.spread(partial(some_queries, head))

    def feed_forward(self, x: Array, xb: Array, layer: LayerWeights, marks: list[float]) -> None:
        """``x += FFN(xb)``, dense or by experts; notes the time between up and down."""
        c = self.config
        if not c.is_moe:
            self.product(xb, (layer.w1, self.gated[1]), (layer.w3, self.up[1]))
            self.gate(self.gated[0], self.up[0])
            marks.append(time.perf_counter())
            self.product(self.gated[1], (layer.w2, self.added))
            x += self.added
            return
        assert layer.moegate is not None
        scores = np.empty((self.n, c.n_experts), np.float32)
        self.product(xb, (layer.moegate, scores))
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
            self.product(rows, (layer.w1[expert], gated[1]), (layer.w3[expert], up[1]))
            self.gate(gated[0], up[0])
            hidden.append((expert, tokens, shares[tokens, ranks], gated[1]))
        marks.append(time.perf_counter())
        for expert, tokens, share, rows in hidden:
            down = np.empty((len(tokens), c.dim), np.float32)
            self.product(rows, (layer.w2[expert], down))
            x[tokens] += share[:, None] * down


def _padded(rows: int, cols: int) -> tuple[Array, Array]:
    """Return a flat buffer padded to sixteen numbers, and its view as (rows, cols)."""
    flat = np.zeros((rows * cols + 15) // 16 * 16, dtype=np.float32)
    return flat, flat[: rows * cols].reshape(rows, cols)


def prefill_batch(
    state: CpuState,
    weights: Weights,
    ids: NDArray[np.int64],
    pos: int,
    logits: Array,
    should_stop: Callable[[], bool] | None = None,
) -> list[float]:
    """Run the tokens `ids`, the first of which stands at `pos`, through the model.

    Parameters
    ----------
    logits : float32 (m, vocab_size)
        Receives the logits of the last m tokens; m may be 0.
    should_stop
        Asked before each tile of weights.

    Returns
    -------
    list of float
        Times (``time.perf_counter``) that delimit the kernels of the engine's batch rows.

    Raises
    ------
    PromptStopped
        If `should_stop` said so.
    """
    with one_blas_thread():
        return _prefill(_Batch(state, weights, len(ids), should_stop), ids, pos, logits)


def _prefill(batch: _Batch, ids: NDArray[np.int64], pos: int, logits: Array) -> list[float]:
    state, weights, c, n = batch.state, batch.weights, batch.config, batch.n
    marks = [time.perf_counter()]
    embedded = np.ascontiguousarray(weights.embed[ids])
    x = np.empty((n, c.dim), np.float32)
    state.run(k.J_DECODE, n, c.dim, int(state.context[k.DTYPE]), address_of(embedded), address_of(x))
    table = rope_table(c, np.arange(pos, pos + n))
    xb, qkv = np.empty_like(x), np.empty((n, c.q_dim + 2 * c.kv_dim), np.float32)
    mixed = np.empty((n, c.q_dim), np.float32)
    marks.append(time.perf_counter())
    for index, layer in enumerate(weights.layers):
        batch.norm(x, layer.attn_norm, xb)
        q, key, value = np.split(qkv, [c.q_dim, c.q_dim + c.kv_dim], axis=1)
        batch.product(xb, (layer.wq, q), (layer.wk, key), (layer.wv, value))
        state.run(k.J_ROPE, n, address_of(qkv), state.layer_address(index), pos, address_of(table))
        marks.append(time.perf_counter())
        batch.attention(qkv, index, pos, mixed)
        marks.append(time.perf_counter())
        batch.product(mixed, (layer.wo, batch.added))
        x += batch.added
        marks.append(time.perf_counter())
        if layer.mlp_norm is not None and not c.is_parallel:
            batch.norm(x, layer.mlp_norm, xb)
        batch.feed_forward(x, xb, layer, marks)
        marks.append(time.perf_counter())
    if len(logits):
        last = np.ascontiguousarray(x[n - len(logits) :])
        normed = np.empty_like(last)
        batch.norm(last, weights.final_norm, normed)
        batch.product(normed, (weights.output, logits))
    marks.append(time.perf_counter())
    return marks
