"""One matrix times one vector, from the plainest kernel to the limit: compiled, checked, timed, one row of a table each.

The kernels are files of ``kernels/one_kernel/``, one idea each; the notebook ``08_one_kernel`` walks through them. Weights
have a real layer's shape (Mistral-7B) and random bits. Every version's output is checked against NumPy in float64 before
it is timed, and copies of the weights, larger together than any L2 cache, take turns while it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calmnb.config import DTYPE_BITS
from calmnb.engine.cuda_device import Gpu
from calmnb.engine.cuda_matvec import Device
from calmnb.errors import CalmnbError, ConfigError, DeviceError, FormatError
from calmnb.files import write_text
from calmnb.kernels import CompiledKernel, compile_all, compile_kernel, compile_text
from calmnb.one_kernel_case import TOLERANCE, Case, open_gpu
from calmnb.one_kernel_text import code, compare, step
from calmnb.one_kernel_versions import CACHED, LAYERS, VERSIONS, Layer, Plan, Version, plan, specs
from calmnb.profile.launches import MULTIPROCESSORS
from calmnb.profile.sass import disassemble, find_disassembler, loop_instructions
from calmnb.profile.shape import saved_file

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CACHED",
    "COLUMNS",
    "LAYERS",
    "TOLERANCE",
    "VERSIONS",
    "Layer",
    "Plan",
    "Version",
    "code",
    "compare",
    "load",
    "measure",
    "measured_or_saved",
    "open_gpu",
    "plan",
    "save",
    "saved_path",
    "source_of",
    "specs",
    "step",
    "try_kernel",
]

#: Columns of the table that `measure` returns.
COLUMNS = {
    "version": "number of the version, as in the notebook",
    "layer": "which matrix of Mistral-7B",
    "dtype": "storage of the weights: fp16, fp8 (E5M2) or gf4",
    "memory": "DRAM: copies take turns, larger together than L2; L2: one matrix that fits L2, again and again, as naive "
    "benchmarks run; one copy: the same, but it does not fit",
    "name": "of the version",
    "idea": "what is new in it",
    "us": "microseconds a launch, median of the replays of a graph of many launches",
    "us_p20": "20th percentile of the same",
    "us_p80": "80th percentile",
    "bytes_min": "bytes of the weights, x and y",
    "gb_per_s": "bytes_min over us, 1e9 bytes a second",
    "percent_measured": "of what a kernel reaches that only reads",
    "percent_datasheet": "of the maker's bandwidth",
    "instructions_per_weight": "of the loop's machine code, static count; nan where unknown",
    "issue_percent": "share of the GPU's issue slots that the loop's instructions take, at its clock; nan where unknown",
    "counted": "SASS: disassembled here; table: counted for sm_90 and kept with calmnb; -: unknown",
    "registers": "of a thread",
    "occupancy_percent": "warps that fit a multiprocessor, of its most",
    "in_flight_kb": "KiB of weights asked for at once on a multiprocessor, if no lane waits for anything else",
    "error": "relative error of y against float64: norm of the difference over norm",
}


def measure(
    gpu: Gpu | None = None,
    *,
    layers: Sequence[Layer] = LAYERS,
    versions: Sequence[Version] = VERSIONS,
    cached: Layer | None = CACHED,
    repeats: int = 25,
    arena_bytes: int = 1 << 30,
    peak_gb_per_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Compile, check and time versions on matrices.

    Parameters
    ----------
    gpu
        None for CUDA device 0, opened and closed here.
    layers, versions
        Of `LAYERS` and `VERSIONS`, or your own.
    cached
        A matrix that fits L2, on which the ring is also timed the naive way, one copy again and again; None for neither.
    repeats
        Replays of each graph, >= 1; the table has their median.
    arena_bytes
        The copies of a matrix that take turns are together at least this large (and at least two).
    peak_gb_per_s
        Read bandwidth to compare with; None to measure it.
    progress
        Called with a line for each row.

    Returns
    -------
    DataFrame
        Columns as in `COLUMNS`; `attrs["meta"]` says device, peaks, date, package versions.

    Raises
    ------
    DeviceError
        If there is no GPU.
    CalmnbError
        If a version's result is wrong: nothing wrong is ever timed.
    """
    import pandas as pd

    if repeats < 1:
        raise ConfigError(f"measure: repeats is {repeats}; it must be at least 1")
    if gpu is None:
        with contextlib.closing(open_gpu()) as opened:
            return measure(
                opened, layers=layers, versions=versions, cached=cached, repeats=repeats, arena_bytes=arena_bytes,
                peak_gb_per_s=peak_gb_per_s, progress=progress,
            )  # fmt: skip
    usable = [v for v in versions if gpu.has_pdl or not v.dependent]
    jobs = [(layer, dtype, [v for v in usable if v.dtype == dtype], False) for layer in layers for dtype in DTYPE_BITS]
    rings = [v for v in usable if v.kind == "ring" and not v.plain]
    jobs += [(cached, dtype, [v for v in rings if v.dtype == dtype], True) for dtype in DTYPE_BITS] if cached else []
    device = Device.of_arch(gpu.arch, gpu.sm_count)
    kernels = compile_all([plan(v, layer, device).spec for layer, _, chosen, _ in jobs for v in chosen], gpu.arch)
    meta = _meta(gpu, repeats, peak_gb_per_s)
    rows: list[dict[str, Any]] = []
    for seed, (layer, dtype, chosen, is_cached) in enumerate(jobs):
        if not chosen:
            continue
        with contextlib.closing(Case(gpu, layer, dtype, arena_bytes, seed)) as case:
            for version in chosen:
                kernel = kernels[plan(version, layer, device).spec]
                for one_copy in (False, True) if is_cached else (False,):
                    rows.append(_measure_row(case, version, kernel, meta, repeats, arena_bytes, one_copy=one_copy))
                    if progress:
                        progress(_line(rows[-1]))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.attrs["meta"] = meta
    return table


