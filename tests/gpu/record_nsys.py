"""Record decode steps under a real Nsight Systems: ``python -m tests.gpu.record_nsys --out notebooks/data``.

Writes two SQLite exports, without the tables that calmnb does not read: Mistral-7B fp8 kernel by kernel inside NVTX ranges, as
``calmnb.profile.shape_tools.shape_nsys`` records it, and Llama-3.2-1B fp8 in graphs. Prints the kernels of the second beside
CUPTI's and the stamps' times of the same graph. Needs nsys on the PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from calmnb.engine.cuda import open_random_engine
from calmnb.profile import Session, SessionRecorder
from calmnb.profile.nsight import nsys_script
from calmnb.profile.nsys import read_nsys
from calmnb.profile.shape_tools import _SCRIPT
from calmnb.shapes import shape_config

KEPT = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "META_DATA_EXPORT",
    "NVTX_EVENTS",
    "StringIds",
    "TARGET_INFO_GPU",
)
CONTEXT = 1000
GRAPHS = """
from calmnb.engine.cuda import open_random_engine
from calmnb.shapes import shape_config

with open_random_engine(shape_config("llama-3.2-1b", "fp8"), is_tied=True, seq_len=1064) as engine:
    engine.pretend_cached(1000)
    for _ in engine.decode_many(1, 1000, 8):
        pass
    engine.gpu.profiler(True)
    for _ in engine.decode_many(1, 1008, 8):
        pass
    engine.gpu.profiler(False)
"""


def slim(source: Path, out: Path) -> None:
    """Copy what calmnb reads of an export."""
    out.unlink(missing_ok=True)
    out.write_bytes(source.read_bytes())
    with contextlib.closing(sqlite3.connect(out, isolation_level=None)) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if name not in KEPT:
                db.execute(f'DROP TABLE "{name}"')
        texts = [row[1] for row in db.execute("PRAGMA table_info(StringIds)")]
        used = "SELECT demangledName FROM K UNION SELECT shortName FROM K UNION SELECT textId FROM NVTX_EVENTS"
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone() is None:
            used = used.replace(" UNION SELECT textId FROM NVTX_EVENTS", "")
        used = used.replace("FROM K", "FROM CUPTI_ACTIVITY_KIND_KERNEL")
        db.execute(f"DELETE FROM StringIds WHERE {texts[0]} NOT IN ({used})")
        launches = "SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL"
        db.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId NOT IN ({launches})")
        db.execute("VACUUM")


def under_nsys(code: str, out: Path, **options: Any) -> Session:
    """Run `code` under nsys, keep the slim export at `out`, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        nsys_script(code, report=report, capture_range=True, output=lambda line: print("   nsys:", line))
        slim(report.with_suffix(".sqlite"), out)
    session = read_nsys(out, **options)
    print(f"{out.name}: {out.stat().st_size} bytes, {session.summary()}, {session.meta['nsys']}")
    return session


def stage_times(session: Session) -> pd.Series:
    """Mean time of each kernel of a decode step, us."""
    return session.kernels().query("stage != 'gap'").set_index("stage")["mean_us"]


def here(source: str) -> Session:
    """The same graph's steps in this process, timed by `source`."""
    with open_random_engine(shape_config("llama-3.2-1b", "fp8"), is_tied=True, seq_len=1064) as engine:
        engine.pretend_cached(CONTEXT)
        engine.time_source = source  # type: ignore[assignment]
        recorder = SessionRecorder(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
        engine.recorder = recorder
        for _ in engine.decode_many(1, CONTEXT, 16):
            pass
        engine.recorder = None
        return recorder.session()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="h200", help="start of the file names")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape, dtype = "mistral-7b", "fp8"
    code = _SCRIPT.format(shape=shape, dtype=dtype, kv_dtype="fp16", context=CONTEXT)
    config = shape_config(shape, dtype)
    ranged = under_nsys(code, arguments.out / f"{arguments.device}-nsys-{shape}-{dtype}.sqlite", config=config)
    print(ranged.events[["layer", "stage", "kernel", "duration_s", "nvtx"]].head(8).to_string())
    graphs = under_nsys(GRAPHS, arguments.out / f"{arguments.device}-nsys-graph-llama-3.2-1b-fp8.sqlite")
    columns = {"nsys": stage_times(graphs)}
    for source in ("cupti", "stamps"):
        try:
            columns[source] = stage_times(here(source))
        except Exception as error:
            print(f"{source}: {type(error).__name__}: {error}")
    print("Llama-3.2-1B fp8 in graphs, 1,000 positions, mean us a kernel:")
    print(pd.DataFrame(columns).round(2).to_string())


if __name__ == "__main__":
    main()
