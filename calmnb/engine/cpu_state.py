"""Memory and threads of the CPU engine: buffers, KV cache, the context the kernels read, and the workers that share it."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calmnb.config import DTYPE_BITS, KvDtype
from calmnb.engine import cpu_kernels as k
from calmnb.engine.base import Weights
from calmnb.engine.cpu_attention import CHUNK
from calmnb.errors import ConfigError

__all__ = ["CpuState", "default_threads"]

_STORAGE = {"fp16": 0, "fp8": 1, "gf4": 2}
#: The clock of ``time.perf_counter``: CLOCK_MONOTONIC on Linux, CLOCK_UPTIME_RAW on macOS.
_CLOCK = 8 if sys.platform == "darwin" else getattr(time, "CLOCK_MONOTONIC", 1)


def default_threads() -> int:
    """Physical cores that this process may use: a second thread of a core has no bandwidth of its own."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(usable, psutil.cpu_count(logical=False) or usable)
    try:  # a container's quota, cgroup v2
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            threads = min(threads, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, threads)


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes that start on a cache line, with two lines to spare behind them. Pages are touched when first written."""
    raw = np.zeros(nbytes + 192, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def address_of(array: NDArray[np.generic] | None) -> int:
    """Address of a contiguous array's first element; 0 for None."""
    return 0 if array is None else int(array.ctypes.data)


def _pad16(n: int) -> int:
    return (n + 15) // 16 * 16


