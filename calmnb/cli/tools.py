"""Commands that run a program under NVIDIA's profilers: nsys, ncu."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calmnb.cli.common import Json, app, console, error_console, print_json, table
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
    error_console().print(f"[dim]wrote {output}; open it with calmnb.Session.load[/]", highlight=False, soft_wrap=True)


@app.command(context_settings=_SETTINGS)
def ncu(
    command: Command,
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
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write ncu's own CSV here.")] = None,
    as_json: Json = False,
) -> None:
    """Run a program under NVIDIA Nsight Compute, and print the bytes that each kernel moved to and from memory.

    Every kernel is run several times: measure few of them. A single file that ends in .csv is not run but read.

    Example: `calmnb ncu --count 400 --session run.calmprof -- calmnb generate demo -i Hello -n 4`
    """
    from calmnb.profile.attribution import STEP_KERNELS
    from calmnb.profile.ncu import attach_measured, ncu_stages, read_ncu_csv
    from calmnb.profile.nsight import run_ncu
    from calmnb.profile.session import Session

    declared = Session.load(session) if session else None
    if len(command) == 1 and command[0].endswith(".csv"):
        launches = read_ncu_csv(Path(command[0]))
    else:
        if kernels is None and command[0] == "calmnb":
            kernels = STEP_KERNELS
        text = run_ncu(command, skip=skip, count=count, kernels=kernels, output=_pass_on)
        if output:
            write_text(output, text)
        launches = read_ncu_csv(text + "\n")
    if declared is not None:
        measured, columns = attach_measured(declared, launches, step=step), _COMPARED
    else:
        measured, columns = _by_kernel(ncu_stages(launches)), _MEASURED
    if as_json:
        print_json(measured.to_dict("records"))
        return
    title = "one step: bytes declared and measured" if declared else "all launches: bytes from and to memory"
    out = table(title, "kernel", "stage", *(name for name, *_ in columns))
    _shorten(out)
    for record in measured.to_dict("records"):
        cells = (_cell(record[key], unit, form) for _, key, unit, form in columns)
        out.add_row(str(record["kernel"]), str(record["stage"]), *cells)
    console().print(out)


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
    out = console()
    phase: Any = "decode" if len(session.kernels()) else "prefill"
    stages = table(
        f"a {'step' if phase == 'decode' else 'prompt step'}, stage by stage (median)", "stage", "us", "share", "GB/s"
    )
    for record in session.stages(phase).to_dict("records"):
        numbers = (_cell(record["time_us"], 1, ",.1f"), f"{record['share_percent']:.1f}%", _cell(record["gb_per_s"], 1, ",.0f"))
        stages.add_row(str(record["stage"]), *numbers)
    out.print(stages)
    kernels = table("all steps, kernel by kernel", "kernel", "stage", "calls", "total ms", "mean us", "share")
    _shorten(kernels)
    listed = session.kernels(phase)
    listed = listed[listed["stage"] != "gap"]
    for record in listed.head(rows).to_dict("records"):
        kernels.add_row(
            str(record["kernel"]),
            str(record["stage"]),
            f"{record['calls']}",
            f"{record['total_ms']:.3f}",
            f"{record['mean_us']:.2f}",
            f"{record['share_percent']:.1f}%",
        )
    if len(listed) > rows:
        kernels.caption = f"{len(listed) - rows} more kernels; --rows lists them"
    out.print(kernels)
    out.print(session.summary(), highlight=False, soft_wrap=True)


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
