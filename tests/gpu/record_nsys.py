"""Record decode steps under a real Nsight Systems: ``python -m tests.gpu.record_nsys --out notebooks/data``.

Writes SQLite exports, without the tables that calmnb does not read: Mistral-7B fp8 kernel by kernel inside NVTX ranges, as
``calmnb.profile.shape_tools.shape_nsys`` records it, and Llama-3.2-1B fp8 in graphs, with and without dependent launch. Prints
the stages of the latter beside CUPTI's and the stamps' times of the same graphs. Needs nsys on the PATH, and an nvtx that
suits it (2023.4 sees no ranges of nvtx 0.2.13 and later).
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
from calmnb.engine.cuda_device import CudaDevice
from calmnb.errors import CalmnbError
from calmnb.profile import Session, SessionRecorder
from calmnb.profile.cupti import trace_steps
from calmnb.profile.nsight import nsys_script
from calmnb.profile.nsys import read_nsys
from calmnb.profile.shape import file_name
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
import os

os.environ["CALMNB_PDL"] = "{pdl}"
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
        used = [f"SELECT {name} FROM CUPTI_ACTIVITY_KIND_KERNEL" for name in ("demangledName", "shortName")]
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone():
            used.append("SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL")  # a null in a list is not in any
        db.execute(f"DELETE FROM StringIds WHERE id NOT IN ({' UNION '.join(used)})")
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
    """Time of a step's stages, us; what two kernels share counts for the first."""
    times: pd.Series = session.pivot("stage")["time_us"]
    return times


def here(how: str, *, pdl: bool) -> Session:
    """Steps of the same graph in this process, by CUPTI's records or by stamps."""
    config = shape_config("llama-3.2-1b", "fp8")
    with open_random_engine(config, is_tied=True, seq_len=1064, gpu=CudaDevice(pdl=pdl)) as engine:
        engine.pretend_cached(CONTEXT)
        recorder = SessionRecorder(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
        if how == "cupti":
            recorder.steps += trace_steps(engine, CONTEXT, 8)
        else:
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
    name = file_name(shape, dtype, "fp16", device=arguments.device, tool="nsys", ending="sqlite")
    ranged = under_nsys(code, arguments.out / name, config=config)
    print(ranged.events[["layer", "stage", "kernel", "duration_s", "nvtx"]].head(8).to_string())
    columns = {}
    for pdl in (True, False):
        name = f"{arguments.device}-nsys-graph{'' if pdl else '-no-pdl'}-llama-3.2-1b-fp8.sqlite"
        what = "dependent" if pdl else "one by one"
        columns[f"nsys, {what}"] = stage_times(under_nsys(GRAPHS.format(pdl=int(pdl)), arguments.out / name))
        for how in ("cupti", "stamps"):
            try:
                columns[f"{how}, {what}"] = stage_times(here(how, pdl=pdl))
            except CalmnbError as error:
                print(f"{how}: {type(error).__name__}: {error}")
    print("Llama-3.2-1B fp8 in graphs, 1,000 positions, us a step:")
    table = pd.DataFrame(columns)
    table.loc["sum"] = table.sum()
    print(table.round(1).to_string())


if __name__ == "__main__":
    main()
