"""The versions of the lesson ``08_one_kernel``: what each is, how it is launched on a matrix, and which code is new in it.

Pure arithmetic and text; `calmnb.one_kernel` compiles, checks and times them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from calmnb.config import DTYPE_BITS
from calmnb.engine.cuda_matvec import Device, default_geometry, plan_matvec
from calmnb.errors import ConfigError
from calmnb.kernels import CompiledKernel, KernelSpec
from calmnb.profile.launches import resident_blocks

__all__ = ["CACHED", "LAYERS", "VERSIONS", "Layer", "Plan", "Version", "plan", "specs"]

Kind = Literal["rows", "resident", "ring", "product"]
_FORMAT = {"fp16": 0, "fp8": 1, "gf4": 2}


@dataclass(frozen=True)
class Layer:
    """A weight matrix: name, rows (outputs), columns (inputs)."""

    name: str
    rows: int
    cols: int

    def nbytes(self, dtype: str) -> int:
        """Bytes of the weights in storage `dtype`."""
        return self.rows * self.cols * DTYPE_BITS[dtype] // 8


#: The two large matrices of a Mistral-7B layer.
LAYERS = (Layer("gate+up", 28672, 4096), Layer("down", 4096, 14336))
#: Small enough for the L2 cache of an H100 or H200: what a benchmark measures that runs one matrix again and again.
CACHED = Layer("attention out", 4096, 4096)


@dataclass(frozen=True)
class Version:
    """One step of the lesson.

    Attributes
    ----------
    number : int
    name, idea : str
        A few words; a sentence.
    dtype : str
        Storage of the weights.
    kind : {"rows", "resident", "ring", "product"}
        How work is spread: rows over blocks, blocks that stay, blocks that stay with a ring, calmnb's own plan.
    source, entry : str
        File of ``kernels/`` and kernel in it.
    threads, rows_per_block, load_bytes, loop_weights : int
        Of kind "rows": the launch, the bytes a lane has in flight, and weights a pass of the loop takes.
    plain : bool
        gf4 decoded as its definition reads.
    dependent : bool
        Launched before the kernel ahead has ended (sm_90 and later).
    """

    number: int
    name: str
    idea: str
    dtype: str
    kind: Kind
    source: str
    entry: str
    threads: int = 0
    rows_per_block: int = 0
    load_bytes: int = 0
    loop_weights: int = 0
    plain: bool = False
    dependent: bool = False


_RING, _OWN = ("one_kernel/v6_ring.cu", "ring"), ("matvec_rows.cu", "matvec_rows")
VERSIONS = (
    Version(0, "a thread a row", "The loop of the textbook; the lanes of a warp read 8 KB apart.", "fp16", "rows",
            "one_kernel/v0_thread_a_row.cu", "thread_a_row", 128, 128, 8, 4),
    Version(1, "a warp a row", "Lanes read neighbouring weights: 64 bytes in one piece.", "fp16", "rows",
            "one_kernel/v1_warp_a_row.cu", "warp_a_row", 256, 8, 8, 4),
    Version(2, "16-byte loads", "8 weights a load: 512 bytes in one piece, more in flight.", "fp16", "rows",
            "one_kernel/v2_16_bytes.cu", "bytes_16", 256, 8, 16, 8),
    Version(3, "half2 products", "Two weights an instruction, nothing converted.", "fp16", "rows",
            "one_kernel/v3_half2.cu", "half2_products", 256, 8, 16, 8),
    Version(4, "4 rows share x", "Four loads in flight a lane, and one load of x for all four.", "fp16", "rows",
            "one_kernel/v4_rows_share_x.cu", "rows_share_x", 256, 32, 64, 32),
    Version(5, "x in registers", "Blocks stay; a lane keeps its part of x for all rows.", "fp16", "resident",
            "one_kernel/v5_x_in_registers.cu", "x_in_registers"),
    Version(6, "cp.async ring", "Loads stay in flight while rows are summed.", "fp16", "ring", *_RING),
    Version(7, "calmnb's kernel", "The same, tuned: rows a slot, sums, registers, blocks.", "fp16", "product", *_OWN),
    Version(8, "dependent launch", "The next kernel fills its ring while this one ends.", "fp16", "product", *_OWN,
            dependent=True),
    Version(9, "fp8, the same ring", "Half the bytes; a byte permutation makes two weights halves.", "fp8", "ring", *_RING),
    Version(10, "fp8, calmnb's kernel", "With dependent launch.", "fp8", "product", *_OWN, dependent=True),
    Version(11, "gf4, plain decode", "A quarter of the bytes; each weight shifted, masked, converted.", "gf4", "ring", *_RING,
            plain=True),
    Version(12, "gf4, codes as halves", "Masked codes are used as subnormal halves: no shift, no conversion.", "gf4", "ring",
            *_RING),
    Version(13, "gf4, calmnb's kernel", "With dependent launch.", "gf4", "product", *_OWN, dependent=True),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How one version runs on one matrix and GPU.

    Attributes
    ----------
    spec : KernelSpec
    threads, shared : int
        Of a block; dynamic shared memory in bytes.
    grid : int
        Blocks; 0: as many as fit at once, known when the kernel is compiled.
    block_bytes : int
        Bytes of weights that a block has in flight.
    loop_weights : int
        Weights that one pass of the hot loop takes, a lane.
    """

    spec: KernelSpec
    threads: int
    shared: int
    grid: int
    block_bytes: int
    loop_weights: int

    def blocks(self, kernel: CompiledKernel, sm_count: int) -> tuple[int, int]:
        """Grid, and blocks that a multiprocessor holds at once."""
        r = kernel.resources
        fits = max(1, resident_blocks(kernel.arch, registers=r.registers, threads=self.threads,
                                      shared_bytes=r.shared_bytes + self.shared))  # fmt: skip
        return self.grid or sm_count * fits, fits


