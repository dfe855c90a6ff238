"""The command that compares two saved sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calmnb.cli.common import Json, app, check_outputs, console, note, one_of, print_json, table

if TYPE_CHECKING:
    from calmnb.profile import Comparison

__all__ = ["compare"]

Recording = Annotated[Path, typer.Argument(help="A session saved by `calmnb profile -o` (.calmprof).")]


@app.command()
def compare(
    a: Recording,
    b: Recording,
    by: Annotated[str, typer.Option("--by", help="Rows: stage, layer, kernel, or columns such as layer,stage.")] = "stage",
    phase: Annotated[str, typer.Option("--phase", help="decode or prefill.")] = "decode",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the waterfall from A's step to B's as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Say what got faster from session A to session B, what slower, how sure that is, and what else was different.

    Example: `calmnb compare before.calmprof after.calmprof --by stage --plot difference.png`
    """
    from calmnb.profile import Session
    from calmnb.profile import compare as run

    check_outputs({"--plot": plot}, [a, b])
    keys = by.split(",") if "," in by else by
    comparison = run(Session.load(a), Session.load(b), by=keys, phase=one_of("--phase", phase, ("decode", "prefill")))
    if plot:
        from calmnb import plots

        plots.compare(comparison).write_png(plot)
        note(f"wrote {plot}")
    if as_json:
        print_json(comparison.to_dict())
    else:
        _print(comparison)


def _print(comparison: Comparison) -> None:
    """Settings that differ, notes, the table, how it was made, and one line to paste."""
    from rich.markup import escape

    from calmnb.profile.compare_report import table_rows

    out = console()
    if comparison.settings:
        settings = table("settings that differ", "", f"a: {escape(comparison.labels[0])}", f"b: {escape(comparison.labels[1])}")
        for row in comparison.settings:
            settings.add_row(*map(escape, row))
        out.print(settings)
    for line in comparison.notes:
        out.print(f"[yellow]note:[/] {escape(line)}", highlight=False)
    titles, rows = table_rows(comparison)
    result = table(f"one {comparison.phase} step, from a to b", *titles)
    result.columns[-1].justify = "left"
    for cells in rows[:-1]:
        result.add_row(*map(escape, cells))
    result.add_section()
    result.add_row(*(f"[bold]{escape(cell)}[/]" if cell else "" for cell in rows[-1]))
    out.print(result)
    out.print(f"[dim]{escape(comparison.method)}[/]", highlight=False)
    out.print(escape(comparison.summary()), highlight=False, soft_wrap=True)
