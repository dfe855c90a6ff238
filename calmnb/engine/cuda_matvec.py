"""Shapes of the weight kernels: which specialisation, grid and shared memory serve one matrix on one GPU.

Pure arithmetic, no GPU needed: `plan_matvec` turns a matrix and a device into a `MatvecPlan`, and `MatvecArgs` mirrors
the argument struct of ``kernels/matvec.cuh``. What was tried and what won is in ``kernels/NOTES.md``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Literal

from calmnb.config import DTYPE_BITS, ModelConfig
from calmnb.kernels import KernelSpec

__all__ = [
    "Device",
    "Geometry",
    "MatvecArgs",
    "MatvecKind",
    "MatvecPlan",
    "default_geometry",
    "fill_geometry",
    "matrix_shapes",
    "plan_matvec",
]

MatvecKind = Literal["qkv", "out", "gateup", "down", "logits", "router"]

_SOURCE = {"qkv": "qkv", "out": "residual", "gateup": "gateup", "down": "residual", "logits": "rows", "router": "rows"}
_FORMAT = {"fp16": 0, "fp8": 1, "gf4": 2}
_X_REGISTERS = {"fp16": 4, "fp8": 8, "gf4": 16}  # half2 registers a lane needs for 16 bytes of a row
_UNIT = {"qkv": 2, "gateup": 2}
#: Where measuring found better than the rules of `default_geometry`, by kind, format and 16-byte chunks of a row (H200,
#: ``python -m tests.gpu.tune_engine``, whole step: Mistral-7B gf4 1203 -> 1136 us, Llama-2-7B gf4 1156 -> 1067,
#: Llama-3.2-1B fp8 388 -> 379, gf4 301 -> 290).
_MEASURED_SM90: dict[tuple[str, str, int], dict[str, int]] = {
    ("out", "gf4", 64): {"stage_rows": 2, "stages": 8},
    ("down", "gf4", 256): {"delay": 4000},
    ("down", "fp8", 512): {"pace": 1, "delay": 2000},
    ("gateup", "gf4", 128): {"batch": 4, "stage_rows": 2, "stages": 5},
    ("down", "gf4", 344): {"batch": 4, "stage_rows": 4, "stages": 2},
    ("down", "gf4", 448): {"batch": 8, "stage_rows": 4, "stages": 2, "pace": 2},
}


class MatvecArgs(ctypes.Structure):
    """The struct every weight kernel takes by value; field for field that of ``kernels/matvec.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "w0", "w1", "x16", "x32", "g", "part", "y32", "y16", "res", "g_next", "part_next", "bias", "rope",
            "kcache", "vcache", "state", "best", "router", "stamp",
        )),
        *((name, ctypes.c_int32) for name in (
            "rows", "cols", "n_part", "q_dim", "kv_dim", "head_dim", "rotary_dim", "seq_len", "n_experts", "n_active",
            "delay",
        )),
        *((name, ctypes.c_float) for name in ("eps", "clip", "q_scale", "in_scale")),
    )  # fmt: skip


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes
    ----------
    arch : str
        ``"sm_90"``.
    sm_count : int
    shared_per_sm : int
        Bytes of shared memory of one multiprocessor.
    """

    arch: str
    sm_count: int
    shared_per_sm: int

    @property
    def capability(self) -> int:
        """Compute capability as a number: 90."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))

    @property
    def shared_per_block(self) -> int:
        """Bytes of shared memory that one block can ask for: CUDA keeps a kilobyte of each."""
        return self.shared_per_sm - 1024

    @property
    def holds_two_rings(self) -> bool:
        """Whether the rings of two neighbouring kernels fit a multiprocessor."""
        return self.shared_per_sm >= 200 * 1024

    @property
    def has_pdl(self) -> bool:
        """Whether programmatic dependent launch exists."""
        return self.capability >= 90

    @classmethod
    def of_arch(cls, arch: str, sm_count: int = 132) -> Device:
        """Return a device with the shared memory its architecture has."""
        sizes = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
        return cls(arch, sm_count, sizes.get(int(arch.removeprefix("sm_").rstrip("af")), 100) * 1024)


@dataclass(frozen=True)
class Geometry:
    """How one matrix is spread over a block; the compile-time keys of ``kernels/matvec.cuh``.

    Attributes
    ----------
    threads : int
        Threads of a block.
    warps_per_row : int
        Warps that share a row.
    chunks : int
        16-byte pieces of a row a lane takes.
    batch : int
        Rows summed over lanes together, a power of two.
    stage_rows : int
        Rows a ring slot holds.
    stages : int
        Ring slots.
    pace : int
        Slots in flight while the kernel before still runs.
    delay : int
        Clock cycles before the first copy, where the kernel starts while those before still run (PDL only).
    blocks_per_sm : int
        Blocks of this kernel on each multiprocessor.
    max_registers : int
        Registers a thread may use.
    resident : int
        Blocks, of this kernel and its neighbours, that shared memory lets a multiprocessor hold (PDL only).
    """

    threads: int
    warps_per_row: int
    chunks: int
    batch: int = 8
    stage_rows: int = 4
    stages: int = 4
    pace: int = 1
    delay: int = 0
    blocks_per_sm: int = 1
    max_registers: int = 96
    resident: int = 2


