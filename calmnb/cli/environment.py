"""Commands about the installation: lab, doctor."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from calmnb.cli.common import Json, app, console, note, print_json, table
from calmnb.errors import CalmnbError

__all__ = ["doctor", "lab", "notebooks_folder"]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Notebooks to open; calmnb's own when left out.", file_okay=False)
    ] = None,
) -> None:
    """Open JupyterLab on the notebooks. Further options go to JupyterLab.

    Example: `calmnb lab --no-browser --port 8899`
    """
    if importlib.util.find_spec("jupyterlab") is None or importlib.util.find_spec("anywidget") is None:
        raise CalmnbError("JupyterLab is not installed here; run: pip install 'calmnb[lab]'")
    target = folder or notebooks_folder()
    if not target.is_dir():
        raise CalmnbError(f"{target} is not a folder; pass one with --folder")
    note(f"JupyterLab on {target}; start with 00_quickstart.ipynb")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={target}", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def notebooks_folder() -> Path:
    """Folder of the notebooks: the repository's own, or a copy of the wheel's in ``./calmnb-notebooks``.

    Notebooks inside an installed package are not the user's to edit, so they are copied out; files that are already
    there are kept.
    """
    package = Path(__file__).resolve().parents[1]
    repository = package.parent / "notebooks"
    if (repository / "00_quickstart.ipynb").exists():
        return repository
    shipped = package / "_notebooks"
    if not shipped.is_dir():
        raise CalmnbError("this installation carries no notebooks; clone the repository, or pass a folder with --folder")
    target = Path.cwd() / "calmnb-notebooks"
    for source in sorted(shipped.rglob("*")):
        copy = target / source.relative_to(shipped)
        if source.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    return target


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which device would be used, what is missing and how to get it.

    Example: `calmnb doctor --json`
    """
    from calmnb.doctor import examine

    findings = examine()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        from rich.markup import escape

        out = table("", "", "found", "what to do", first="left")
        out.columns[1].justify = "left"
        out.columns[2].justify = "left"
        out.columns[1].no_wrap = out.columns[2].no_wrap = False
        for finding in findings:
            mark = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]!![/]"}[finding.state]
            out.add_row(f"{mark} {finding.name}", escape(finding.found), escape(finding.remedy))
        console().print(out)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)
