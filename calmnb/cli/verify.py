"""The command that checks the profiler itself: verify-profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calmnb.cli.common import (
    Device,
    Json,
    KvDtype,
    Threads,
    app,
    check_outputs,
    console,
    load_model,
    note,
    one_of,
    print_json,
    table,
)
from calmnb.errors import DeviceError
from calmnb.files import write_text

if TYPE_CHECKING:
    from calmnb.config import ModelConfig
    from calmnb.profile.verify import Fidelity

__all__ = ["verify_profile"]


@app.command("verify-profile")
def verify_profile(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A .calm file, `demo`, or `demo:DTYPE`; with --shape, leave it out.")
    ] = "demo",
    shape: Annotated[str | None, typer.Option("--shape", help="Random weights of this shape on a GPU: mistral-7b, ...")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Weights of the shape: fp16, fp8, gf4.")] = "fp16",
    at: Annotated[int, typer.Option("--at", min=0, help="Positions cached before the first step (on a GPU).")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=8, help="Steps of each measurement.")] = 48,
    kv_dtype: KvDtype = "fp16",
    device: Device = "auto",
    threads: Threads = None,
    with_ncu: Annotated[bool, typer.Option("--ncu/--no-ncu", help="Measure bytes with Nsight Compute, where it is.")] = True,
    with_cupti: Annotated[bool, typer.Option("--cupti/--no-cupti", help="Ask CUPTI, where it is installed.")] = True,
    out: Annotated[Path | None, typer.Option("--out", help="Write the table as Markdown here.")] = None,
    as_json: Json = False,
) -> None:
    """Check the profiler: its times against other clocks and tools, its bytes against counters, its cost against its bounds.

    Ends with status 1 where a bound is not kept.

    Example: `calmnb verify-profile --shape mistral-7b --dtype fp8 --out fidelity.md`
    """
    from calmnb.profile.verify_report import fidelity_markdown

    check_outputs({"--out": out}, [model])
    found = _measure(model, shape, dtype, at, steps, kv_dtype, device, threads, with_ncu, with_cupti)
    if out:
        write_text(out, fidelity_markdown(found, command=_command(model, shape, dtype, at, kv_dtype)))
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
        if out:
            note(f"wrote {out}")
    if found.failed:
        raise typer.Exit(1)


def _measure(
    model: str, shape: str | None, dtype: str, at: int, steps: int, kv_dtype: str, device: str, threads: int | None,
    with_ncu: bool, with_cupti: bool,
) -> Fidelity:  # fmt: skip
    from calmnb.config import KV_DTYPES, WEIGHT_DTYPES
    from calmnb.profile.verify import verify_engine, verify_model
    from calmnb.shapes import TIED, shape_config

    options: dict[str, Any] = {"context": at, "steps": steps, "use_cupti": with_cupti, "say": _say}
    seq_len = at + 4 * steps
    if shape:
        from calmnb.engine import _cuda_problem

        config = shape_config(shape, one_of("--dtype", dtype, WEIGHT_DTYPES))
        kv: Any = one_of("--kv-dtype", kv_dtype, KV_DTYPES)
        problem = _cuda_problem()
        if problem:
            raise DeviceError(
                f"--shape {shape} was asked for: random weights are made on a GPU, but {problem}. "
                "Check a .calm file on the CPU instead: calmnb verify-profile demo"
            )
        from calmnb.engine.cuda import open_random_engine

        _say(f"{shape} {dtype}: making random weights")
        with open_random_engine(config, is_tied=shape in TIED, seq_len=seq_len, kv_dtype=kv, progress=_say) as engine:
            found = verify_engine(engine, shape, **options)
        return _with_bytes(found, config, shape in TIED, kv, at, with_ncu)
    with load_model(model, device=device, threads=threads, kv_dtype=kv_dtype, context=seq_len) as loaded:
        name = Path(model).stem if model.endswith(".calm") else model
        if loaded.engine.info.engine != "cuda":
            return verify_model(loaded, name, steps=min(steps, 24), say=_say)
        found = verify_engine(loaded.engine, name, **options)
        config, is_tied = loaded.engine.config, loaded.file.weights.is_tied
    return _with_bytes(found, config, is_tied, kv_dtype, at, with_ncu)


def _with_bytes(found: Fidelity, config: ModelConfig, is_tied: bool, kv_dtype: str, at: int, with_ncu: bool) -> Fidelity:
    """`found` with what Nsight Compute measured; the engine is closed by now, so that both fit on one GPU."""
    import dataclasses

    from calmnb.profile.verify import verify_bytes

    if not with_ncu:
        return found
    rows, check = verify_bytes(config, is_tied=is_tied, kv_dtype=kv_dtype, context=at, say=_say)
    return dataclasses.replace(found, checks=[*found.checks, check], bytes=rows)


def _command(model: str, shape: str | None, dtype: str, at: int, kv_dtype: str) -> str:
    words = ["calmnb", "verify-profile", *(["--shape", shape, "--dtype", dtype] if shape else [model])]
    words += ["--at", str(at)] if at else []
    return " ".join([*words, "--kv-dtype", kv_dtype] if kv_dtype != "fp16" else words)


def _show(found: Fidelity) -> None:
    out = console()
    meta = found.meta
    rows = table(f"{meta['model']} {meta['dtype']} on {meta['device']}", "what", "measured", "bound", "result")
    for check in found.checks:
        style = "bold red" if check.passed is False else ""
        rows.add_row(check.what, check.shown, check.bound, check.result, style=style)
    out.print(rows)
    for check in found.checks:
        if check.note and (check.value is None or check.passed is False):
            out.print(f"{check.what}: {check.note}", highlight=False, soft_wrap=True, markup=False)
    if found.kernels:
        kernels = table("kernels alone, us a launch", "stage", "kernel", "calls", "stamps", "events", "CUPTI")
        for row in found.kernels:
            times = (row[f"{kind}_us"] for kind in ("stamps", "events", "cupti"))
            kernels.add_row(row["stage"], row["kernel"], str(row["calls"]), *("" if t is None else f"{t:.2f}" for t in times))
        out.print(kernels)


def _say(line: str) -> None:
    note(line)