class CpuState:
    """Everything the kernels touch, and the worker threads.

    Parameters
    ----------
    weights, seq_len, kv_dtype
        As given to the engine.
    threads : int
        Threads that work on a job, the caller's own included.
    entry
        The compiled `calmnb.engine.cpu_kernels.enter`.
    """

    def __init__(
        self, weights: Weights, seq_len: int, kv_dtype: KvDtype, threads: int, entry: Callable[[int, int], None]
    ) -> None:
        self.threads = threads
        self._entry = entry
        self._keep: list[object] = []
        self._pid = os.getpid()
        self.context = np.zeros(k.N_FIELDS, dtype=np.int64)
        self._floats = self.context.view(np.float64)
        self._fill(weights, seq_len, kv_dtype)
        sync = self.buffer(k.SYNC_BYTES)
        self.context[k.SYNC], self.context[k.THREADS] = address_of(sync), threads
        self._address = address_of(self.context)
        self.run(k.J_INIT)
        self._workers = [
            threading.Thread(target=entry, args=(self._address, t), name=f"calmnb-cpu-{t}", daemon=True)
            for t in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        # Threads of batches work one by one on tiles of their own, each through a context of its own.
        self._solo = [self._solo_context(t) for t in range(threads)]
        self._pool: ThreadPoolExecutor | None = None
        # The workers only know addresses: this keeps the memory alive until they have returned.
        self.stop = weakref.finalize(self, _stop, entry, self.context, sync, self._workers, self._keep)

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Return aligned zeroed bytes that live as long as the threads."""
        made = aligned(nbytes)
        self._keep.append(made)
        return made

    def floats(self, count: int) -> NDArray[np.float32]:
        """Return an aligned zeroed float32 buffer that lives as long as the threads."""
        return self.buffer(4 * count).view(np.float32)[:count]

    def run(self, job: int, *arguments: int) -> None:
        """Run one job on all threads and wait for it."""
        if os.getpid() != self._pid:
            raise ConfigError(
                "this engine belongs to the process that opened it, and its threads stayed there; open the model anew"
            )
        self.context[k.JOB] = job
        for i, argument in enumerate(arguments):
            self.context[k.A0 + i] = argument
        self._entry(self._address, 0)

    def run_alone(self, thread: int, job: int, *arguments: int) -> None:
        """Run one job on the calling thread only, as thread number `thread` of `spread`."""
        context = self._solo[thread]
        context[k.JOB] = job
        context[k.A0 : k.A0 + len(arguments)] = arguments
        self._entry(address_of(context), 0)

    def spread(self, task: Callable[[int], None]) -> None:
        """Call ``task(thread)`` on every thread and wait for all of them, also when interrupted."""
        if self._pool is None and self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="calmnb-batch")
        futures = [self._pool.submit(task, t) for t in range(1, self.threads)] if self._pool else []
        try:
            task(0)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End all threads."""
        if self._pool is not None:
            self._pool.shutdown()
        self.stop()

    def _solo_context(self, thread: int) -> NDArray[np.int64]:
        context = self.context.copy()
        context[k.THREADS] = 1
        context[k.PRIVATE] += thread * context[k.PRIVATE_SIZE]
        return context

    def layer_address(self, index: int) -> int:
        """Address of a layer's row in the layer table."""
        return int(self.context[k.LAYERS]) + 8 * k.N_LAYER_FIELDS * index

    def _fill(self, weights: Weights, seq_len: int, kv_dtype: KvDtype) -> None:
        c, context = weights.config, self.context
        self._check_shapes(weights)
        active = c.n_experts_active if c.is_moe else 1
        wide, hd_pad = _pad16(max(c.dim, c.q_dim, c.hidden_dim)), _pad16(c.head_dim)
        blocks, stat_stride = (seq_len + 31) // 32 * 2, _pad16((seq_len + CHUNK - 1) // CHUNK) + 16
        for index, value in (
            (k.CLOCK, _CLOCK), (k.DTYPE, _STORAGE[c.dtype]), (k.KV_DTYPE, _STORAGE[kv_dtype]), (k.DIM, c.dim),
            (k.HIDDEN, c.hidden_dim), (k.HEAD_DIM, c.head_dim), (k.N_LAYERS, c.n_layers), (k.N_HEADS, c.n_heads),
            (k.N_KV_HEADS, c.n_kv_heads), (k.VOCAB, c.vocab_size), (k.SEQ_LEN, seq_len), (k.ROTARY_DIM, c.rotary_dim),
            (k.N_EXPERTS, c.n_experts), (k.N_ACTIVE, c.n_experts_active), (k.WINDOW, c.sliding_window),
            (k.LAYER_NORM, int(c.norm_type != "rmsnorm")), (k.PARALLEL, int(c.is_parallel)), (k.ACT, int(c.act_type == "gelu")),
            (k.STAT_STRIDE, stat_stride), (k.KV_BLOCKS, blocks),
        ):  # fmt: skip
            context[index] = value
        freqs, factor = c.rope_frequencies()
        self._floats[k.EPS], self._floats[k.CLIP], self._floats[k.ROPE_FACTOR] = c.norm_eps, c.qkv_clip, factor
        turn = np.concatenate([np.cos(freqs), np.sin(freqs)]).astype(np.float32)
        context[k.FREQS], context[k.TURN] = self._keep_array(freqs), self._keep_array(turn)

        self.logits = self.floats(c.vocab_size)
        for index, count in (
            (k.X, c.dim), (k.QKV, c.q_dim + 2 * c.kv_dim), (k.HIDDEN_A, active * _pad16(c.hidden_dim)),
            (k.HIDDEN_B, active * _pad16(c.hidden_dim)), (k.ROWS_OUT, c.dim), (k.ROPE, max(c.rotary_dim, 1)),
            (k.MAXIMA, c.n_heads * stat_stride), (k.SUMS, c.n_heads * stat_stride), (k.MIXED, c.n_heads * stat_stride * hd_pad),
        ):  # fmt: skip
            context[index] = address_of(self.floats(count))
        context[k.LOGITS] = address_of(self.logits)
        scratch = _pad16(max(4 * CHUNK + 4 * hd_pad, stat_stride + 16, _pad16(c.n_experts) + 2 * _pad16(active) + 16))
        planes = 9 * (_pad16((wide + 7) // 8) + 16)
        private = 4 * (scratch + wide + planes + wide + 32)
        context[k.SCRATCH_SIZE], context[k.PRIVATE_SIZE] = 4 * scratch, private
        context[k.PRIVATE] = address_of(self.buffer(private * self.threads))

        itemsize = DTYPE_BITS[kv_dtype] // 8
        key_bytes, value_bytes = (
            c.n_kv_heads * blocks * 16 * c.head_dim * itemsize,
            c.n_kv_heads * blocks * 16 * hd_pad * itemsize,
        )
        self.kv_cache = self.buffer(c.n_layers * (key_bytes + value_bytes))
        table = np.zeros((c.n_layers, k.N_LAYER_FIELDS), dtype=np.int64)
        for index, w in enumerate(weights.layers):
            keys = address_of(self.kv_cache) + index * (key_bytes + value_bytes)
            table[index] = (
                *map(address_of, (w.attn_norm, w.wq, w.wk, w.wv, w.wo, w.qkv_bias, w.mlp_norm, w.moegate, w.w1, w.w2, w.w3)),
                keys, keys + key_bytes,
            )  # fmt: skip
        context[k.LAYERS] = self._keep_array(table)
        context[k.EMBED], context[k.OUTPUT] = address_of(weights.embed), address_of(weights.output)
        context[k.FINAL_NORM] = address_of(weights.final_norm)
        self._keep.append(weights)

    def _keep_array(self, array: NDArray[np.generic]) -> int:
        self._keep.append(array)
        return address_of(array)

    def _check_shapes(self, weights: Weights) -> None:
        """Refuse what the kernels would read out of bounds: they see addresses only."""
        c = weights.config
        experts = (c.n_experts,) if c.is_moe else ()
        expected: list[tuple[str, NDArray[np.generic] | None, tuple[int, ...]]] = [
            ("embed", weights.embed, (c.vocab_size, c.dim)),
            ("output", weights.output, (c.vocab_size, c.dim)),
            ("final_norm", weights.final_norm, (c.dim,)),
        ]
        if len(weights.layers) != c.n_layers:
            raise ConfigError(f"the model has {len(weights.layers)} layers; its configuration says {c.n_layers}")
        for i, w in enumerate(weights.layers):
            expected += [
                (f"layer {i} attn_norm", w.attn_norm, (c.dim,)),
                (f"layer {i} wq", w.wq, (c.q_dim, c.dim)),
                (f"layer {i} wk", w.wk, (c.kv_dim, c.dim)),
                (f"layer {i} wv", w.wv, (c.kv_dim, c.dim)),
                (f"layer {i} wo", w.wo, (c.dim, c.q_dim)),
                (f"layer {i} w1", w.w1, (*experts, c.hidden_dim, c.dim)),
                (f"layer {i} w2", w.w2, (*experts, c.dim, c.hidden_dim)),
                (f"layer {i} w3", w.w3, (*experts, c.hidden_dim, c.dim)),
            ]
            if w.qkv_bias is not None:
                expected.append((f"layer {i} qkv_bias", w.qkv_bias, (c.q_dim + 2 * c.kv_dim,)))
            if not c.is_parallel:
                expected.append((f"layer {i} mlp_norm", w.mlp_norm, (c.dim,)))
            if c.is_moe:
                expected.append((f"layer {i} moegate", w.moegate, (c.n_experts, c.dim)))
        stored = {"fp16": np.float16, "fp8": np.uint8, "gf4": np.uint32}[c.dtype]
        for name, array, shape in expected:
            dtype = np.dtype(np.float32 if len(shape) == 1 else stored)
            if len(shape) > 1 and c.dtype == "gf4":
                shape = (*shape[:-1], shape[-1] // 8)
            if array is None or array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                found = "nothing" if array is None else f"{array.dtype} {array.shape}"
                raise ConfigError(f"{name}: found {found}; expected contiguous {dtype} {shape}")
        if c.dtype == "gf4" and any(n % 8 for n in (c.dim, c.q_dim, c.hidden_dim)):
            raise ConfigError(
                f"gf4 needs rows of a multiple of 8 weights; found dim {c.dim}, q_dim {c.q_dim}, hidden {c.hidden_dim}"
            )


def _stop(
    entry: Callable[[int, int], None],
    context: NDArray[np.int64],
    sync: NDArray[np.uint8],
    workers: list[threading.Thread],
    keep: list[object],
) -> None:
    """Let the workers return, then let go of the memory they used."""
    if workers:
        sync.view(np.int64)[k.S_STOP // 8] = 1
        context[k.JOB] = k.J_STEP  # an engine that never ran still holds J_INIT, which wakes nobody
        entry(address_of(context), 0)
        for worker in workers:
            worker.join()
    keep.clear()