@dataclass(frozen=True)
class MatvecPlan:
    """One launch: specialisation, blocks, threads, dynamic shared memory in bytes."""

    kind: MatvecKind
    spec: KernelSpec
    grid: int
    block: int
    smem: int
    geometry: Geometry
    rows: int
    cols: int
    wide: bool


def default_geometry(kind: MatvecKind, dtype: str, rows: int, cols: int, device: Device) -> Geometry | None:
    """Choose a geometry for the fast path, or None where only the generic kernel fits.

    The fast path needs rows that are multiples of 16 bytes and short enough for a lane's share of the activations to
    stay in registers (`cols` up to 32,768 in every format).
    """
    bits = DTYPE_BITS[dtype]
    if cols * bits % 128:
        return None
    n_chunks = cols * bits // 128
    for x_registers in (16, 32):
        options = []
        for chunks in range(1, x_registers // _X_REGISTERS[dtype] + 1):
            for warps in range(1, 17):
                lanes_used = n_chunks / (32 * warps * chunks)
                if lanes_used <= 1:
                    # Few idle lanes first (in steps of 8%), then a block of about 8 warps, then more chunks a lane.
                    groups = max(1, round(8 / warps))
                    options.append((int((1 - lanes_used) * 12), abs(groups * warps - 8), -chunks, warps, chunks, groups))
        if options:
            *_, warps, chunks, groups = min(options)
            short_rows = n_chunks < 256
            batch = 4 if dtype == "fp16" else 8
            is_dense = dtype == "gf4" or (dtype == "fp8" and short_rows)
            if kind == "gateup" and device.has_pdl and warps * groups == 8 and is_dense:
                groups *= 2  # the longest kernel, where a row's own work is much against its bytes: 16 warps
                batch = 8 if dtype == "gf4" else 4
            geometry = fill_geometry(rows, warps, chunks, groups, device, ring_kb=64 if dtype == "gf4" else 92, batch=batch)
            if x_registers > 16:  # activations alone take 32 or 40: rows of 16,384 and more spilled 24 to 396 bytes a thread
                geometry = replace(geometry, max_registers=max(geometry.max_registers, 104))
            if kind == "logits" or not device.has_pdl:
                geometry = replace(geometry, blocks_per_sm=2)
            # Short kernels fill their ring one slot at a time, out of the running kernel's way.
            slow = dtype == "gf4" or short_rows or (kind == "gateup" and n_chunks < 512)
            geometry = replace(geometry, pace=1 if slow else 2)
            is_measured = device.has_pdl and device.holds_two_rings
            return replace(geometry, **_MEASURED_SM90.get((kind, dtype, n_chunks), {})) if is_measured else geometry
    return None


def fill_geometry(
    rows: int, warps: int, chunks: int, groups: int, device: Device, *, stage_kb: int = 16, ring_kb: int = 80, batch: int = 4
) -> Geometry:
    """Ring and batch sizes for `groups` groups of `warps` warps with `chunks` chunks a lane."""
    threads = 32 * warps * groups
    unit = chunks * threads * 16
    stage_rows = 1
    while stage_rows < batch and stage_rows * 2 * unit <= stage_kb * 1024:
        stage_rows *= 2
    budget = (ring_kb if device.shared_per_sm >= 160 * 1024 else 32) * 1024
    stages = max(2, min(12, budget // (stage_rows * unit)))
    per_block = -(-rows // device.sm_count)
    while batch > stage_rows and groups * batch // 2 >= per_block:
        batch //= 2
    # Each quarter of a multiprocessor has 512 registers for every lane. Neighbours must fit together, or a kernel's
    # blocks wait for each other and pile up: qkv and down beside attention (128), gateup (16 warps) beside down.
    registers = 80 if threads <= 256 else 72 if threads <= 384 else 56 if threads < 512 else 72
    if not device.holds_two_rings:  # no ring of a neighbour as large as this one fits beside it
        registers = max(registers, 96 if threads <= 256 else 72)
    return Geometry(threads, warps, chunks, batch, stage_rows, stages, max_registers=registers)


def plan_matvec(
    kind: MatvecKind,
    dtype: str,
    rows: int,
    cols: int,
    device: Device,
    *,
    norm: int = 0,
    kv_dtype: str = "fp16",
    gelu: bool = False,
    wide: bool = False,
    stamps: bool = False,
    moe: bool = False,
    geometry: Geometry | None = None,
) -> MatvecPlan:
    """Plan the launch of one weight kernel.

    Parameters
    ----------
    kind
        Which matrix of the step.
    dtype
        Weight storage.
    rows, cols
        Rows of all its matrices together (qkv: q, k and v; gateup: gate and up), columns.
    device
        The GPU.
    norm
        0 none, 1 RMS, 2 layer norm of the input.
    kv_dtype
        Cache storage (qkv).
    gelu
        GELU in place of SiLU (gateup).
    wide
        Force the generic float kernel: weights so large that half2 products could overflow.
    stamps
        Compile the time stamps in.
    moe
        The matrix belongs to experts (gateup, down); `rows` of gateup are those of all active experts together.
    geometry
        Override the choice (tuning).
    """
    chosen = None if wide else geometry or default_geometry(kind, dtype, rows, cols, device)
    source = _SOURCE[kind]
    defines: dict[str, int | str] = {"K_FORMAT": _FORMAT[dtype], "K_NORM": norm}
    if kind == "qkv":
        defines["K_KV_FORMAT"] = _FORMAT[kv_dtype]
    if kind == "gateup":
        defines["K_ACT"] = int(gelu)
    is_wide = chosen is None
    g = chosen or Geometry(256, 1, 1, 1, 1, 1, blocks_per_sm=2, max_registers=96)
    units = rows // _UNIT.get(kind, 1)
    grid = max(1, min(units, device.sm_count * g.blocks_per_sm))
    batch_rows = g.threads // 32 // g.warps_per_row * g.batch
    per_block = -(-units // grid) * _UNIT.get(kind, 1)
    tile_batches = -(-per_block // batch_rows)  # all rows of a block, or about 128 at a time
    tile = (tile_batches if moe and kind == "down" else min(-(-128 // batch_rows), tile_batches)) * batch_rows
    defines |= {
        "K_THREADS": g.threads, "K_WARPS_PER_ROW": g.warps_per_row, "K_CHUNKS": g.chunks, "K_BATCH": g.batch,
        "K_STAGE_ROWS": g.stage_rows, "K_STAGES": g.stages, "K_PACE": min(g.pace, g.stages), "K_TILE": tile,
        "K_MAX_REGISTERS": g.max_registers,
    }  # fmt: skip
    if moe:  # never beside a waiting neighbour: more registers hurt no one
        defines["K_MAX_REGISTERS"] = max(g.max_registers, 96)
    if g.delay:
        defines["K_DELAY"] = 1
    if is_wide:
        defines["K_WIDE"] = 1
    elif cols * DTYPE_BITS[dtype] // 128 == 32 * g.warps_per_row * g.chunks:
        defines["K_EXACT"] = 1
    if moe:
        defines["K_MOE"] = 1 if kind == "gateup" else 2
    if stamps:
        defines["CALMNB_STAMPS"] = 1
    ring = 0 if is_wide else g.stages * g.stage_rows * g.chunks * g.threads * 16
    smem = ring + 2 * g.warps_per_row * tile * 4 + 3 * (g.threads // 32) * 4 + (512 if moe else 0)
    if device.has_pdl and not is_wide:
        # Exactly `resident` of these blocks must fit a multiprocessor, or the next kernel's pile up on a few of them.
        smem = max(smem, device.shared_per_sm // (g.resident + 1) + 1024)
    if smem > device.shared_per_block:  # two slots of so long a row do not fit this GPU
        return plan_matvec(
            kind, dtype, rows, cols, device, norm=norm, kv_dtype=kv_dtype, gelu=gelu, wide=True, stamps=stamps, moe=moe
        )
    spec = KernelSpec(f"matvec_{source}", f"matvec_{source}.cu", tuple(defines.items()))
    return MatvecPlan(kind, spec, grid, g.threads, smem, g, rows, cols, is_wide)


def matrix_shapes(config: ModelConfig) -> dict[MatvecKind, tuple[int, int]]:
    """Rows and columns of each kind of matrix of a model, as `plan_matvec` counts them."""
    shapes: dict[MatvecKind, tuple[int, int]] = {
        "qkv": (config.q_dim + 2 * config.kv_dim, config.dim),
        "out": (config.dim, config.q_dim),
        "gateup": (2 * config.hidden_dim, config.dim),
        "down": (config.dim, config.hidden_dim),
        "logits": (config.vocab_size, config.dim),
    }
    if config.is_moe:
        shapes["router"] = (config.n_experts, config.dim)
    return shapes