def plan(version: Version, layer: Layer, device: Device) -> Plan:
    """Plan a version for a matrix.

    Raises
    ------
    ConfigError
        If the kernel does not take such a matrix.
    """
    rows, cols, bits = layer.rows, layer.cols, DTYPE_BITS[version.dtype]
    if version.source != VERSIONS[0].source and version.source != VERSIONS[1].source and (cols < 1 or cols * bits % 128):
        raise ConfigError(
            f"version {version.number} ({version.name}) reads rows in pieces of 16 bytes, but {cols} columns of "
            f"{version.dtype} are {cols * bits / 8:g} bytes; take a multiple of {128 // bits} columns"
        )
    if version.kind == "rows":
        grid = -(-rows // version.rows_per_block)
        flight = version.threads * version.load_bytes
        return Plan(KernelSpec(version.entry, version.source), version.threads, 0, grid, flight, version.loop_weights)
    if version.kind == "product":
        return _plan_product(version, layer, device)
    chunks = cols * bits // 128
    threads = min((256, 224, 192, 160, 128), key=lambda t: (-(-chunks // t) * t, -t))
    nc, warps = -(-chunks // threads), threads // 32
    limit = {"fp16": 8, "fp8": 4, "gf4": 2}[version.dtype]
    if nc > limit:
        raise ConfigError(
            f"version {version.number} ({version.name}) keeps x in registers: up to {256 * limit * 128 // bits} columns "
            f"of {version.dtype}, but the matrix has {cols}; take version 4, or calmnb's kernel"
        )
    defines: dict[str, int | str] = {"K_THREADS": threads, "K_CHUNKS": nc}
    if version.kind == "resident":
        batch = max(r for r in (1, 2, 4, 8) if r * nc <= 8)
        defines |= {"K_ROWS": batch, "K_BLOCKS": 2}
        shared, flight = 0, batch * nc * threads * 16
    else:
        batch, stages = _ring_shape(threads, nc, device)
        defines |= {"K_FORMAT": _FORMAT[version.dtype], "K_ROWS": batch, "K_STAGES": stages}
        if version.plain:
            defines["K_PLAIN"] = 1
        flight = stages * batch * nc * threads * 16
        shared = flight + 2 * warps * batch * 4
    spec = KernelSpec(version.entry, version.source, tuple(defines.items()))
    return Plan(spec, threads, shared, 0, flight, batch * nc * 128 // bits)


def _ring_shape(threads: int, chunks: int, device: Device) -> tuple[int, int]:
    """Rows of a slot and slots of a ring: 16 warps on a multiprocessor if at least three slots then fit each block."""
    for blocks in range(-(-512 // threads), 0, -1):
        room = (device.shared_per_sm - 8192) // blocks
        for rows in (8, 4, 2, 1):
            stages = room // (rows * chunks * threads * 16)
            if stages >= 3:
                return rows, min(stages, 8)
    return 1, 2


def _plan_product(version: Version, layer: Layer, device: Device) -> Plan:
    kind: Any = "down" if layer.cols > layer.rows else "gateup"
    geometry = default_geometry(kind, version.dtype, layer.rows, layer.cols, device)
    p = plan_matvec("logits", version.dtype, layer.rows, layer.cols, device, geometry=geometry)
    g = p.geometry
    lane = 0 if p.wide else g.chunks * 16
    return Plan(p.spec, p.block, p.smem, p.grid, g.stages * g.stage_rows * lane * p.block,
                g.batch * g.chunks * 128 // DTYPE_BITS[version.dtype])  # fmt: skip


def specs(arch: str, sm_count: int = 132) -> list[KernelSpec]:
    """Every specialisation that the lesson compiles for `arch`."""
    device = Device.of_arch(arch, sm_count)
    return list(dict.fromkeys(plan(v, layer, device).spec for layer in (*LAYERS, CACHED) for v in VERSIONS))
