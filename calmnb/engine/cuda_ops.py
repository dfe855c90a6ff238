"""The kernels of the CUDA engine that read no weight matrix: their argument structures, geometry and specifications.

Nothing here needs a GPU: sizes in, numbers out, so that CI checks every launch. The weight kernels have the same in
`cuda_matvec`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calmnb.config import DTYPE_BITS, ModelConfig
from calmnb.errors import UnsupportedError
from calmnb.kernels import KernelSpec
from calmnb.sampler import Sampling

__all__ = [
    "HOST_RING",
    "SAMPLE_BLOCKS",
    "SAMPLE_SCRATCH_BYTES",
    "SAMPLE_THREADS",
    "STATE_WORDS",
    "AttentionArgs",
    "AttentionPlan",
    "CollectArgs",
    "EmbedArgs",
    "HostToken",
    "SampleArgs",
    "SampleParams",
    "SamplePlan",
    "SinkArgs",
    "all_specs",
    "collect_spec",
    "embed_grid",
    "embed_spec",
    "history_row",
    "plan_attention",
    "plan_sampling",
    "sample_params",
    "sample_specs",
    "sinks_spec",
    "state_words",
]

#: int32 words of the step state in device memory (kernels/common.cuh, kernels/state.cuh).
STATE_WORDS = 16
#: Most blocks that choose a token (`MOST_BLOCKS` of kernels/sample.cuh).
SAMPLE_BLOCKS = 64
#: Threads of each.
SAMPLE_THREADS = 256
#: `SampleScratch` of kernels/sample.cuh: histogram, then 28 bytes a block, then counters.
SAMPLE_SCRATCH_BYTES = 2048 * 8 + SAMPLE_BLOCKS * 28 + 16
#: `DrawShared` of kernels/sample_draw.cu, and the logits that its list holds (`LIST`).
_DRAW_SHARED, _DRAW_LIST = 21472, 4096
#: Tokens the ring in pinned host memory holds; the engine never runs further ahead.
HOST_RING = 256

#: Shared memory of a multiprocessor that long attention leaves to one block of a weight kernel (84 KiB, its own static
#: part and reserves). Where it did not, the next kernels piled up two to a multiprocessor: 15 instead of 8 us a layer for
#: a context of 4,000 on Llama-3.2-1B, fp16 (H200).
_BESIDE = 92 << 10

_FORMATS = {"fp16": 0, "fp8": 1, "gf4": 2}
_POINTER, _INT, _FLOAT, _LONG = ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` of kernels/attention.cu."""

    _fields_ = [
        *[(n, _POINTER) for n in ("q", "k", "v", "out", "partial", "partial_ml", "counters", "state", "stamp")],
        *[
            (n, _INT)
            for n in (
                "seq_len", "heads_per_kv", "groups_per_kv", "window", "single", "min_chunk", "splits", "groups", "hold_ns"
            )
        ],
    ]  # fmt: skip


class EmbedArgs(ctypes.Structure):
    """`EmbedArgs` of kernels/embed.cu."""

    _fields_ = [
        *[(n, _POINTER) for n in ("embedding", "g_next", "frequencies", "x32", "x16", "part", "rope", "state", "stamp")],
        ("dim", _INT),
        ("half_rotary", _INT),
        ("factor", _FLOAT),
    ]


class SampleParams(ctypes.Structure):
    """`SampleParams` of kernels/sample.cuh: how tokens are chosen; lives in device memory."""

    _fields_ = [
        ("temperature", _FLOAT),
        ("penalty", _FLOAT),
        ("min_p_offset", _FLOAT),
        ("top_k", _INT),
        ("top_p", ctypes.c_double),
        ("n_ids", _INT),
        ("penalty_range", _INT),
        ("rng", ctypes.c_uint64),
    ]


class HostToken(ctypes.Structure):
    """`HostToken` of kernels/sample.cuh: a sampled token on its way to the host."""

    _fields_ = [("token", _INT), ("logprob", _FLOAT), ("pos", _INT), ("step", _INT)]


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of kernels/sample.cuh."""

    _fields_ = [
        *[
            (n, _POINTER)
            for n in ("logits", "best", "adjusted", "candidates", "scratch", "params", "state", "history", "host_ring")
        ],
        *[(n, _INT) for n in ("vocab", "n_best", "history_cap", "host_cap", "rehearse")],
        ("stamp", _POINTER),
    ]


class SinkArgs(ctypes.Structure):
    """`SinkArgs` of kernels/cache.cu."""

    _fields_ = [
        *[(n, _POINTER) for n in ("cache", "frequencies", "state", "stamp")],
        ("layer_bytes", _LONG),
        ("head_bytes", _LONG),
        *[(n, _INT) for n in ("head_dim", "half_rotary", "fp8")],
    ]


class CollectArgs(ctypes.Structure):
    """`CollectArgs` of kernels/cache.cu."""

    _fields_ = [*[(n, _POINTER) for n in ("stamps", "ring", "serial", "state")], *[(n, _INT) for n in ("n", "rows", "stride")]]


def sample_params(s: Sampling, rng_state: int, n_ids: int) -> SampleParams:
    """Sampling settings as the kernels read them; the arithmetic is the sampler's, in float32."""
    t = np.float32(s.temperature)
    offset = float(np.float32(math.log(s.min_p)) * t) if s.min_p > 0 else -math.inf
    return SampleParams(
        temperature=float(t),
        penalty=s.repetition_penalty,
        min_p_offset=offset,
        top_k=min(s.top_k, n_ids),
        top_p=s.top_p,
        n_ids=n_ids,
        penalty_range=s.repetition_range if s.repetition_penalty != 1.0 else 0,
        rng=rng_state,
    )


