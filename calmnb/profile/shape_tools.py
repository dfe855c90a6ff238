"""NVIDIA's own tools on a shape of random weights, where they are there; else what they said on an H200.

`shape_ncu` and `shape_nsys` are to the outside tools what `calmnb.profile.shape.shape_session` is to calmnb's own recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from calmnb.config import KvDtype, WeightDtype
from calmnb.errors import CalmnbError
from calmnb.profile.session import Session
from calmnb.profile.shape import file_name, gpu_problem, saved_file
from calmnb.shapes import TIED, shape_config

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["shape_ncu", "shape_nsys"]

Say = Callable[[str], None]

_SCRIPT = """
from types import SimpleNamespace

from calmnb.engine.cuda import open_random_engine
from calmnb.profile import SessionRecorder
from calmnb.shapes import TIED, shape_config

shape, dtype, kv_dtype, context = {shape!r}, {dtype!r}, {kv_dtype!r}, {context}
with open_random_engine(shape_config(shape, dtype), is_tied=shape in TIED, seq_len=context + 16, kv_dtype=kv_dtype) as engine:
    engine.pretend_cached(context)
    engine.time_source = "events"
    engine.recorder = SessionRecorder(SimpleNamespace(engine=engine))
    for _ in engine.decode_many(1, context, 2):
        pass
    engine.gpu.profiler(True)
    for _ in engine.decode_many(1, context, 4):
        pass
    engine.gpu.profiler(False)
"""


def shape_ncu(
    shape: str,
    dtype: WeightDtype = "fp16",
    kv_dtype: KvDtype = "fp16",
    *,
    context: int = 1000,
    device: str = "h200",
    say: Say = print,
) -> tuple[Session, pd.DataFrame]:
    """One decode step of `shape` under Nsight Compute, run now where that is possible, else as saved; say which.

    Parameters
    ----------
    shape, dtype, kv_dtype
        As for `calmnb.profile.shape.profile_shape`. Four of its layers are measured: they are alike.
    context
        Positions cached before the step.
    device
        Whose saved measurement.
    say
        Told in one line what is shown.

    Returns
    -------
    session : Session
        Steps of the same sizes at the same position, with declared bytes.
    launches : DataFrame
        As `calmnb.profile.ncu.read_ncu_csv`: `calmnb.profile.ncu.attach_measured` sets them side by side.

    Raises
    ------
    FormatError
        If nothing can be measured here and there is nothing saved.
    """
    from calmnb.profile.ncu import read_ncu_csv
    from calmnb.profile.ncu_step import measure_step

    what = f"{shape} {dtype}, KV {kv_dtype}"
    problem = gpu_problem()
    if not problem:
        try:
            session, launches, _ = measure_step(
                shape_config(shape, dtype), is_tied=shape in TIED, kv_dtype=kv_dtype, context=context, name=shape, output=_quiet
            )
        except CalmnbError as error:
            problem = f"not measured here: {error}"
        else:
            say(f"{what}: measured now by Nsight Compute on {session.meta['device']}")
            return session, launches
    launches = read_ncu_csv(saved_file(file_name(shape, dtype, kv_dtype, device=device, tool="ncu", ending="csv")))
    session = Session.load(saved_file(file_name(shape, dtype, kv_dtype, device=device, tool="ncu")))
    say(f"{what}: {problem}; showing {session.meta['device']}, measured on {str(session.meta.get('date', ''))[:10]}")
    return session, launches


def shape_nsys(
    shape: str,
    dtype: WeightDtype = "fp16",
    kv_dtype: KvDtype = "fp16",
    *,
    context: int = 1000,
    device: str = "h200",
    say: Say = print,
) -> Session:
    """A few decode steps of `shape` under Nsight Systems, run now where that is possible, else as saved; say which.

    Parameters
    ----------
    shape, dtype, kv_dtype, context, device, say
        As for `shape_ncu`.

    Returns
    -------
    Session
        As `calmnb.read_nsys`, with bytes and FLOPs of the model.

    Raises
    ------
    FormatError
        If nothing can be recorded here and there is nothing saved.
    """
    import tempfile
    from pathlib import Path

    from calmnb.profile.nsight import nsys_script
    from calmnb.profile.nsys import read_nsys

    config, problem = shape_config(shape, dtype), gpu_problem()
    if not problem:
        try:
            with tempfile.TemporaryDirectory(prefix="calmnb-nsys-") as folder:
                report = Path(folder) / "report"
                code = _SCRIPT.format(shape=shape, dtype=dtype, kv_dtype=kv_dtype, context=context)
                nsys_script(code, report=report, capture_range=True, output=_quiet)
                session = read_nsys(report.with_suffix(".sqlite"), config=config, kv_dtype=kv_dtype)
        except CalmnbError as error:
            problem = f"not run here: {error}"
        else:
            say(f"{shape} {dtype}: run now under Nsight Systems on {session.meta['device']}")
            return session
    path = saved_file(file_name(shape, dtype, kv_dtype, device=device, tool="nsys", ending="sqlite"))
    session = read_nsys(path, config=config, kv_dtype=kv_dtype)
    say(f"{shape} {dtype}: {problem}; showing {session.meta['device']}, recorded by nsys {session.meta['nsys']['version']}")
    return session


def _quiet(line: str) -> None:
    """Keep what program and tool print out of the notebook."""
