"""Prompt processing: a batch of tokens through the layers, matrix products by cuBLAS.

Quantised weights are decoded into a half-precision scratch matrix just before their product; the rest of a layer is a
handful of our own kernels (kernels/prefill.cu) and a tiled causal attention (kernels/attention_prefill.cu).
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel, Stage
from calmnb.engine.cuda_device import Launch
from calmnb.engine.cuda_weights import Layout
from calmnb.kernels import CompiledKernel, KernelSpec

__all__ = [
    "CHUNK",
    "PrefillArgs",
    "PrefillGpu",
    "can_prefill",
    "prefill_layout",
    "prefill_specs",
    "run_logits",
    "run_prefill",
    "run_resume",
]

Compile = Callable[[KernelSpec], CompiledKernel]

#: Tokens computed together. More amortise the weights' decoding better and take more memory.
CHUNK = 512
#: Rows of the output matrix decoded at a time when all logits are asked for.
_OUTPUT_ROWS = 16384

_FORMATS = {"fp16": 0, "fp8": 1, "gf4": 2}
_LOG2_E = math.log2(math.e)


class _QkvArgs(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("qkv", "bias", "rope", "q", "k", "v")],
        *[(n, ctypes.c_int32) for n in ("q_dim", "kv_dim", "head_dim", "rotary_dim", "seq_len", "pos0")],
        *[(n, ctypes.c_float) for n in ("clip", "q_scale")],
    ]


class _AttentionArgs(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("q", "k", "v", "out")],
        *[(n, ctypes.c_int32) for n in ("n", "pos0", "n_heads", "heads_per_kv", "seq_len", "window")],
    ]


class PrefillGpu(Protocol):
    """What prompt processing asks of a device beyond a decode step."""

    sm_count: int

    def launch(self, launches: list[Launch]) -> None:
        """Queue kernels."""
        ...

    def to_host(self, target: NDArray[np.uint8], address: int) -> None:
        """Copy device bytes to the host in stream order."""
        ...

    def wait(self) -> None:
        """Block until everything queued is done."""
        ...

    def matmul(self, out: int, x: int, weights: int, rows: int, outputs: int, inputs: int, *, add: bool) -> None:
        """``out[rows, outputs] (+)= x[rows, inputs] @ weights[outputs, inputs].T``: half in, float out."""
        ...


@dataclass(frozen=True)
class PrefillArgs:
    """Addresses and settings that stay the same from batch to batch."""

    config: ModelConfig
    kv_dtype: str
    seq_len: int
    weights: Mapping[str, int]
    work: Mapping[str, int]
    scratch: Mapping[str, int]
    cache: int
    half_cache: int


def can_prefill(config: ModelConfig) -> bool:
    """Whether batches are worth it here: experts are chosen per token, so MoE models go step by step."""
    return not config.is_moe and config.head_dim % 2 == 0 and config.head_dim <= 256


def prefill_layout(config: ModelConfig, chunk: int = CHUNK) -> Layout:
    """Scratch memory for batches of up to `chunk` tokens."""
    c, n = config, chunk
    largest = max(
        (c.q_dim + 2 * c.kv_dim) * c.dim, c.dim * c.q_dim, c.hidden_dim * c.dim, min(_OUTPUT_ROWS, c.vocab_size) * c.dim
    )  # fmt: skip
    return Layout(
        [
            ("tokens", n * 4),
            ("x", n * c.dim * 4),
            ("normed", n * c.dim * 2),
            ("rope", n * max(c.rotary_dim // 2, 1) * 8),
            ("qkv", n * (c.q_dim + 2 * c.kv_dim) * 4),
            ("q", n * c.q_dim * 2),
            ("mixed", n * c.q_dim * 2),
            ("gate", n * max(c.hidden_dim, c.dim) * 4),  # and what w2 makes of scaled rows
            ("up", n * c.hidden_dim * 4),
            ("hidden", n * c.hidden_dim * 2),
            ("tile", n * min(_OUTPUT_ROWS, c.vocab_size) * 4),
            ("scale", n * 4),
            ("overflow", 4),
            ("decoded", 0 if c.dtype == "fp16" else largest * 2),
        ]
    )


def run_prefill(
    gpu: PrefillGpu,
    compile_kernel: Compile,
    a: PrefillArgs,
    n: int,
    pos: int,
    done: Callable[[Kernel], None] = lambda kernel: None,
    *,
    scaled: bool = False,
) -> None:
    """Compute the `n` tokens in ``scratch["tokens"]``, the first of which stands at `pos`.

    Fills the KV cache; leaves the residual rows in ``scratch["x"]``. `done` is called when the work of a stage is queued.
    Products of gate and up beyond a half make ``scratch["overflow"]`` nonzero, and all of it worthless: then run it again
    with `scaled`, where each row has its own power of two.
    """
    c, s, w = a.config, a.scratch, a.weights
    fmt = (("FORMAT", _FORMATS[c.dtype]), ("KV_FP8", int(a.kv_dtype == "fp8")))

    def run(name: str, grid: tuple[int, int], block: int, *args: Any, shared: int = 0, spec: KernelSpec | None = None) -> None:
        kernel = compile_kernel(spec or KernelSpec(name, "prefill.cu", fmt))
        gpu.launch([Launch(kernel, grid, block, shared, args, dependent=False)])

    def matmul(out: int, x: int, region: str, outputs: int, inputs: int, *, add: bool = False) -> None:
        gpu.matmul(out, x, decoded(w[region], outputs * inputs), n, outputs, inputs, add=add)

    def stage(name: Stage, layer: int, kernel: str) -> None:
        done(Kernel(name, layer, kernel))

    def decoded(address: int, count: int) -> int:
        if c.dtype == "fp16":
            return address
        run("dequantise", (gpu.sm_count * 16, 1), 256, _u64(address), _u64(s["decoded"]), _i64(count))
        return s["decoded"]

    def norm(region: str) -> None:
        run(
            "norm_rows", (n, 1), 256, _u64(s["x"]), _u64(w[region]), _u64(s["normed"]), _i32(c.dim), _f32(c.norm_eps),
            _i32(int(c.norm_type != "rmsnorm")),
        )  # fmt: skip

    half_rotary = c.rotary_dim // 2
    run("embed_rows", (n, 1), 256, _u64(w["embed"]), _u64(s["tokens"]), _u64(s["x"]), _i32(c.dim))
    if half_rotary:
        run(
            "angles_rows", (n, 1), 128, _u64(a.work["frequencies"]), _u64(s["rope"]), _i32(pos), _i32(half_rotary),
            _f32(c.rope_frequencies()[1]),
        )  # fmt: skip
    stage("embed", -1, "embed_rows")
    attention = KernelSpec(
        "attention_prefill", "attention_prefill.cu", (("HEAD_DIM", c.head_dim), ("KV_FP8", int(a.kv_dtype == "fp8")))
    )
    padded = -(-c.head_dim // 16) * 16
    tile_bytes = 2 * (32 if padded > 128 else 64) * (padded + 8) * 2
    for i in range(c.n_layers):
        keys = a.cache + 2 * i * a.half_cache
        norm(f"{i}.attn_norm")
        matmul(s["qkv"], s["normed"], f"{i}.wqkv", c.q_dim + 2 * c.kv_dim, c.dim)
        run(
            "qkv_rows", (n, 1), 256,
            _QkvArgs(
                qkv=s["qkv"], bias=w.get(f"{i}.bias", 0), rope=s["rope"], q=s["q"], k=keys, v=keys + a.half_cache,
                q_dim=c.q_dim, kv_dim=c.kv_dim, head_dim=c.head_dim, rotary_dim=c.rotary_dim, seq_len=a.seq_len,
                pos0=pos, clip=c.qkv_clip,
                q_scale=_LOG2_E / math.sqrt(c.head_dim),
            ),
        )  # fmt: skip
        stage("matmul_qkv", i, "cublas_qkv")
        run(
            "attention_prefill", (-(-n // 64), c.n_heads), 128,
            _AttentionArgs(
                q=s["q"], k=keys, v=keys + a.half_cache, out=s["mixed"], n=n, pos0=pos, n_heads=c.n_heads,
                heads_per_kv=c.n_heads // c.n_kv_heads, seq_len=a.seq_len, window=c.sliding_window,
            ),
            shared=tile_bytes, spec=attention,
        )  # fmt: skip
        stage("attention", i, f"attention_prefill_{a.kv_dtype}")
        matmul(s["x"], s["mixed"], f"{i}.wo", c.dim, c.q_dim, add=True)
        stage("matmul_attn", i, "cublas_out")
        if not c.is_parallel:  # a parallel block's FFN reads the attention's norm
            norm(f"{i}.mlp_norm")
        matmul(s["gate"], s["normed"], f"{i}.w1", c.hidden_dim, c.dim)
        matmul(s["up"], s["normed"], f"{i}.w3", c.hidden_dim, c.dim)
        sizes = (_i32(c.hidden_dim), _i32(int(c.act_type == "gelu")))
        rows = (_u64(s["gate"]), _u64(s["up"]), _u64(s["hidden"]))
        if scaled:
            run("scaled_rows", (n, 1), 256, *rows, _u64(s["scale"]), *sizes)
        else:
            run("gated_rows", (-(-c.hidden_dim // 256), n), 256, *rows, *sizes, _u64(s["overflow"]))
        stage("matmul_ffn_up", i, "cublas_gateup")
        if scaled:
            matmul(s["gate"], s["hidden"], f"{i}.w2", c.dim, c.hidden_dim)
            run("add_rows", (n, 1), 256, _u64(s["x"]), _u64(s["gate"]), _u64(s["scale"]), _i32(c.dim))
        else:
            matmul(s["x"], s["hidden"], f"{i}.w2", c.dim, c.hidden_dim, add=True)
        stage("matmul_ffn_down", i, "cublas_down")


def run_resume(gpu: PrefillGpu, compile_kernel: Compile, a: PrefillArgs, row: int, blocks: int) -> None:
    """Put residual row `row` where the logits kernel of a decode step finds it."""
    c = a.config
    fmt = (("FORMAT", _FORMATS[c.dtype]), ("KV_FP8", int(a.kv_dtype == "fp8")))
    rms = c.norm_type == "rmsnorm"
    args = (
        _u64(a.scratch["x"] + 4 * row * c.dim),
        _u64(a.weights["final_norm"] if rms else 0),
        _u64(a.work["x32"]),
        _u64(a.work["x16"]),
        _u64(a.work["part"]),
        _i32(c.dim),
    )
    gpu.launch(
        [Launch(compile_kernel(KernelSpec("resume_row", "prefill.cu", fmt)), (blocks, 1), 256, 0, args, dependent=False)]
    )


_u64, _i64, _i32, _f32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def run_logits(gpu: PrefillGpu, compile_kernel: Compile, a: PrefillArgs, out: NDArray[np.float32]) -> None:
    """Logits of every residual row, ``out`` (n, vocab_size): the output matrix in pieces."""
    c, s, n = a.config, a.scratch, len(out)
    fmt = (("FORMAT", _FORMATS[c.dtype]), ("KV_FP8", int(a.kv_dtype == "fp8")))
    args = (
        _u64(s["x"]), _u64(a.weights["final_norm"]), _u64(s["normed"]), _i32(c.dim), _f32(c.norm_eps),
        _i32(int(c.norm_type != "rmsnorm")),
    )  # fmt: skip
    gpu.launch([Launch(compile_kernel(KernelSpec("norm_rows", "prefill.cu", fmt)), (n, 1), 256, 0, args, dependent=False)])
    matrix = a.weights["output" if "output" in a.weights else "embed"]
    bits = {"fp16": 16, "fp8": 8, "gf4": 4}[c.dtype]
    for first in range(0, c.vocab_size, _OUTPUT_ROWS):
        rows = min(_OUTPUT_ROWS, c.vocab_size - first)
        address = matrix + first * c.dim * bits // 8
        if c.dtype != "fp16":
            piece = (_u64(address), _u64(s["decoded"]), _i64(rows * c.dim))
            kernel = compile_kernel(KernelSpec("dequantise", "prefill.cu", fmt))
            gpu.launch([Launch(kernel, (gpu.sm_count * 16, 1), 256, 0, piece, dependent=False)])
            address = s["decoded"]
        gpu.matmul(s["tile"], s["normed"], address, n, rows, c.dim, add=False)
        tile = np.empty((n, rows), np.float32)
        gpu.to_host(tile.view(np.uint8).reshape(-1), s["tile"])
        gpu.wait()
        out[:, first : first + rows] = tile


def prefill_specs() -> list[KernelSpec]:
    """Specialisations worth compiling in a test; a file is compiled whole, so one entry stands for those beside it."""
    formats = itertools.product((0, 1, 2), (0, 1))
    specs = [KernelSpec("qkv_rows", "prefill.cu", (("FORMAT", fmt), ("KV_FP8", fp8))) for fmt, fp8 in formats]
    names = ("embed_rows", "angles_rows", "norm_rows", "gated_rows", "scaled_rows", "add_rows", "dequantise", "resume_row")
    specs += [KernelSpec(name, "prefill.cu", (("FORMAT", 2), ("KV_FP8", 1))) for name in names]
    for head_dim, fp8 in itertools.product((16, 64, 100, 128, 256), (0, 1)):
        specs.append(KernelSpec("attention_prefill", "attention_prefill.cu", (("HEAD_DIM", head_dim), ("KV_FP8", fp8))))
    return specs