def state_words(token: int, pos: int, seq_len: int, *, step: int = 0) -> list[int]:
    """Step state for `token` at `pos`: what `advance_state` in kernels/state.cuh computes on the device.

    Examples
    --------
    >>> state_words(5, 9, 8)[:7]
    [5, 9, 3, 8, 2, 0, 8]
    """
    sinks = 2 if pos >= seq_len else 0
    slot = sinks + (pos - sinks) % (seq_len - sinks)
    words = [token, pos, slot, min(pos + 1, seq_len), sinks, step, seq_len]
    return words + [0] * (STATE_WORDS - len(words))


def history_row(history: Sequence[int], pos: int, size: int) -> NDArray[np.int32]:
    """Lay a sequence that ends at `pos` out as the sampling kernel reads it: position p in place p modulo `size`.

    Examples
    --------
    >>> history_row([10, 11, 12, 13, 14, 15], 5, 4).tolist()
    [14, 15, 12, 13]
    """
    row = np.zeros(size, np.int32)
    known = list(history)[-min(len(history), size) :]
    for back, token in enumerate(reversed(known)):
        if pos - back >= 0:
            row[(pos - back) % size] = token
    return row


@dataclass(frozen=True)
class AttentionPlan:
    """Launch of the attention kernel.

    Attributes
    ----------
    spec : KernelSpec
    grid : int
        Blocks: splits x groups, and idle ones up to one a multiprocessor.
    splits : int
        Blocks that share the context of a head group.
    groups : int
        Head groups.
    hold_ns : int
        How long an idle block keeps its place after the kernel before has ended.
    block : int
    shared : int
        Dynamic shared memory, bytes.
    heads : int
        Query heads that share a read of their kv head's cache.
    groups_per_kv : int
        Head groups of one kv head.
    single : int
        Up to so many positions, one block takes them all.
    min_chunk : int
        Beyond that, the fewest positions a block takes.
    short_max : int
        Up to so many visible positions the short form of the kernel serves better.
    """

    spec: KernelSpec
    grid: int
    splits: int
    groups: int
    hold_ns: int
    block: int
    shared: int
    heads: int
    groups_per_kv: int
    single: int
    min_chunk: int
    short_max: int


