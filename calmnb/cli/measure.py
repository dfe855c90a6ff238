"""Commands that measure: bandwidth, profile, bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calmnb.cli.common import (
    Context,
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
    refuse,
    resolve_model,
)
from calmnb.errors import ConfigError, DeviceError
from calmnb.shapes import SHAPES

if TYPE_CHECKING:
    from calmnb.profile import Session

__all__ = ["bandwidth", "bench", "profile"]

SHAPE_NAMES = ", ".join(SHAPES)
DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."


@app.command()
def bandwidth(threads: Threads = None, as_json: Json = False) -> None:
    """Measure how fast the CPU reads this machine's memory: the peak that percentages refer to, except on a GPU.

    A GPU's own is measured and printed by `calmnb bench` (`read GB/s`).

    Example: `calmnb bandwidth --threads 2`
    """
    import dataclasses

    from calmnb.profile.bandwidth import measure_bandwidth

    result = measure_bandwidth(threads=threads)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    typer.echo(str(result))


@app.command()
def profile(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A .calm file, `demo`, `demo:DTYPE`, or a saved session (.calmprof) to show."),
    ] = "demo",
    prompt: Annotated[
        str, typer.Option("-i", "--prompt", help="What to ask; wrapped in the model's chat template.")
    ] = DEFAULT_PROMPT,
    tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2, help="Tokens to decode.")] = 64,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the session here (.calmprof).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace (open it in Perfetto).")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the event table as CSV.")] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Write rooflines, layers, latency, KV cost and waterfall as PNG here.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"In place of a model: random weights of this shape on a GPU: {SHAPE_NAMES}."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Weights of the shape: fp16, fp8 or gf4.")] = "fp16",
    contexts: Annotated[
        list[int] | None, typer.Option("--at", min=0, help="With --shape: positions cached before a run; may be given again.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="How a GPU's kernels are timed: stamps, stamps-light, events or cupti.")
    ] = None,
    context: Context = None,
    kv_dtype: KvDtype = "fp16",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Decode with every kernel timed, and print where the time and the bytes went.

    With a shape (`--shape mistral-7b --dtype fp8 --at 0 --at 4000 -n 6`), a 512-token prompt and some tokens at each context
    are recorded, ten times in turns. Of a saved session, nothing is recorded: its tables, figures or trace are written.

    Example: `calmnb profile demo:gf4 -n 128 --trace trace.json --plots figures`
    """
    from calmnb.demo import print_stages, write_plots
    from calmnb.profile import Session
    from calmnb.profile import profile as capture
    from calmnb.profile.capture import GPU_SOURCES

    chosen = one_of("--source", source, (*GPU_SOURCES, "cpu")) if source else None
    check_outputs({"-o": output, "--trace": trace, "--csv": csv, "--plots": plots}, [model], folder="--plots")
    recording = ("prompt", "tokens", "dtype", "contexts", "source", "context", "kv_dtype", "device", "threads")
    if shape:
        refuse(
            call,
            ["model", "prompt", "context", "device", "threads"],
            "does not go with --shape, which runs random weights on a GPU",
        )
        session = _profile_shape(shape, dtype, kv_dtype, contexts or [0], tokens, chosen)
    elif Path(model).suffix == ".calmprof":
        refuse(call, recording, f"{model} is a saved session, which is shown as it was recorded")
        session = Session.load(Path(model).expanduser())
    else:
        refuse(call, ["dtype", "contexts"], "goes with --shape; a model has its own storage, as in demo:gf4")
        with load_model(model, device=device, threads=threads, context=context, kv_dtype=kv_dtype) as loaded:
            session = capture(loaded, [{"role": "user", "content": prompt}], tokens=tokens, source=chosen)
    if output:
        session.save(output)
    if trace:
        session.to_chrome_trace(trace)
    if csv:
        session.to_csv(csv)
    if plots:
        write_plots(session, plots)
    if as_json:
        print_json({"summary": session.summary(), "meta": session.meta, "stages": session.stages().to_dict("records")})
        return
    print_stages(session, console())
    if session.meta.get("time_note"):
        note(f"times by {session.meta['time_source']}: {session.meta['time_note']}")
    written = [str(path) for path in (output, trace, csv, plots) if path]
    if written:
        note(f"wrote {', '.join(written)}")


def _profile_shape(shape: str, dtype: str, kv_dtype: str, contexts: Sequence[int], tokens: int, source: str | None) -> Session:
    """Record random weights on a GPU, telling on stderr how far it is."""
    from calmnb.config import KV_DTYPES, WEIGHT_DTYPES
    from calmnb.profile.shape import file_name, find_saved, gpu_problem, profile_shape

    if source not in (None, "stamps"):
        raise ConfigError(f"--source is {source!r}; a shape is timed by stamps: leave the option out")
    if problem := gpu_problem():
        saved = find_saved(file_name(shape, dtype, kv_dtype))
        known = f"; the recording of an H200 comes with calmnb: `calmnb profile {saved}`" if saved else ""
        raise DeviceError(f"a shape runs with random weights made on a GPU: {problem}; profile a .calm file on the CPU{known}")
    return profile_shape(
        shape,
        dtype=one_of("--dtype", dtype, WEIGHT_DTYPES),
        kv_dtype=one_of("--kv-dtype", kv_dtype, KV_DTYPES),
        contexts=contexts,
        tokens=tokens,
        warmup=min(2, tokens - 1),
        progress=note,
    )


@app.command()
def bench(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A .calm file, `demo`, or `demo:DTYPE`; with --shape, leave it out."),
    ] = "demo",
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"Random weights of this shape on a GPU: {SHAPE_NAMES}."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Weights of the shape: fp16, fp8, gf4; may be given again.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--at", min=0, help="Positions cached before timing; may be given again.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed runs; the median is reported.")] = 5,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Tokens timed in each run.")] = 128,
    kv_dtype: KvDtype = "fp16",
    device: Device = "auto",
    threads: Threads = None,
    results: Annotated[Path | None, typer.Option("--append", help="Append the rows to this JSON-lines file.")] = None,
    as_json: Json = False,
) -> None:
    """Time greedy decoding, token loop and all, and hold it against the memory's peak.

    Example: `calmnb bench --shape mistral-7b --dtype fp8 --at 0 --at 4000`
    """
    import dataclasses
    from typing import Any

    from calmnb.bench import append_results, format_rows
    from calmnb.bench import bench as run
    from calmnb.config import KV_DTYPES, WEIGHT_DTYPES
    from calmnb.engine import DEVICES

    check_outputs({"--append": results}, [model], appended="--append")
    options: dict[str, Any] = {
        "contexts": tuple(contexts or (0,)),
        "kv_dtype": one_of("--kv-dtype", kv_dtype, KV_DTYPES),
        "device": one_of("--device", device, DEVICES),
        "runs": runs,
        "tokens": tokens,
        "threads": threads,
        "progress": note,
    }
    if shape:
        refuse(call, ["model", "threads"], "does not go with --shape, which runs random weights on a GPU")
        dtypes = [one_of("--dtype", each, WEIGHT_DTYPES) for each in dtype or ["fp16"]]
        rows = [row for each in dtypes for row in run(shape, dtype=each, **options)]
    else:
        refuse(call, ["dtype"], "goes with --shape; a model has its own storage, as in demo:gf4")
        rows = run(resolve_model(model), **options)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        typer.echo(format_rows(rows))
    if results:
        append_results(results, rows)