def try_kernel(
    text: str, version: Version, *, layer: Layer = LAYERS[0], gpu: Gpu | None = None, repeats: int = 25,
    arena_bytes: int = 1 << 30, peak_gb_per_s: float | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Compile an edited source and, where there is a GPU, check and time it as `measure` does.

    Parameters
    ----------
    text
        CUDA C++ with the kernel `version.entry`.
    version
        What says how it is launched: one of `VERSIONS`, or a copy changed by `dataclasses.replace`.
    layer, gpu, repeats, arena_bytes, peak_gb_per_s
        As for `measure`.

    Returns
    -------
    DataFrame
        One row of `COLUMNS`; without a GPU compiled for sm_90, and what takes one to know is nan.

    Raises
    ------
    CompileError
        With the compiler's log.
    CalmnbError
        If its result is wrong, with the first wrong row.
    """
    import pandas as pd

    if gpu is None:
        try:
            opened = open_gpu()
        except DeviceError:
            p = plan(version, layer, Device.of_arch("sm_90"))
            return pd.DataFrame(
                [_row(layer, version, "DRAM", _NO_GPU, p, compile_text(text, p.spec), [math.nan], math.nan, is_edited=True)]
            )
        with contextlib.closing(opened):
            return try_kernel(
                text, version, layer=layer, gpu=opened, repeats=repeats, arena_bytes=arena_bytes, peak_gb_per_s=peak_gb_per_s
            )
    kernel = compile_text(text, plan(version, layer, Device.of_arch(gpu.arch, gpu.sm_count)).spec, gpu.arch)
    meta = _meta(gpu, repeats, peak_gb_per_s)
    with contextlib.closing(Case(gpu, layer, version.dtype, arena_bytes, 0)) as case:
        table = pd.DataFrame([_measure_row(case, version, kernel, meta, repeats, arena_bytes, is_edited=True)])
    table.attrs["meta"] = meta
    return table


_NO_GPU: dict[str, Any] = {
    "arch": "sm_90", "sm_count": 132, "clock_ghz": None, "measured_gb_per_s": math.nan, "datasheet_gb_per_s": None,
}  # fmt: skip


def _measure_row(
    case: Case,
    version: Version,
    kernel: CompiledKernel,
    meta: dict[str, Any],
    repeats: int,
    arena: int,
    *,
    one_copy: bool = False,
    is_edited: bool = False,
) -> dict[str, Any]:
    gpu, layer = case.gpu, case.layer
    p = plan(version, layer, Device.of_arch(gpu.arch, gpu.sm_count))
    copies = case.copies[:1] if one_copy else case.copies
    memory = "DRAM" if not one_copy else "L2" if layer.nbytes(version.dtype) <= meta["l2_bytes"] else "one copy"
    label = f"version {version.number} ({version.name}), {layer.name} {version.dtype}"
    error = case.error(lambda: gpu.launch([case.launch(kernel, p, case.copies[0])]), label)
    rounds = max(1, round(4 * arena / (layer.nbytes(version.dtype) * len(copies))))
    launches = [case.launch(kernel, p, w, dependent=version.dependent) for w in list(copies) * rounds]
    times = sorted(case.time(launches, repeats))
    again = case.error(lambda: gpu.launch([case.launch(kernel, p, case.copies[-1])]), label + ", after timing")
    if again != error:
        raise CalmnbError(f"{label}: a second run gave another result (error {again:.3e}, first {error:.3e})")
    return _row(layer, version, memory, meta, p, kernel, times, error, is_edited=is_edited)


def _row(
    layer: Layer, version: Version, memory: str, meta: dict[str, Any], p: Plan, kernel: CompiledKernel, times: list[float],
    error: float, *, is_edited: bool = False,
) -> dict[str, Any]:  # fmt: skip
    seconds = statistics.median(times)
    nbytes = layer.nbytes(version.dtype) + 2 * layer.cols + 4 * layer.rows
    rate = nbytes / seconds / 1e9
    grid, fits = p.blocks(kernel, meta["sm_count"])
    limits = MULTIPROCESSORS.get(int(meta["arch"].removeprefix("sm_").rstrip("af")))
    per_weight, counted = instructions_per_weight(kernel, p, is_edited=is_edited)
    slots = (meta["clock_ghz"] or math.nan) * 1e9 * meta["sm_count"] * 4 * 32 * seconds
    return {
        "version": version.number, "layer": layer.name, "dtype": version.dtype, "memory": memory, "name": version.name,
        "idea": version.idea, "us": 1e6 * seconds, "us_p20": 1e6 * times[len(times) // 5],
        "us_p80": 1e6 * times[min(len(times) - 1, 4 * len(times) // 5)], "bytes_min": nbytes, "gb_per_s": rate,
        "percent_measured": 100 * rate / meta["measured_gb_per_s"],
        "percent_datasheet": 100 * rate / meta["datasheet_gb_per_s"] if meta["datasheet_gb_per_s"] else math.nan,
        "instructions_per_weight": per_weight, "issue_percent": 100 * per_weight * layer.rows * layer.cols / slots,
        "counted": counted, "registers": kernel.resources.registers,
        "occupancy_percent": 100 * fits * p.threads / limits.threads if limits else math.nan,
        "in_flight_kb": min(fits, -(-grid // meta["sm_count"])) * p.block_bytes / 1024, "error": error,
    }  # fmt: skip


def instructions_per_weight(kernel: CompiledKernel, p: Plan, *, is_edited: bool = False) -> tuple[float, str]:
    """Instructions of the hot loop over the weights a pass takes, and where the count is from: "SASS", "table" or "-".

    The table holds calmnb's own sources: it says nothing of an edited one.
    """
    if find_disassembler():
        try:
            return loop_instructions(disassemble(kernel.cubin)) / p.loop_weights, "SASS"
        except DeviceError:  # a disassembler older than the compiler
            pass
    known = _counted().get(str(p.spec)) if kernel.arch == "sm_90" and not is_edited else None
    return (math.nan, "-") if known is None else (known / p.loop_weights, "table")


@cache
def _counted() -> dict[str, int]:
    """Instructions of the hot loop by specialisation, counted for sm_90."""
    path = Path(__file__).parent / "data" / "one_kernel_sass.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["loop_instructions"])


def write_counted(path: str | Path) -> Path:
    """Count the hot loops of every specialisation for sm_90 and write the table that stands in for ``nvdisasm`` elsewhere.

    Raises
    ------
    DeviceError
        If NVRTC or ``nvdisasm`` is missing.
    """
    from calmnb.kernels import _nvrtc_version

    kernels = [compile_kernel(spec, "sm_90") for spec in specs("sm_90")]
    counts = {str(kernel.spec): loop_instructions(disassemble(kernel.cubin)) for kernel in kernels}
    head = {"what": "instructions of the hot loop, sm_90, nvdisasm", "command": "python -m calmnb.one_kernel --count FILE"}
    found = {**head, "nvrtc": ".".join(map(str, _nvrtc_version())), "loop_instructions": counts}
    return write_text(path, json.dumps(found, indent=1) + "\n")


def _meta(gpu: Gpu, repeats: int, peak: float | None) -> dict[str, Any]:
    from calmnb.bench import measure_read
    from calmnb.profile.device import datasheet_peak

    sheet = datasheet_peak(gpu.name)
    return {
        "device": gpu.name, "arch": gpu.arch, "sm_count": gpu.sm_count, "clock_ghz": getattr(gpu, "clock_ghz", None),
        "l2_bytes": int(getattr(gpu, "l2_bytes", 0)),
        "measured_gb_per_s": measure_read(gpu) if peak is None else peak,
        "datasheet_gb_per_s": sheet["gb_per_s"] if sheet else None, "repeats": repeats,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": _packages(), "saved": False,
    }  # fmt: skip


def _packages() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for package in ("calmnb", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['layer']:13} {row['dtype']:4} {row['version']:2} {row['name']:22} {row['memory']:4} {row['us']:9.2f} us "
        f"{row['gb_per_s']:6.0f} GB/s  {row['percent_measured']:5.1f}% read  {row['instructions_per_weight']:5.2f} per weight  "
        f"{row['registers']:3} regs  {row['in_flight_kb']:4.0f} KiB in flight  error {row['error']:.1e}"
    )


def save(table: pd.DataFrame, path: str | Path) -> Path:
    """Write a table of `measure` as JSON, whole or not at all; its path."""
    rows = [[_plain(value) for value in record] for record in table[list(COLUMNS)].itertuples(index=False)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"format": 1, "meta": table.attrs["meta"], "columns": list(COLUMNS)})
    return write_text(path, head[:-1] + f', "rows": [\n{lines}\n]}}\n')


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def load(path: str | Path) -> pd.DataFrame:
    """Read what `save` wrote.

    Raises
    ------
    FormatError
        If the file is missing or is not such a table.
    """
    import pandas as pd

    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        table = pd.DataFrame(found["rows"], columns=found["columns"])[list(COLUMNS)]
        meta = dict(found["meta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} is not a table of calmnb.one_kernel: {error}; make one with python -m calmnb.one_kernel --out FILE"
        ) from error
    numbers = ["percent_datasheet", "instructions_per_weight", "issue_percent", "occupancy_percent"]
    table[numbers] = table[numbers].astype(float)
    table.attrs["meta"] = {**meta, "saved": True}
    return table


def saved_path() -> Path:
    """Where the H200's table lies: beside the notebook, in an installed wheel or in a checkout."""
    return saved_file("h200-one-kernel.json")


def measured_or_saved(*, repeats: int = 25) -> pd.DataFrame:
    """`measure` where there is a GPU, the H200's saved table where there is none; `attrs["meta"]["saved"]` says which."""
    try:
        gpu = open_gpu()
    except DeviceError:
        return load(saved_path())
    with contextlib.closing(gpu):
        return measure(gpu, repeats=repeats)


def source_of(table: pd.DataFrame) -> str:
    """One sentence on where a table comes from."""
    meta = table.attrs["meta"]
    sheet = f", datasheet {meta['datasheet_gb_per_s']:,.0f}" if meta["datasheet_gb_per_s"] else ""
    how = "saved table, no GPU here" if meta["saved"] else "measured here"
    return (
        f"{meta['device']}, {how}: {meta['date'][:10]}, median of {meta['repeats']} graph replays; "
        f"a kernel that only reads gets {meta['measured_gb_per_s']:,.0f} GB/s{sheet}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: measure everything, print the rows, write the table."""
    parser = argparse.ArgumentParser(prog="python -m calmnb.one_kernel", description="Time the versions of one matvec kernel.")
    parser.add_argument("--out", type=Path, help="file for the table (JSON)")
    parser.add_argument("--repeats", type=int, default=25, help="replays of each graph (25)")
    parser.add_argument("--count", type=Path, help="measure nothing: count instructions for sm_90 and write them here (JSON)")
    options = parser.parse_args(arguments)
    try:
        if options.count:
            print(f"wrote {write_counted(options.count)}")
            return 0
        table = measure(repeats=options.repeats, progress=lambda line: print(line, flush=True))
        print(source_of(table))
        if options.out:
            print(f"wrote {save(table, options.out)}")
    except CalmnbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
