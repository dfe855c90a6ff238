"""Commands that produce or score text: generate, chat, perplexity."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calmnb.cli.common import (
    Context,
    Device,
    Json,
    KvDtype,
    MaxTokens,
    MinP,
    ModelArgument,
    OnFull,
    Repetition,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    app,
    error_console,
    load_model,
    print_json,
)
from calmnb.errors import CalmnbError, ConfigError

if TYPE_CHECKING:
    from calmnb.generate import Generation

__all__ = ["chat", "generate", "perplexity"]


@app.command()
def generate(
    model: ModelArgument = "demo",
    prompt: Annotated[str, typer.Option("-i", "--prompt", help="Text to continue; `-` reads standard input.")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    min_p: MinP = 0.1,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Repetition = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop before this text; may be given again.")] = None,
    context: Context = None,
    kv_dtype: KvDtype = "fp16",
    on_full: OnFull = "stop",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Continue a text as it stands, without a chat template.

    Example: `calmnb generate demo -i "Once upon a time" -n 64 -t 0`
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with load_model(model, device=device, threads=threads, context=context, kv_dtype=kv_dtype, on_full=on_full) as loaded:
        run = loaded.generate(
            text,
            max_tokens=max_tokens,
            temperature=temperature,
            min_p=min_p,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=tuple(stop or ()),
        )
        with run:
            if not as_json:
                sys.stdout.write(text)
            for token in run:
                if not as_json:
                    sys.stdout.write(token.text)
                    sys.stdout.flush()
        if as_json:
            print_json(_summary(run))
            return
        sys.stdout.write("\n")
        _print_rate(run)


@app.command()
def chat(
    model: ModelArgument = "demo",
    system: Annotated[str | None, typer.Option("-y", "--system", help="System prompt.")] = None,
    first: Annotated[
        str | None, typer.Option("-i", "--prompt", help="First message; the rest is read from the terminal.")
    ] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.7,
    min_p: MinP = 0.1,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Repetition = 1.0,
    seed: Seed = None,
    context: Context = None,
    kv_dtype: KvDtype = "fp16",
    on_full: OnFull = "stop",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer; an empty line, /exit or Ctrl-D ends the chat; /new starts over.

    Example: `calmnb chat demo -y "You are brief." -t 0`
    """
    from calmnb.sampler import Sampling

    sampling = Sampling(
        temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty, seed=seed
    )
    failed = False
    with load_model(model, device=device, threads=threads, context=context, kv_dtype=kv_dtype, on_full=on_full) as loaded:
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        pending = first
        while True:
            message, pending = (pending, None) if pending is not None else (_read_message(messages), None)
            if message is None or message.strip() in {"", "/exit", "/quit"}:
                break
            if message.strip() == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": message})
            try:
                run = loaded.generate(messages, max_tokens=max_tokens, sampling=sampling)
            except CalmnbError as error:
                messages.pop()
                failed = True
                error_console().print(str(error), style="red", markup=False, soft_wrap=True)
                continue
            try:
                with run:
                    for token in run:
                        sys.stdout.write(token.text)
                        sys.stdout.flush()
            except KeyboardInterrupt:
                error_console().print("\n[dim](stopped)[/]")
            sys.stdout.write("\n")
            messages.append({"role": "assistant", "content": run.text})
            _print_rate(run)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


@app.command()
def perplexity(
    model: ModelArgument = "demo",
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Text to score; calmnb's sample text when left out.")
    ] = None,
    window: Annotated[int, typer.Option("-n", "--window", min=2, help="Tokens scored together, from an empty context.")] = 256,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Step between windows; each token is scored once. The window when left out."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=2, help="Score only the first tokens of the text.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    kv_dtype: KvDtype = "fp16",
    as_json: Json = False,
) -> None:
    """Perplexity of a text, with its standard error.

    The text is cut into windows that each start from an empty context, BOS before the first alone.

    Example: `calmnb perplexity demo:gf4 --window 512`
    """
    import dataclasses

    from calmnb.perplexity import perplexity as measure
    from calmnb.perplexity import sample_text

    try:
        text = file.read_text(encoding="utf-8") if file else sample_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}") from error
    with load_model(model, device=device, threads=threads, context=window, kv_dtype=kv_dtype) as loaded:
        ids = loaded.tokenizer.encode(text)
        result = measure(loaded, ids[:limit] if limit else ids, window=window, stride=stride)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    typer.echo(f"perplexity {result.value:.3f} ± {result.error:.3f}   {result.n_scored} tokens scored, {result.seconds:.1f} s")


def _read_message(messages: list[dict[str, str]]) -> str | None:
    try:
        return input("you> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return None


def _summary(run: Generation) -> dict[str, Any]:
    return {
        "text": run.text,
        "token_ids": list(run.token_ids),
        "prompt_tokens": len(run.prompt_ids),
        "stop_reason": run.stop_reason,
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
        "tok_per_s": run.tok_per_s,
    }


def _print_rate(run: Generation) -> None:
    error_console().print(
        f"[dim]{len(run.prompt_ids)} prompt tokens in {run.prefill_s:.2f} s, {len(run.token_ids)} generated, "
        f"{run.tok_per_s:.1f} tok/s, stopped by {run.stop_reason}[/]",
        highlight=False,
    )
