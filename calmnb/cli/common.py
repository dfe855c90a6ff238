"""What the commands share: the application object, option types, and how a model is named."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from calmnb.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from calmnb.model import Model

__all__ = [
    "app",
    "check_outputs",
    "console",
    "error_console",
    "load_model",
    "note",
    "one_of",
    "print_json",
    "refuse",
    "resolve_model",
    "table",
]

#: Commands in the order that ``calmnb --help`` lists them: the order in which people meet them.
COMMANDS = (
    "demo",
    "lab",
    "chat",
    "generate",
    "profile",
    "compare",
    "bench",
    "bandwidth",
    "nsys",
    "ncu",
    "verify-profile",
    "perplexity",
    "download",
    "convert",
    "info",
    "doctor",
)


class _InOrder(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=COMMANDS.index)


app = typer.Typer(
    name="calmnb",
    cls=_InOrder,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model at the limit of your memory, and see where each token's time and bytes go.",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .calm file, or `demo`, `demo:fp16`, `demo:fp8`, `demo:gf4` for the demo model in that dtype.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or reference.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all cores when left out.")]
Context = Annotated[
    int | None, typer.Option("-c", "--context", min=1, help="Context length in tokens; the model's, at most 4096.")
]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="KV cache storage: fp16 or fp8.")]
OnFull = Annotated[str, typer.Option("--on-full", help="When the context is full: stop, or roll with attention sinks.")]
Temperature = Annotated[float, typer.Option("-t", "--temperature", help="0 is greedy.")]
MinP = Annotated[float, typer.Option("-p", "--min-p", help="Drop tokens less likely than this share of the likeliest.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that together reach this probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="1 is none; 1.1 is mild.")]
Seed = Annotated[int | None, typer.Option("-s", "--seed", help="Random seed; a new one each time when left out.")]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", min=0, help="Tokens to generate at most.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def console() -> Console:
    """Console for results, at most 100 columns when they are not shown on a terminal."""
    from rich.console import Console

    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else 100)


def error_console() -> Console:
    """Console for progress and notes, on stderr."""
    from rich.console import Console

    return Console(stderr=True)


def note(text: str) -> None:
    """Print `text`, as it is, on stderr."""
    error_console().print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print `value` as one JSON document; infinities and NaN become null."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=not is_unicode) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def table(title: str, *columns: str, first: str = "left") -> Table:
    """Make a table whose first column is text and whose others are numbers."""
    from rich import box
    from rich.table import Table

    out = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i == 0 and first == "left" else "right", no_wrap=i > 0)
    return out


def resolve_model(name: str) -> Path:
    """Turn a MODEL argument into a path, fetching the demo model when it is asked for."""
    if name == "demo" or name.startswith("demo:"):
        from calmnb.download import demo_model

        return demo_model(name.partition(":")[2] or "fp8")
    try:
        path = Path(name).expanduser()
        is_checkpoint = path.suffix in {".gguf", ".safetensors"} or path.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that is not there
        said = getattr(error, "strerror", None) or error
        raise FormatError(f"{name} cannot be opened: {said}; give a .calm file, or `demo`") from error
    if is_checkpoint:
        raise ConfigError(
            f"{name} is a checkpoint, not a .calm file; convert it first: calmnb convert {name} model.calm --dtype fp8"
        )
    return path


def load_model(
    name: str,
    *,
    device: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    kv_dtype: str = "fp16",
    on_full: str = "stop",
) -> Model:
    """Open MODEL with the options of the command line, telling on stderr when kernels are compiled."""
    from calmnb.config import KV_DTYPES
    from calmnb.model import load

    return load(
        resolve_model(name),
        device=one_of("--device", device, ("auto", "cpu", "cuda", "reference")),
        threads=threads,
        seq_len=context,
        kv_dtype=one_of("--kv-dtype", kv_dtype, KV_DTYPES),
        on_full=one_of("--on-full", on_full, ("stop", "roll")),
        progress=note,
    )


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse parameters that were given although what is asked for does not heed them.

    Raises
    ------
    ConfigError
        That names them, and says `why`.
    """
    given = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        parameters = {parameter.name: parameter for parameter in context.command.params}
        said = [parameters[name].opts[-1] if parameters[name].opts[-1].startswith("-") else name.upper() for name in given]
        raise ConfigError(f"{' and '.join(said)}: {why}")


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[str | Path | None] = (), *, folder: str = "", appended: str = ""
) -> None:
    """Refuse outputs that would take the place of an input or of each other, or cannot be written; call it before any work.

    Parameters
    ----------
    outputs
        Path of each option, None where it was not given.
    inputs
        What the command reads; what is no file does not matter.
    folder
        The option that names a folder, which is made.
    appended
        The option whose file is added to; its folder is made.

    Raises
    ------
    ConfigError
    """
    given = {option: path for option, path in outputs.items() if path is not None}
    read = [path for path in inputs if path is not None]
    before: dict[Path, str] = {}
    for option, path in given.items():
        if any(_is_same(path, other) for other in read):
            raise ConfigError(f"{option} {path} is what the command reads, and would be lost; choose another name")
        try:
            other = before.setdefault(path.resolve(), option)
            if option != folder and path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            _try_folder(path, is_folder=option == folder, is_appended=option == appended)
        except (OSError, ValueError, RuntimeError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{option} {path} cannot be written: {said}; give a {'folder' if option == folder else 'file in a folder'} "
                "that is there and can be written to"
            ) from error
        if other != option:
            raise ConfigError(f"{other} and {option} would both write {path}; choose two names")


def _is_same(a: Path, b: str | Path) -> bool:
    try:
        return a.samefile(Path(b).expanduser())
    except (OSError, ValueError, RuntimeError):  # one of them is not there
        return False


def _try_folder(path: Path, *, is_folder: bool, is_appended: bool) -> None:
    """Raise the OSError that writing `path` would end in."""
    target = path if is_folder else path.parent
    if is_folder or is_appended:
        target.mkdir(parents=True, exist_ok=True)
    if is_appended and path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "it is read-only")
    else:
        with tempfile.TemporaryFile(dir=target):  # os.access does not know of /proc or of read-only disks
            pass


def one_of(option: str, value: str, accepted: Sequence[str]) -> Any:
    """Return `value` if it is accepted for `option`.

    Raises
    ------
    ConfigError
    """
    if value not in accepted:
        raise ConfigError(f"{option} is {value!r}; accepted are {', '.join(accepted)}")
    return value
