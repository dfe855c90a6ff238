"""Commands that measure: bandwidth, profile, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calmnb.cli.common import (
    Context,
    Device,
    Json,
    KvDtype,
    ModelArgument,
    Threads,
    app,
    console,
    error_console,
    load_model,
    print_json,
)

__all__ = ["bandwidth", "profile"]

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."


@app.command()
def bandwidth(threads: Threads = None, as_json: Json = False) -> None:
    """Measure how fast this machine reads memory: the peak that every percentage refers to.

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
    model: ModelArgument = "demo",
    prompt: Annotated[
        str, typer.Option("-i", "--prompt", help="What to ask; wrapped in the model's chat template.")
    ] = DEFAULT_PROMPT,
    tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2, help="Tokens to decode.")] = 64,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the session here (.calmprof).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace (open it in Perfetto).")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the event table as CSV.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="Write every figure as PNG into this folder.")] = None,
    context: Context = None,
    kv_dtype: KvDtype = "fp16",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Decode with every kernel timed, and print where the time and the bytes went.

    Example: `calmnb profile demo:gf4 -n 128 --trace trace.json --plots figures`
    """
    from calmnb.demo import print_stages, write_plots
    from calmnb.profile import profile as capture

    with load_model(model, device=device, threads=threads, context=context, kv_dtype=kv_dtype) as loaded:
        session = capture(loaded, [{"role": "user", "content": prompt}], tokens=tokens)
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
    written = [str(path) for path in (output, trace, csv, plots) if path]
    if written:
        error_console().print(f"[dim]wrote {', '.join(written)}[/]", highlight=False, soft_wrap=True)
