"""The command-line reference: Markdown made of the typer application itself, so that it cannot fall behind it."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import typer

from calmnb.cli import app
from calmnb.cli.common import COMMANDS

__all__ = ["cli_page", "commands"]

_INTRODUCTION = """# Command line

Written at build time from the program itself. `calmnb COMMAND --help` prints the same.

Results go to standard output. Progress and notes go to standard error. `--json` prints one JSON document and nothing
else. A mistake of the user's ends with one line that says what was asked, what was found, what is accepted and what to
do, and exit status 1. Ctrl-C ends with status 130.

"""


def commands() -> dict[str, Any]:
    """Return every command by name, in the order of ``calmnb --help``."""
    group: Any = typer.main.get_command(app)
    return {name: group.commands[name] for name in COMMANDS}


def cli_page() -> str:
    """Markdown of the whole page: one section a command with its usage, options and example."""
    found = commands()
    index = "| command | |\n|---|---|\n" + "".join(
        f"| [`{name}`](#{name}) | {_cell(_parts(command)[0])} |\n" for name, command in found.items()
    )
    return _INTRODUCTION + index + "\n" + "\n".join(_section(name, command) for name, command in found.items())


def _section(name: str, command: Any) -> str:
    summary, text, examples = _parts(command)
    usage = " ".join(["calmnb", name, "[OPTIONS]", *(_argument_usage(p) for p in command.params if _is_argument(p))])
    lines = [f"## {name}", "", summary, "", f"```text\n{usage}\n```", ""]
    if text:
        lines += [text, ""]
    hints = typing.get_type_hints(command.callback)
    rows = [_row(p, hints.get(p.name, str)) for p in command.params if not getattr(p, "hidden", False)]
    lines += [
        "| argument or option | default | |",
        "|---|---|---|",
        *rows,
        "",
        "Examples:" if "\n" in examples else "Example:",
        "",
        f"```sh\n{examples}\n```",
        "",
    ]
    return "\n".join(lines)


def _parts(command: Any) -> tuple[str, str, str]:
    """First sentence, further text, and examples (a line each) of a command's help."""
    help_text = command.help or ""
    text = re.sub(r"Example: `.+?`", "", help_text)
    summary, _, rest = text.strip().partition("\n\n")
    return " ".join(summary.split()), rest.strip(), "\n".join(re.findall(r"Example: `(.+?)`", help_text))


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _argument_usage(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().strip("[]") + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any, hint: Any) -> str:
    if _is_argument(parameter):
        name = f"`{_argument_usage(parameter)}`"
    else:
        names = ", ".join(f"`{opt}`" for opt in [*sorted(parameter.opts, key=len), *parameter.secondary_opts])
        name = names if parameter.is_flag else f"{names} `{_kind(hint)}`"
    return f"| {name} | {_default(parameter)} | {_cell(getattr(parameter, 'help', '') or '')} |"


def _kind(hint: Any) -> str:
    """What an option takes, as ``--help`` writes it; from the annotation, since typer's own objects change between versions."""
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return _kind(parts[0]) if parts else {int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(hint, "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value):
        value = value()
    if value is None or value is False or value == "" or value == () or value == []:
        return ""
    return f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
