"""Commands that run a program under NVIDIA's profilers: nsys, ncu."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calmnb.cli.common import (
    Json,
    KvDtype,
    app,
    check_outputs,
    console,
    error_console,
    note,
    one_of,
    print_json,
    resolve_model,
    table,
)
from calmnb.errors import ConfigError
from calmnb.files import write_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from calmnb.profile.session import Session

__all__ = ["ncu", "nsys"]

_SETTINGS = {"allow_interspersed_args": False}
Command = Annotated[list[str], typer.Argument(metavar="COMMAND", help="Program and its arguments; write `--` before it.")]


@app.command(context_settings=_SETTINGS)
def nsys(
    command: Command,
    output: Annotated[Path, typer.Option("-o", "--output", help="Save the session here.")] = Path("nsys.calmprof"),
    report: Annotated[
        Path | None, typer.Option("--report", help="Keep Nsight Systems' own report and its SQLite export here.")
    ] = None,
    capture_range: Annotated[
        bool, typer.Option("--capture-range", help="Record only from cudaProfilerStart to cudaProfilerStop.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Kernels to list.")] = 12,
    as_json: Json = False,
) -> None:
    """Run a program under NVIDIA Nsight Systems, and print which kernels its time went to.

    A single file that ends in .nsys-rep or .sqlite is not run but read.

    Example: `calmnb nsys -o run.calmprof -- calmnb generate demo -i Hello -n 32`
    """
    from calmnb.profile.nsight import run_nsys
    from calmnb.profile.nsys import read_nsys

    kept = {} if report is None else {s: Path(str(report).removesuffix(".nsys-rep") + s) for s in (".nsys-rep", ".sqlite")}
    check_outputs({"-o": output} | {f"--report ({suffix})": path for suffix, path in kept.items()}, command)
    if len(command) == 1 and command[0].endswith((".nsys-rep", ".qdrep", ".sqlite")):
        session = read_nsys(command[0])
    elif report is not None:
        session = read_nsys(run_nsys(command, report, capture_range=capture_range, output=_pass_on))
    else:
        with tempfile.TemporaryDirectory(prefix="calmnb-nsys-") as folder:
            session = read_nsys(run_nsys(command, Path(folder) / "report", capture_range=capture_range, output=_pass_on))
    session.meta["settings"]["command"] = command
    session.save(output)
    if as_json:
        tables = {name: getattr(session, name)().to_dict("records") for name in ("stages", "kernels")}
        print_json({"summary": session.summary(), "meta": session.meta, **tables})
        return
    _print_session(session, rows)
    if session.meta.get("time_note"):
        error_console().print(f"note: {session.meta['time_note']}", markup=False, highlight=False, soft_wrap=True)
    note(f"wrote {output}; open it with calmnb.Session.load")


@app.command(context_settings=_SETTINGS)
def ncu(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]", help="Program and its arguments, behind `--`; or a .calm file; or nothing, with --shape."
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="One decode step of this shape with random weights: mistral-7b, ...")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Weights of the shape: fp16, fp8, gf4.")] = "fp16",
    at: Annotated[int, typer.Option("--at", min=0, help="Positions cached before the step of a model or shape.")] = 0,
    layers: Annotated[int, typer.Option("--layers", min=0, help="Layers of it to run, since they are alike; 0 is all.")] = 4,
    kv_dtype: KvDtype = "fp16",
    session: Annotated[
        Path | None, typer.Option("--session", help="A saved session of the same model, to set declared bytes beside measured.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Step of that session; the first that fits.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Kernels to pass over.")] = 0,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Kernels to measure; all when left out.")] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels", help="Measure kernels whose name has this regular expression; of calmnb, those of decode steps."
        ),
    ] = None,
    in_range: Annotated[
        bool, typer.Option("--capture-range", help="Measure only from cudaProfilerStart to cudaProfilerStop.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write ncu's own CSV here.")] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Save the session with measured bytes in its events here (.calmprof).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the bytes that each kernel moves to and from memory, with NVIDIA Nsight Compute.

    With --shape, or for a .calm file, one decode step is measured, and declared bytes stand beside it; weights are made up,
    since bytes do not depend on what they say. Any other program is run as it is. Every kernel is run several times: measure
    few of them. A single file that ends in .csv is not run but read.

    Example: `calmnb ncu --shape mistral-7b --dtype fp8`
    """
    from calmnb.profile.attribution import STEP_KERNELS
    from calmnb.profile.ncu import add_measured, attach_measured, ncu_stages, read_ncu_csv
    from calmnb.profile.nsight import run_ncu
    from calmnb.profile.session import Session

    words = command or []
    if not words and not shape:
        raise ConfigError(
            "ncu: there is nothing to measure; give --shape, a .calm file, or a command: calmnb ncu -- calmnb bench"
        )
    check_outputs({"-o": output, "--save": save}, words)
    check_outputs({"-o": output}, [session])  # --save may add to the session that it was given
    declared = Session.load(session) if session else None
    model = words[0] if len(words) == 1 and (words[0].endswith(".calm") or words[0].split(":")[0] == "demo") else None
    if shape or model:
        if session or (shape and words):
            raise ConfigError(
                "ncu: --shape and a .calm file bring their own session and command; leave --session and COMMAND out"
            )
        declared, launches, text = _measured_step(shape, model, dtype, at, layers, kv_dtype)
    elif len(words) == 1 and words[0].endswith(".csv"):
        launches, text = read_ncu_csv(Path(words[0])), ""
    else:
        if kernels is None and words[:1] == ["calmnb"]:
            kernels = STEP_KERNELS
        text = run_ncu(words, skip=skip, count=count, kernels=kernels, in_range=in_range, output=_pass_on)
        launches = read_ncu_csv(text + "\n")
    if output and text:
        write_text(output, text)
    if declared is not None:
        measured, columns = attach_measured(declared, launches, step=step), _COMPARED
        if save:
            add_measured(declared, launches, step=step).save(save)
    else:
        measured, columns = _by_kernel(ncu_stages(launches)), _MEASURED
    if as_json:
        print_json(measured.to_dict("records"))
        return
    from rich.markup import escape

    title = "one step: bytes declared and measured" if declared else "all launches: bytes from and to memory"
    out = table(title, "kernel", "stage", *(name for name, *_ in columns))
    _shorten(out)
    for record in measured.to_dict("records"):
        cells = (_cell(record[key], unit, form) for _, key, unit, form in columns)
        out.add_row(escape(str(record["kernel"])), escape(str(record["stage"])), *cells)
    console().print(out)
    if declared is not None:
        console().print(declared.summary(), markup=False, highlight=False, soft_wrap=True)


