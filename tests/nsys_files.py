"""Reports of Nsight Systems made by hand: SQLite files in the exporter's documented schema, with times chosen here.

``python -m tests.nsys_files SESSION OUT --at 1000`` writes three steps of a saved recording as such a report: the example of
notebook 07, for machines without nsys.

The exporter's tables differ between versions, so there are two of each: an older one with few columns, and a newer one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    pass

OLD = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, globalTid INT NOT NULL,
    correlationId INT NOT NULL, nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT NOT NULL,
    streamId INT NOT NULL, correlationId INT NOT NULL, demangledName INT NOT NULL, shortName INT NOT NULL, gridX INT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, text TEXT, globalTid INT);
"""
NEW = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.25.0');
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, memoryBandwidth INTEGER, smCount INTEGER);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER NOT NULL, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, gridX INTEGER NOT NULL,
    graphNodeId INTEGER, graphId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT,
    globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER);
"""
FORMATS = ("_fp16", "_fp8", "_gf4")
THREAD = (7 << 24) | 9
NS = 1000  # a microsecond


@dataclass
class ReportFile:
    """Collects launches and ranges, times in microseconds, and writes them as one of the two schemas."""

    path: Path
    schema: Literal["old", "new"] = "new"
    gpu: str = "NVIDIA H200"
    _rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _strings: dict[str, int] = field(default_factory=dict)
    _calls: int = 0

    def call(self, at: float, thread: int = THREAD) -> int:
        """One call of the runtime; returns its correlation id."""
        self._calls += 1
        row = {"start": at, "end": at + 1, "eventClass": 0, "globalTid": thread, "nameId": self._id("cudaLaunchKernel")}
        self._add("CUPTI_ACTIVITY_KIND_RUNTIME", row | {"correlationId": self._calls, "returnValue": 0})
        return self._calls

    def kernel(
        self, name: str, start: float, end: float, *, call: int, device: int = 0, stream: int = 13, node: int | None = None
    ) -> None:
        """One kernel; `call` launched it."""
        names = {"demangledName": self._id(name), "shortName": self._id(name.split("<")[0]), "mangledName": None}
        row = {"deviceId": device, "contextId": 1, "streamId": stream, "correlationId": call, "globalPid": 7 << 24, "gridX": 8}
        self._add("CUPTI_ACTIVITY_KIND_KERNEL", {"start": start, "end": end, "graphNodeId": node} | names | row)

    def launch(self, name: str, at: float, start: float, end: float, **options: Any) -> None:
        """A call and its kernel."""
        self.kernel(name, start, end, call=self.call(at, options.pop("thread", THREAD)), **options)

    def push(self, text: str, start: float, end: float | None, *, payload: int | None = None, thread: int = THREAD) -> None:
        """A pushed range."""
        self._range(59, text, start, end, payload, thread)

    def started(self, text: str, start: float, end: float | None, *, thread: int = THREAD) -> None:
        """A started range, which belongs to the process."""
        self._range(60, text, start, end, None, thread)

    def graph(self, names: Sequence[str], at: float, start: float, each: float = 2.0) -> None:
        """A replayed graph: one call, many kernels, `each` microseconds long and end to end."""
        call = self.call(at)
        for i, name in enumerate(names):
            self.kernel(name, start + i * each, start + (i + 1) * each, call=call, node=100 + i)

    def write(self) -> Path:
        """Make the file."""
        connection = sqlite3.connect(self.path)
        connection.executescript(OLD if self.schema == "old" else NEW)
        if self.schema == "new":
            connection.execute("INSERT INTO TARGET_INFO_GPU VALUES (1, 3, ?, 4800000000000, 132)", (self.gpu,))
            connection.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (3, 0, 7)")
            connection.execute(
                "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId) VALUES (0, 75, 'calmnb', ?, 1)", [THREAD]
            )
        connection.executemany("INSERT INTO StringIds (value, id) VALUES (?, ?)", self._strings.items())
        for table, row in self._rows:
            there = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
            kept = {name: value for name, value in row.items() if name in there}
            marks = ", ".join("?" * len(kept))
            connection.execute(f"INSERT INTO {table} ({', '.join(kept)}) VALUES ({marks})", _nanoseconds(kept))
        connection.commit()
        connection.close()
        return self.path

    def _range(self, kind: int, text: str, start: float, end: float | None, payload: int | None, thread: int) -> None:
        # The newer exporter keeps registered strings apart; both ways are used here.
        registered = self.schema == "new" and len(text) % 2 == 0
        said = {"text": None, "textId": self._id(text)} if registered else {"text": text, "textId": None}
        row = {"start": start, "end": end, "eventType": kind, "globalTid": thread, "domainId": 1, "uint64Value": payload}
        self._add("NVTX_EVENTS", row | said)

    def _id(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def _add(self, table: str, row: dict[str, Any]) -> None:
        self._rows.append((table, row))


def _nanoseconds(row: dict[str, Any]) -> list[Any]:
    return [round(v * NS) if name in ("start", "end") and v is not None else v for name, v in row.items()]


def step_names(n_layers: int, ending: Iterable[str] = ("matvec_rows", "sample_max")) -> list[str]:
    """Kernels of one of calmnb's decode steps, in order."""
    layer = ["matvec_qkv", "attention", "matvec_residual", "matvec_gateup", "matvec_residual"]
    return ["embed", *layer * n_layers, *ending]
