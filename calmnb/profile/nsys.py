"""`read_nsys`: a report of NVIDIA Nsight Systems as a `Session`.

Kernels get their stage, layer and step from the NVTX ranges around their launch; within a replayed graph, where there are no
ranges, from their order (`calmnb.profile.attribution`). What neither explains has the stage ``other``. So calmnb's own
numbers can be checked against the vendor's tool, and a report of somebody else's program opens too: its outermost ranges
become steps.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine.base import Kernel, Phase, Stage
from calmnb.errors import ConfigError, FormatError
from calmnb.profile.attribution import (
    HOLD_KERNELS,
    StepRange,
    find_steps,
    kernel_name,
    layer_of_range,
    stage_of_range,
    step_of_range,
)
from calmnb.profile.describe import config_to_dict, versions
from calmnb.profile.device import datasheet_peak
from calmnb.profile.nsys_file import GpuKernel, NsysReport, NvtxRange, read_report
from calmnb.profile.recorder import StepRecord
from calmnb.profile.session import Session

__all__ = ["read_nsys"]

_REPORTS = (".nsys-rep", ".qdrep")
#: Seen of nsys 2023.4 on an H200; CUPTI of CUDA 13.0 reports such kernels as calmnb's stamps do.
_CUT = (
    "kernels overlap here (dependent launch), and this nsys ends each where the next may begin: a step's time is right, but "
    "much of a kernel's time stands in the row behind it. Record with CALMNB_PDL=0, or with a newer nsys"
)


@dataclass
class _Group:
    """Kernels of one step: what is known of the step, what each kernel is."""

    phase: Phase
    pos: int
    kv_len: int
    n_tokens: int  # 0: outside any step of calmnb's, left out of statistics
    kernels: list[GpuKernel]
    rows: list[Kernel]


def read_nsys(
    path: str | Path, *, config: ModelConfig | None = None, kv_dtype: KvDtype = "fp16", device: int | None = None
) -> Session:
    """Open a report of Nsight Systems, calmnb's or any other program's.

    Parameters
    ----------
    path
        An SQLite export (``nsys export --type sqlite``), or a ``.nsys-rep``, which needs ``nsys`` on the PATH.
    config, kv_dtype
        The model that ran (``model.config``), for bytes and FLOPs of the stages. Without it, `bytes_min` is what the ranges
        carry as payload, or 0.
    device
        CUDA device whose kernels to read; the busiest when left out.

    Returns
    -------
    Session
        ``source`` is "nsys"; ``meta["time_note"]`` warns of a report whose kernels are cut short. Two columns more than a
        recording of calmnb's: ``nvtx`` (names of the ranges around the launch, outermost first, joined by " > ") and
        ``graph_node`` (id of the node in its CUDA graph, -1 outside of one).

        Positions that nothing tells are -1, with a ``kv_len`` of 0. If there are steps of calmnb's in the report, kernels
        outside of them stand in steps with ``n_tokens`` 0, which tables leave out. In a report without any, every outermost
        range is a step, or the whole recording where there are no ranges, and ``meta["engine"]`` is "foreign".

    Raises
    ------
    FormatError
        If it is not a report, is damaged, or holds no kernels.
    CalmnbError
        If ``nsys`` is needed and is not there.

    Examples
    --------
    >>> session = calmnb.read_nsys("report.sqlite")  # doctest: +SKIP
    >>> session.kernels()  # doctest: +SKIP
    """
    try:
        path = Path(path).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that is not there
        raise FormatError(
            f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}; give a .nsys-rep or .sqlite file"
        ) from error
    if not is_file:
        raise FormatError(f"{path}: there is no such file; a report is what `calmnb nsys --report` or `nsys profile -o` writes")
    if path.suffix in _REPORTS:
        from calmnb.profile.nsight import export_sqlite

        with tempfile.TemporaryDirectory(prefix="calmnb-nsys-") as folder:
            report = read_report(export_sqlite(path, Path(folder) / "report.sqlite"))
    else:
        report = read_report(path)
    kernels, chosen = _of_device(report, device, path)
    groups, foreign = _group(kernels)
    meta = _meta(path, report, chosen, len(kernels), foreign=foreign)
    if not foreign and any(_is_cut(group.kernels) for group in groups if group.n_tokens):
        meta["time_note"] = _CUT
    if config is not None:
        meta |= {"config": config_to_dict(config), "dtype": config.dtype, "kv_dtype": kv_dtype}
    session = Session.from_steps(_records(groups), meta)
    _add_columns(session, groups)
    if config is None:
        _add_payloads(session, groups)
    return session


def _of_device(report: NsysReport, device: int | None, path: Path) -> tuple[list[GpuKernel], int]:
    busy: Counter[int] = Counter()
    for kernel in report.kernels:
        busy[kernel.device] += kernel.end - kernel.start + 1
    chosen = busy.most_common(1)[0][0] if device is None else device
    if chosen not in busy:
        raise ConfigError(f"device is {device}; {path} has kernels of {', '.join(map(str, sorted(busy)))}")
    mine = [kernel for kernel in report.kernels if kernel.device == chosen]
    # What keeps calmnb's stream busy while kernels are queued between events is no work of any step.
    return [kernel for kernel in mine if kernel_name(kernel.name) not in HOLD_KERNELS] or mine, chosen


def _group(kernels: Sequence[GpuKernel]) -> tuple[list[_Group], bool]:
    """Split kernels into steps; also says whether none of them is calmnb's."""
    groups: list[_Group] = []
    rest: list[GpuKernel] = []
    ranged: dict[int, _Group] = {}
    for kernel in kernels:
        told = next(((r, step) for r in kernel.ranges if (step := step_of_range(r.text))), None)
        if told is None:
            rest.append(kernel)
            continue
        instance, step = told
        if id(instance) not in ranged:
            ranged[id(instance)] = _Group(*_filled(step), [], [])
            groups.append(ranged[id(instance)])
        ranged[id(instance)].kernels.append(kernel)
    for group in groups:
        group.rows = _stages_in(group.kernels)
    streams: dict[tuple[int, int], list[GpuKernel]] = {}
    for kernel in rest:
        streams.setdefault((kernel.process, kernel.stream), []).append(kernel)
    taken: set[int] = set()
    for line in streams.values():
        for found in find_steps([kernel.name for kernel in line]):
            mine = line[found.first : found.first + len(found.rows)]
            taken.update(map(id, mine))
            groups.append(_Group(found.phase, -1, 0, 1, mine, list(found.rows)))
    rest = [kernel for kernel in rest if id(kernel) not in taken]
    groups.sort(key=lambda group: group.kernels[0].start)
    if groups:
        return _with_rest(groups, rest), False
    return _by_outermost_range(rest), True