def plan_attention(
    config: ModelConfig,
    kv_dtype: str,
    sm_count: int,
    *,
    shared_per_sm: int = 228 << 10,
    warps: int = 0,
    budget: int = 0,
    blocks_per_sm: float = 1.0,
    single: int = 0,
    min_chunk: int = 16,
    short: bool = False,
    short_max: int = -1,
    fill: bool = False,
    hold_ns: int = 1200,
    least_shared: int = -1,
) -> AttentionPlan:
    """Geometry of attention for one model on a GPU of `sm_count` multiprocessors.

    There are two forms, in two graphs. The long one shares the context out over about one block a multiprocessor, which
    costs a round of adding their results; the short one is a block a head group.

    The grid is fixed: about `blocks_per_sm` blocks a multiprocessor, shared out over the head groups. With `fill` (dependent
    launch), idle blocks make it one block on every multiprocessor, in both forms; they stay for `hold_ns` once the kernel
    before has ended, so that the next kernel's blocks land one to a multiprocessor (H200, Mistral-7B gf4 with an E5M2 cache:
    1,180 instead of 1,641 us a step). For the same reason a block takes so much shared memory, `least_shared`, that two of
    them never share a multiprocessor, but that one of a weight kernel fits beside it. `warps`, `budget` (shared memory of the
    ring, bytes), `short_max` and `least_shared` (-1) have usual values.

    Raises
    ------
    UnsupportedError
        If a row of the cache cannot be copied in pieces of 4, 8 or 16 bytes, or is longer than 256 channels.
    """
    item = DTYPE_BITS[kv_dtype] // 8
    row = config.head_dim * item
    piece = next((p for p in (16, 8, 4) if row % p == 0), 0)
    if not piece or config.head_dim > 256:
        raise UnsupportedError(
            f"head_dim {config.head_dim} with a {kv_dtype} KV cache makes rows of {row} bytes; the CUDA engine takes multiples "
            "of 4 bytes and up to 256 channels. Use kv_dtype='fp16', or device='cpu'"
        )
    per_kv = config.n_heads // config.n_kv_heads
    groups = -(-per_kv // 8)
    heads = -(-per_kv // groups)
    y = config.n_kv_heads * groups
    splits = max(1, int(sm_count * blocks_per_sm) // y)
    if short_max < 0:
        short_max = min(16 * splits, (128 << 10) // (2 * row))
    if short:
        splits, single = 1, 1 << 30
    large = shared_per_sm >= 160 << 10
    warps = warps or (8 if large and not short else 4)
    budget = budget or ((48 << 10 if short else shared_per_sm - _BESIDE) if large else 40 << 10)
    pitch = -(-config.head_dim // 16) * item | 1
    tile = 2 * 16 * pitch * 16
    least = 1 if short else 2
    while warps > 1 and warps * least * tile > budget:
        warps //= 2
    stages = max(least, min(8, budget // (warps * tile)))
    beyond = 16  # where a row of E5M2 is an odd number of fragments, the last is read as two
    shared = max(warps * stages * tile + beyond, 4 * heads * -(-splits // 16) * 16)
    if least_shared < 0:
        least_shared = shared_per_sm - _BESIDE if large and (fill or not short) else 0
    shared = max(shared, least_shared)
    defines = (
        ("HEAD_DIM", config.head_dim),
        ("HEADS", heads),
        ("KV_FP8", int(kv_dtype == "fp8")),
        ("PIECE", piece),
        ("WARPS", warps),
        ("STAGES", stages),
        *((("SINGLE", 1),) if short else ()),
    )
    return AttentionPlan(
        KernelSpec("attention", "attention.cu", defines),
        max(splits * y, sm_count) if fill else splits * y,
        splits,
        y,
        hold_ns if fill else 0,
        32 * warps,
        shared,
        heads,
        groups,
        single,
        min_chunk,
        short_max,
    )


def embed_spec(config: ModelConfig) -> KernelSpec:
    """The embedding kernel for the storage of `config`."""
    return KernelSpec("embed", "embed.cu", (("FORMAT", _FORMATS[config.dtype]),))


def embed_grid(config: ModelConfig) -> int:
    """Blocks of the embedding kernel: those that write `part`, and one for the angles."""
    return -(-config.dim // 256) + 1


@dataclass(frozen=True)
class SamplePlan:
    """Launch of the kernels that choose a token.

    Attributes
    ----------
    blocks : int
        A power of two, so many that all can stand on the GPU at once: those of a draw wait for each other.
    block : int
    max_shared, draw_shared : int
        Dynamic shared memory, bytes.
    can_draw : bool
        Whether a draw's shared memory is there: it holds the block's logits and their weights. The most likely token can be
        chosen on any GPU.
    rehearse : bool
        The most likely token: run once on nothing while the kernel before is still busy (dependent launch), to have the
        instructions at hand.
    """

    blocks: int
    block: int
    max_shared: int
    draw_shared: int
    can_draw: bool
    rehearse: bool


def plan_sampling(vocab: int, sm_count: int, *, shared_per_block: int = 227 << 10, rehearse: bool = False) -> SamplePlan:
    """Geometry of sampling for `vocab` logits on a GPU of `sm_count` multiprocessors.

    Examples
    --------
    >>> plan_sampling(128256, 132)
    SamplePlan(blocks=64, block=256, max_shared=252, draw_shared=54492, can_draw=True, rehearse=False)
    """
    blocks = 1 << (min(SAMPLE_BLOCKS, sm_count).bit_length() - 1)
    part = (vocab // blocks // 32 + 1) * 32
    bits = part // 8
    draw = _DRAW_SHARED + 8 * max(part, _DRAW_LIST) + bits
    return SamplePlan(blocks, SAMPLE_THREADS, bits, draw, draw <= shared_per_block, rehearse)


def sample_specs() -> tuple[KernelSpec, KernelSpec]:
    """The kernels that choose a token: the most likely one, or a drawn one."""
    return KernelSpec("sample_max", "sample.cu"), KernelSpec("sample_draw", "sample_draw.cu")


def sinks_spec() -> KernelSpec:
    """The kernel that turns the sinks' keys."""
    return KernelSpec("rotate_sinks", "cache.cu")


def collect_spec() -> KernelSpec:
    """The kernel that moves a step's stamps to the host."""
    return KernelSpec("collect_stamps", "cache.cu")


def all_specs() -> list[KernelSpec]:
    """Specialisations worth compiling in a test: formats, head sizes, head groups, cache types, both forms of attention."""
    from calmnb.engine.cuda_prefill import prefill_specs

    specs = [KernelSpec("embed", "embed.cu", (("FORMAT", f),)) for f in _FORMATS.values()]
    specs += [*sample_specs(), sinks_spec(), collect_spec()]
    specs += [KernelSpec(name, "cache.cu") for name in ("fill_random", "weight_peak", "read_bytes")]
    for (head_dim, per_kv), kv_dtype in itertools.product(
        ((16, 2), (64, 3), (64, 4), (80, 1), (100, 4), (128, 1), (128, 4), (128, 8), (256, 8)), ("fp16", "fp8")
    ):
        config = ModelConfig("llama", "fp16", 64, 64, head_dim, 1, per_kv, 1, 32)
        forms = (False, True) if (head_dim, per_kv) in ((64, 4), (128, 4), (256, 8)) else (False,)
        specs += [plan_attention(config, kv_dtype, 132, short=short).spec for short in forms]
    return specs + prefill_specs()
