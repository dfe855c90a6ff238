"""What each kernel takes of a multiprocessor: registers, shared memory, threads, and how many blocks fit at once.

Registers and static shared memory are the compiler's report, grid and threads are the launch's. Occupancy follows from
both and from limits that NVIDIA publishes per compute capability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

__all__ = ["LAUNCH_COLUMNS", "MULTIPROCESSORS", "Multiprocessor", "describe_launches", "launch_table", "resident_blocks"]

#: Columns that launches add to the kernel table.
LAUNCH_COLUMNS: dict[str, str] = {
    "registers": "registers of a thread, as compiled; nan where the session does not know the launch, so for all below",
    "threads": "threads of a block",
    "blocks": "blocks of the grid",
    "shared_kb": "shared memory of a block, static and dynamic, KiB",
    "occupancy_percent": "warps that registers, shared memory and threads let a multiprocessor hold, of its most",
    "waves": "blocks over the blocks that all multiprocessors hold at once; above 1, some wait for others to end",
}


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor, CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".

    Attributes
    ----------
    threads, blocks : int
        Resident at once, at most.
    shared_kb : int
        Shared memory, KiB.
    reserved_bytes : int
        Shared memory that the system takes of each block.
    registers : int
        32-bit registers.
    """

    threads: int
    blocks: int
    shared_kb: int
    reserved_bytes: int = 1024
    registers: int = 65536


#: By compute capability, 90 for 9.0.
MULTIPROCESSORS: dict[int, Multiprocessor] = {
    70: Multiprocessor(2048, 32, 96, 0),
    75: Multiprocessor(1024, 16, 64, 0),
    80: Multiprocessor(2048, 32, 164),
    86: Multiprocessor(1536, 16, 100),
    87: Multiprocessor(1536, 16, 164),
    89: Multiprocessor(1536, 24, 100),
    90: Multiprocessor(2048, 32, 228),
    100: Multiprocessor(2048, 32, 228),
    103: Multiprocessor(2048, 32, 228),
    120: Multiprocessor(1536, 24, 100),
    121: Multiprocessor(1536, 24, 100),
}

_WARP = 32
_REGISTER_UNIT = 256  # registers are given to a warp in pieces of this size
_SHARED_UNIT = 128  # bytes


def resident_blocks(arch: str, *, registers: int, threads: int, shared_bytes: int) -> int:
    """Blocks of one kernel that a multiprocessor can hold at once.

    Parameters
    ----------
    arch
        ``"sm_90"``.
    registers
        Of a thread.
    threads
        Of a block, >= 1.
    shared_bytes
        Of a block, static and dynamic.

    Returns
    -------
    int
        0 if not even one fits, or `arch` is not in `MULTIPROCESSORS`.

    Notes
    -----
    The rules of NVIDIA's occupancy calculator: registers are given out by warp in pieces of 256, to one of four
    partitions; shared memory in pieces of 128 bytes, with 1 KiB of each block kept by the system (from 8.0 on).
    """
    limits = MULTIPROCESSORS.get(_capability(arch))
    if limits is None:
        return 0
    warps = -(-threads // _WARP)
    found = [limits.blocks, limits.threads // _WARP // warps]
    if registers:
        of_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        found.append(limits.registers // 4 // of_warp * 4 // warps)
    shared = -(-(shared_bytes + limits.reserved_bytes) // _SHARED_UNIT) * _SHARED_UNIT
    if shared:
        found.append(limits.shared_kb * 1024 // shared)
    return max(min(found), 0)


def _capability(arch: str) -> int:
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if digits.isdigit() else 0


def describe_launches(engine: Any) -> dict[str, Any]:
    """Session metadata on an engine's GPU and on every kernel of its decode step; {} for an engine without a GPU.

    Parameters
    ----------
    engine
        A `calmnb.engine.cuda.CudaEngine`, or any other engine.

    Returns
    -------
    dict
        ``gpu``: ``arch, sm_count, short_max``; ``launches``: a list of ``kernel, stage, registers, spill_bytes, threads, grid,
        shared_bytes, short`` (``short``: the variant for contexts of at most ``short_max`` positions), each once.

    Notes
    -----
    Kernels are those of unrecorded steps. Stamped ones run in the same shape; the code that notes the time may take a few
    registers more.
    """
    if engine.info.engine != "cuda" or not hasattr(engine, "program"):
        return {}
    found: list[dict[str, Any]] = []
    for short in (False, True):
        program = engine.program("greedy", short=short)
        for kernel, launch in zip(program.kernels, program.launches, strict=True):
            entry = {
                "kernel": kernel.name,
                "stage": kernel.stage,
                "registers": launch.kernel.resources.registers,
                "spill_bytes": launch.kernel.resources.spill_bytes,
                "threads": launch.block,
                "grid": list(launch.grid),
                "shared_bytes": launch.kernel.resources.shared_bytes + launch.shared,
            }
            if not any(entry.items() <= other.items() for other in found):
                found.append({**entry, "short": short})
    gpu = {"arch": engine.gpu.arch, "sm_count": engine.gpu.sm_count, "short_max": engine.short_max}
    return {"gpu": gpu, "launches": found}


def launch_table(meta: Mapping[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    """Columns of `LAUNCH_COLUMNS` for each kernel and stage of `rows`.

    Parameters
    ----------
    meta
        `Session.meta`.
    rows
        With the columns ``kernel``, ``stage`` and ``kv_len`` (typical context of the row's calls).

    Returns
    -------
    DataFrame
        As long as `rows`, with its index; nan where `meta` does not know the launch.
    """
    gpu, launches = meta.get("gpu") or {}, meta.get("launches") or []
    short_max = int(gpu.get("short_max", 0))
    out = []
    for record in rows[["kernel", "stage", "kv_len"]].to_dict("records"):
        wanted = [e for e in launches if e["kernel"] == record["kernel"] and e["stage"] == record["stage"]]
        is_short = record["kv_len"] <= short_max
        best = next((e for e in wanted if bool(e.get("short")) == is_short), wanted[0] if wanted else None)
        out.append(_launch_row(gpu, best) if best else dict.fromkeys(LAUNCH_COLUMNS, math.nan))
    return pd.DataFrame(out, index=rows.index, columns=list(LAUNCH_COLUMNS), dtype=float)


def _launch_row(gpu: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, float]:
    arch, sms = str(gpu.get("arch", "")), int(gpu.get("sm_count", 0))
    threads, blocks = int(launch["threads"]), _product(launch["grid"])
    fits = resident_blocks(arch, registers=int(launch["registers"]), threads=threads, shared_bytes=int(launch["shared_bytes"]))
    limits = MULTIPROCESSORS.get(_capability(arch))
    return {
        "registers": launch["registers"],
        "threads": threads,
        "blocks": blocks,
        "shared_kb": launch["shared_bytes"] / 1024,
        "occupancy_percent": 100.0 * fits * threads / limits.threads if limits and fits else math.nan,
        "waves": blocks / (fits * sms) if fits and sms else math.nan,
    }


def _product(grid: Sequence[int]) -> int:
    return math.prod(int(n) for n in grid)