def _is_cut(kernels: Sequence[GpuKernel]) -> bool:
    """Whether rows meet as only those do that were ended for the next to begin: no GPU starts a kernel within a nanosecond."""
    gaps = [b.start - a.end for a, b in pairwise(kernels)]
    return len(gaps) >= 4 and sum(0 <= gap <= 1 for gap in gaps) > 0.8 * len(gaps)


def _filled(step: StepRange) -> tuple[Phase, int, int, int]:
    return step.phase, step.pos, max(step.kv_len, 0), max(step.n_tokens, 1)


def _stages_in(kernels: Sequence[GpuKernel]) -> list[Kernel]:
    """Stages of kernels that ranges call a step: by inner ranges, else by order, else unknown."""
    rows = [_by_ranges(kernel) for kernel in kernels]
    for found in find_steps([kernel.name for kernel in kernels]):
        for i, row in enumerate(found.rows, found.first):
            if rows[i].stage == "other":
                rows[i] = row
    return rows


def _by_ranges(kernel: GpuKernel) -> Kernel:
    stage: Stage = "other"
    layer = -1
    for r in kernel.ranges:
        inner = layer_of_range(r.text)
        layer = layer if inner is None else inner
        stage = stage_of_range(r.text) or stage
    return Kernel(stage, layer, kernel_name(kernel.name))


def _with_rest(groups: list[_Group], rest: Sequence[GpuKernel]) -> list[_Group]:
    """Put kernels between steps into groups of their own that count for nothing."""
    out: list[_Group] = []
    at = 0
    for group in [*groups, None]:
        until = group.kernels[0].start if group else float("inf")
        end = at
        while end < len(rest) and rest[end].start < until:
            end += 1
        if end > at:
            part = list(rest[at:end])
            out.append(_Group("decode", -1, 0, 0, part, [_by_ranges(kernel) for kernel in part]))
            at = end
        if group:
            out.append(group)
    return out