def _measured_step(
    shape: str | None, model: str | None, dtype: str, at: int, layers: int, kv_dtype: str
) -> tuple[Session, pd.DataFrame, str]:
    from calmnb.config import KV_DTYPES, WEIGHT_DTYPES
    from calmnb.profile.ncu_step import measure_step
    from calmnb.shapes import TIED, shape_config

    if shape:
        config, is_tied, name = shape_config(shape, one_of("--dtype", dtype, WEIGHT_DTYPES)), shape in TIED, shape
    else:
        from calmnb.checkpoint import open_calm

        path = resolve_model(str(model))
        with open_calm(path) as file:
            config, is_tied, name = file.weights.config, file.weights.is_tied, path.stem
    kv = one_of("--kv-dtype", kv_dtype, KV_DTYPES)
    some = layers or None
    return measure_step(config, is_tied=is_tied, kv_dtype=kv, context=at, layers=some, name=name, output=_pass_on)


_Columns = tuple[tuple[str, str, float, str], ...]
_CALLS = ("calls", "calls", 1.0, "d")
#: Title, column, unit, format.
_COMPARED: _Columns = (
    _CALLS,
    ("min MB", "bytes_min", 1e6, ",.3f"),
    ("counted MB", "bytes_counted", 1e6, ",.3f"),
    ("measured MB", "bytes_measured", 1e6, ",.3f"),
    ("measured/counted", "measured_to_counted", 1.0, ".3f"),
)
_MEASURED: _Columns = (
    _CALLS,
    ("read MB", "bytes_read", 1e6, ",.3f"),
    ("written MB", "bytes_written", 1e6, ",.3f"),
    ("under ncu us", "ncu_us", 1.0, ",.1f"),
)


def _by_kernel(launches: pd.DataFrame) -> pd.DataFrame:
    by = launches.groupby(["kernel", "stage"], sort=False)
    out = by[["bytes_read", "bytes_written", "bytes_measured"]].sum(min_count=1)
    out = out.assign(calls=by.size(), ncu_us=by["duration_s"].sum(min_count=1) * 1e6).reset_index()
    return out.sort_values("bytes_measured", ascending=False, kind="stable", ignore_index=True)


def _print_session(session: Session, rows: int) -> None:
    from rich.markup import escape

    out = console()
    phase: Any = "decode" if len(session.kernels()) else "prefill"
    stages = table(
        f"a {'step' if phase == 'decode' else 'prompt step'}, stage by stage (median)", "stage", "us", "share", "GB/s"
    )
    for record in session.stages(phase).to_dict("records"):
        numbers = (_cell(record["time_us"], 1, ",.1f"), f"{record['share_percent']:.1f}%", _cell(record["gb_per_s"], 1, ",.0f"))
        stages.add_row(escape(str(record["stage"])), *numbers)
    out.print(stages)
    kernels = table("all steps, kernel by kernel", "kernel", "stage", "calls", "total ms", "mean us", "share")
    _shorten(kernels)
    listed = session.kernels(phase)
    listed = listed[listed["stage"] != "gap"]
    for record in listed.head(rows).to_dict("records"):
        kernels.add_row(
            escape(str(record["kernel"])),
            escape(str(record["stage"])),
            f"{record['calls']}",
            f"{record['total_ms']:.3f}",
            f"{record['mean_us']:.2f}",
            f"{record['share_percent']:.1f}%",
        )
    if len(listed) > rows:
        kernels.caption = f"{len(listed) - rows} more kernels; --rows lists them"
    out.print(kernels)
    out.print(session.summary(), markup=False, highlight=False, soft_wrap=True)


def _shorten(rows: Table) -> None:
    """Cut long kernel names, so that the numbers have room."""
    rows.columns[0].no_wrap, rows.columns[0].overflow, rows.columns[0].max_width = True, "ellipsis", 40


def _cell(value: float, unit: float, form: str) -> str:
    if value != value:
        return ""
    return format(int(value) if form == "d" else value / unit, form)


def _pass_on(line: str) -> None:
    """Show what program and profiler print, out of the way of the results."""
    typer.echo(line, err=True)
