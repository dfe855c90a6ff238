"""Reading the SQLite files that Nsight Systems exports, whatever its version.

Tables and columns come and go between versions, and a table exists only if something was recorded for it. So what is there
is looked up first, and nothing but kernels is required. A report may come from a stranger: it is opened read-only, views
and triggers are not followed, and values are checked as they are read.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from calmnb.errors import FormatError

__all__ = ["GpuKernel", "NsysReport", "NvtxRange", "read_report"]

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_PAYLOADS = ("uint64Value", "int64Value", "uint32Value", "int32Value")
_HOW = "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node -o report COMMAND"


@dataclass(frozen=True, eq=False)
class NvtxRange:
    """One instance of a range; times in nanoseconds, `end` infinite where the recording stopped first."""

    text: str
    domain: str
    start: int
    end: float
    payload: int


class GpuKernel(NamedTuple):
    """One kernel that ran; times in nanoseconds. `ranges` were open when it was launched, outermost first."""

    name: str
    start: int
    end: int
    device: int
    stream: int
    process: int
    correlation: int
    graph_node: int
    ranges: tuple[NvtxRange, ...]


@dataclass
class NsysReport:
    """What a report holds that calmnb uses."""

    kernels: list[GpuKernel]
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    schema: str = ""
    version: str = ""  # of the nsys that exported it
    unlaunched: int = 0  # kernels whose launch is not in the report


def read_report(path: Path) -> NsysReport:
    """Read an SQLite export.

    Raises
    ------
    FormatError
        If `path` is no such file, is damaged, or holds no kernels.
    """
    try:
        with path.open("rb") as file:
            head = file.read(100)
        size = path.stat().st_size
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from error
    if head[:16] != b"SQLite format 3\0" or len(head) < 100:
        raise FormatError(
            f"{path}: is not an SQLite file; export the report with: nsys export --type sqlite -o out.sqlite REPORT"
        )
    page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    whole = (65536 if page == 1 else page) * pages
    if size < whole:
        raise FormatError(f"{path}: is cut off, {size} of {whole} bytes are there; export or copy it again")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            return _Reader(path, connection).read()
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: is damaged, or not a report of Nsight Systems ({error}); export it again") from error


class _Reader:
    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {t: [row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(t)})")] for t in tables}
        self.strings: dict[int, str] = {}

    def read(self) -> NsysReport:
        if _KERNELS not in self.columns:
            if _GRAPHS in self.columns:
                raise FormatError(
                    f"{self.path}: holds CUDA graphs as wholes, without their kernels; record it with --cuda-graph-trace=node"
                )
            known = {"StringIds", "NVTX_EVENTS", _RUNTIME, "META_DATA_EXPORT", "TARGET_INFO_GPU"} & set(self.columns)
            if known:
                raise FormatError(
                    f"{self.path}: is a report of Nsight Systems without GPU kernels (there is no table {_KERNELS}); "
                    f"record one with: {_HOW}; or, of a model on the CPU, a session with: calmnb profile"
                )
            raise FormatError(
                f"{self.path}: is not a report of Nsight Systems (there is no table {_KERNELS}); record one with: {_HOW}"
            )
        for name in ("start", "end"):
            if name not in self.columns[_KERNELS]:
                raise FormatError(f"{self.path}: {_KERNELS} has no column {name}; export it again with a newer nsys")
        self.strings = {int(i): str(text) for i, text in self.rows("StringIds", "id", "value") if i is not None}
        launches = self.launches()
        told = {str(name): str(value) for name, value in self.rows("META_DATA_EXPORT", "name", "value")}
        versions = (told.get("EXPORT_SCHEMA_VERSION", ""), told.get("EXPORT_PRODUCT_VERSION", ""))
        report = NsysReport([], self.devices(), *versions)
        around = self.ranges_of(launches)
        names = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId", "graphNodeId")
        titles = self.rows(_KERNELS, *names, "demangledName", "shortName", "name")
        for start, end, device, stream, pid, correlation, node, demangled, short, plain in titles:
            if start is None or end is None:
                continue
            begin, finish = int(start), int(end)
            if finish < begin:
                raise FormatError(f"{self.path}: a kernel ends at {finish} ns, before its start at {begin}; export it again")
            process = -1 if pid is None else int(pid) >> 24
            key = (process, -1 if correlation is None else int(correlation))
            launch = key if key in launches else (-1, key[1])
            if launch not in launches:
                report.unlaunched += 1
            label = next((text for value in (demangled, short, plain) if (text := self.text(value))), "unknown kernel")
            at = (_whole(device, 0), _whole(stream, 0), process, key[1], _whole(node, -1))
            report.kernels.append(GpuKernel(label, begin, finish, *at, around.get(launch, ())))
        if not report.kernels:
            raise FormatError(f"{self.path}: no kernel ran while it was recorded; record again with: {_HOW}")
        report.kernels.sort(key=lambda kernel: (kernel.start, kernel.end))
        return report

    def rows(self, table: str, *names: str) -> list[tuple[Any, ...]]:
        """Rows of `table` with the columns `names`; None for a column, and nothing for a table, that is not there."""
        there = self.columns.get(table)
        if there is None:
            return []
        listed = ", ".join(_quoted(name) if name in there else "NULL" for name in names)
        return self.connection.execute(f"SELECT {listed} FROM {_quoted(table)}").fetchall()

    def text(self, value: Any) -> str:
        """A string column holds an id into StringIds, or in some exports the text itself."""
        if value is None:
            return ""
        return value if isinstance(value, str) else self.strings.get(int(value), "")

    def launches(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(process, correlation id) -> (thread, time) of the call that launched; process -1 means any."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for start, thread, correlation in self.rows(_RUNTIME, "start", "globalTid", "correlationId"):
            if start is None or correlation is None:
                continue
            tid = _whole(thread, -1)
            for process in {tid >> 24, -1}:
                found.setdefault((process, int(correlation)), (tid, int(start)))
        return found

    def ranges_of(self, launches: dict[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], tuple[NvtxRange, ...]]:
        """Open ranges of every launch: those of its thread that were pushed, those of its process that were started."""
        pushed, started = self.nvtx()
        if not pushed and not started:
            return {}
        by_thread: dict[int, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        for key, (thread, start) in launches.items():
            by_thread[thread].append((start, key))
        around: dict[tuple[int, int], tuple[NvtxRange, ...]] = {}
        for thread, calls in by_thread.items():
            ranges = [*pushed.get(thread, ()), *started.get(thread >> 24, ())]
            if not ranges:
                continue
            ranges.sort(key=lambda r: (r.start, -r.end))
            calls.sort()
            is_open: list[NvtxRange] = []
            following = 0
            for time, key in calls:
                while following < len(ranges) and ranges[following].start <= time:
                    is_open.append(ranges[following])
                    following += 1
                is_open = [r for r in is_open if r.end >= time]
                around[key] = tuple(is_open)
        return around

    def nvtx(self) -> tuple[dict[int, list[NvtxRange]], dict[int, list[NvtxRange]]]:
        """Pushed ranges by thread, started ranges by process."""
        pushed: dict[int, list[NvtxRange]] = defaultdict(list)
        started: dict[int, list[NvtxRange]] = defaultdict(list)
        names = ("eventType", "start", "end", "text", "textId", "globalTid", "domainId", *_PAYLOADS)
        rows = self.rows("NVTX_EVENTS", *names)
        domains = {
            (_whole(tid, -1) >> 24, _whole(domain, 0)): self.text(text) or self.text(text_id)
            for kind, _, _, text, text_id, tid, domain, *_ in rows
            if kind == _DOMAIN
        }
        for kind, start, end, text, text_id, tid, domain, *payloads in rows:
            kind = _PUSH_POP if kind is None and end is not None else kind
            if kind not in (_PUSH_POP, _START_END) or start is None:
                continue
            label = self.text(text) or self.text(text_id)
            thread = _whole(tid, -1)
            home = domains.get((thread >> 24, _whole(domain, 0)), "")
            payload = next((int(value) for value in payloads if value), 0)
            made = NvtxRange(label, home, int(start), math.inf if end is None else int(end), payload)
            (pushed[thread] if kind == _PUSH_POP else started[thread >> 24]).append(made)
        return pushed, started

    def devices(self) -> dict[int, dict[str, Any]]:
        """CUDA device number -> name, and bandwidth in bytes/s where the report has it."""
        gpus = {
            _whole(i, 0): {"name": self.text(name), "bytes_per_s": _whole(rate, 0)}
            for i, name, rate in self.rows("TARGET_INFO_GPU", "id", "name", "memoryBandwidth")
        }
        mapped = {
            _whole(cuda, 0): gpus[_whole(gpu, 0)]
            for gpu, cuda in self.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId")
            if _whole(gpu, 0) in gpus
        }
        return mapped or gpus


def _whole(value: Any, default: int) -> int:
    return default if value is None else int(value)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