def _by_outermost_range(kernels: Sequence[GpuKernel]) -> list[_Group]:
    by_range: dict[int, list[GpuKernel]] = {}
    loose = [kernel for kernel in kernels if not kernel.ranges]
    for kernel in kernels:
        if kernel.ranges or len(loose) == len(kernels):
            by_range.setdefault(id(kernel.ranges[0]) if kernel.ranges else 0, []).append(kernel)
    groups = [_Group("decode", -1, 0, 1, part, [_by_ranges(kernel) for kernel in part]) for part in by_range.values()]
    groups.sort(key=lambda group: group.kernels[0].start)
    return groups if len(loose) == len(kernels) else _with_rest(groups, loose)


def _records(groups: Sequence[_Group]) -> list[StepRecord]:
    records = []
    run, before = 0, None
    for group in groups:
        if before is not None and group.n_tokens:
            turned = group.phase == "prefill" and before.phase == "decode"
            jumped = group.pos >= 0 and before.pos >= 0 and group.pos != before.pos + before.n_tokens
            run += turned or jumped
        before = group if group.n_tokens else before
        starts = np.array([kernel.start for kernel in group.kernels], np.float64) * 1e-9
        ends = np.array([kernel.end for kernel in group.kernels], np.float64) * 1e-9
        records.append(
            StepRecord(
                run, group.phase, group.pos, group.kv_len, group.n_tokens, tuple(group.rows), starts, ends,
                float(starts.min()), float(ends.max()),
            )
        )  # fmt: skip
    return records


def _meta(path: Path, report: NsysReport, device: int, kernels: int, *, foreign: bool) -> dict[str, Any]:
    about = report.devices.get(device, {})
    name = about.get("name") or "unknown GPU"
    peak = datasheet_peak(name)
    if peak is None and about.get("bytes_per_s"):
        peak = {"gb_per_s": about["bytes_per_s"] / 1e9, "source": "what the report says of the GPU"}
    return {
        "model": path.stem,
        "path": str(path),
        "engine": "foreign" if foreign else "cuda",
        "device": name,
        "threads": 0,
        "time_source": "nsys",
        "peaks": {"datasheet": peak} if peak else {},
        "versions": versions(),
        "settings": {"warmup": 0 if foreign else 1},
        "nsys": {
            "version": report.version,
            "schema": report.schema,
            "device": device,
            "kernels": kernels,
            "without_launch": report.unlaunched,
        },
    }


def _add_columns(session: Session, groups: Sequence[_Group]) -> None:
    nvtx: list[str] = []
    nodes: list[int] = []
    for group in groups:  # the rows of a step are its kernels and its gap
        nvtx += [*(" > ".join(r.text for r in kernel.ranges) for kernel in group.kernels), ""]
        nodes += [*(kernel.graph_node for kernel in group.kernels), -1]
    session.events["nvtx"] = pd.Categorical(nvtx)
    session.events["graph_node"] = np.array(nodes, np.int64)


def _add_payloads(session: Session, groups: Sequence[_Group]) -> None:
    """Take the payload of a stage's range as its bytes; the first kernel of the range carries them."""
    carried: list[int] = []
    seen: set[NvtxRange] = set()
    for group in groups:
        for kernel in group.kernels:
            r = next((r for r in reversed(kernel.ranges) if stage_of_range(r.text)), None)
            carried.append(r.payload if r is not None and r.payload > 0 and r not in seen else 0)
            if r is not None:
                seen.add(r)
        carried.append(0)
    if not any(carried):
        return
    events, steps = session.events, session.steps
    events["bytes_min"] = np.array(carried, np.int64)
    by_step = events.groupby("step")["bytes_min"].sum()
    attention = events[events["stage"] == "attention"].groupby("step")["bytes_min"].sum()
    steps["bytes_min"] = by_step.reindex(steps["step"], fill_value=0).to_numpy(np.int64)
    steps["kv_bytes"] = attention.reindex(steps["step"], fill_value=0).to_numpy(np.int64)
