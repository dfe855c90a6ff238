"""Keep notebooks and their figures: ``--run`` executes them and keeps what they show, ``--check`` says what is wrong.

``python tests/notebook_tools.py --run`` runs every notebook from a clean kernel and writes it back with its outputs, without
what changes from run to run or from machine to machine: times of cells, paths, addresses, progress bars, state of widgets.
``--check`` refuses outputs of other cells than those that stand there, errors, absolute paths and files over a megabyte.
``--strip`` removes all outputs. Kept bare are the chat, which is nothing without its widget, and the two notebooks that
measure the reader's own machine: figures of the machine that happened to run them would mislead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Notebooks that are kept without outputs.
BARE = frozenset({"00_quickstart", "01_speed_of_light", "02_chat"})
#: A notebook file may have so many bytes.
MAX_BYTES = 1_000_000
_WIDGET = "application/vnd.jupyter.widget-view+json"
_ABSOLUTE = re.compile(r"(?<![\w.:/~-])(/(?:home|root|tmp|work|Users|usr|var|opt|mnt|srv)/[\w./-]+)|(?<!\w)[A-Za-z]:\\\\?\w")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_METADATA: dict[str, Any] = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

Notebook = dict[str, Any]


def dirty_cells(notebook: Notebook) -> list[int]:
    """Return the indices of cells that carry outputs, execution counts or volatile metadata."""
    return [i for i, cell in enumerate(notebook["cells"]) if cell.get("outputs") or cell.get("execution_count") is not None]


def code_digest(notebook: Notebook) -> str:
    """Digest of the code cells: which outputs belong to."""
    code = "\0".join(_text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def strip(notebook: Notebook) -> Notebook:
    """Return the notebook without outputs, execution counts and widget state."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        cell["metadata"] = _tags(cell)
    notebook["metadata"] = dict(_METADATA)
    return notebook


def scrub(notebook: Notebook) -> Notebook:
    """Return an executed notebook without what differs between runs of the same code, apart from the numbers themselves."""
    count = 0
    for cell in notebook["cells"]:
        cell["metadata"] = _tags(cell)
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["execution_count"] = count
        cell["outputs"] = [kept for output in cell["outputs"] if (kept := _scrubbed(output, count)) is not None]
    notebook["metadata"] = {**_METADATA, "calmnb": {"code": code_digest(notebook)}}
    return notebook


def _scrubbed(output: dict[str, Any], count: int) -> dict[str, Any] | None:
    """One output without paths, addresses and live widgets, or None if it is not kept."""
    kind = output["output_type"]
    if kind == "stream":
        # Progress bars and notes that kernels compile; warnings are refused before.
        return None if output["name"] == "stderr" else {**output, "text": _portable(_text(output["text"]))}
    if kind not in ("display_data", "execute_result"):
        return output
    if _WIDGET in output["data"]:
        return None  # its static view stands beside it
    data = {mime: _portable(_text(value)) if mime.startswith("text/") else value for mime, value in output["data"].items()}
    kept = {"output_type": kind, "data": data, "metadata": {}}
    return {**kept, "execution_count": count} if kind == "execute_result" else kept


def _portable(text: str) -> str:
    return _ADDRESS.sub("at 0x...", text).replace(f"{ROOT}{os.sep}", "")


def problems(notebook: Notebook, *, name: str, nbytes: int) -> list[str]:
    """What is wrong with a notebook as it stands, one line each; empty if nothing is.

    Parameters
    ----------
    notebook
        As JSON.
    name
        Its stem.
    nbytes
        Size of its file.
    """
    found = []
    with_outputs = dirty_cells(notebook)
    if name in BARE and with_outputs:
        found.append(f"cells {with_outputs} carry outputs; run: python tests/notebook_tools.py --strip notebooks/{name}.ipynb")
    if name not in BARE:
        recorded = notebook["metadata"].get("calmnb", {}).get("code")
        if recorded != code_digest(notebook):
            state = "are missing" if recorded is None else "are of another version of the code"
            found.append(f"the outputs {state}; run: python tests/notebook_tools.py --run notebooks/{name}.ipynb")
    if set(notebook["metadata"]) - {*_METADATA, "calmnb"}:
        found.append(f"metadata holds {', '.join(sorted(set(notebook['metadata']) - {*_METADATA, 'calmnb'}))}")
    if nbytes > MAX_BYTES:
        found.append(f"the file has {nbytes:,} bytes; it may have {MAX_BYTES:,}: show fewer or smaller figures")
    for i, cell in enumerate(notebook["cells"]):
        found += [f"cell {i}: {problem}" for problem in _cell_problems(cell)]
    return found


def _cell_problems(cell: dict[str, Any]) -> list[str]:
    found = []
    if set(cell.get("metadata", {})) - {"tags"}:
        found.append(f"metadata holds {', '.join(sorted(cell['metadata']))}")
    texts = [_text(cell["source"])]
    for output in cell.get("outputs", []):
        if output["output_type"] == "error":
            found.append(f"ended in {output.get('ename')}: {output.get('evalue')}")
        if _WIDGET in output.get("data", {}):
            found.append("shows a live widget, which is nothing without its kernel")
        texts.append(_text(output.get("text", "")))
        texts += [_text(value) for mime, value in output.get("data", {}).items() if mime.startswith("text/")]
    for text in texts:
        if "Traceback (most recent call last)" in text:
            found.append("holds a traceback")
        for match in _ABSOLUTE.finditer(text):
            found.append(f"names a place on one machine: {match.group(0)}")
    return found


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _tags(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cell.get("metadata", {}).items() if key == "tags"}


def execute(path: Path, *, timeout_s: float = 600) -> Notebook:
    """Run a notebook from a clean kernel in its own folder, and return it with all outputs.

    Raises
    ------
    RuntimeError
        If a cell fails or warns; the message holds what it said.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.resolve().parent)}}
    client = nbclient.NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=resources)
    with tempfile.TemporaryDirectory() as profile:
        try:
            client.execute(env={**os.environ, "IPYTHONDIR": profile})
        except nbclient.exceptions.CellExecutionError as error:
            raise RuntimeError(f"{path}: a cell failed:\n{error}") from error
    said = [out.text for cell in notebook.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
    if any("Warning" in text for text in said):
        raise RuntimeError(f"{path}: a cell warned:\n{''.join(said)}")
    return json.loads(nbformat.writes(notebook))  # type: ignore[no-any-return]


def write(path: Path, notebook: Notebook) -> None:
    """Write a notebook the way Jupyter does, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _process(path: Path, action: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if action == "strip" or (action == "run" and path.stem in BARE):
        if action == "run":
            execute(path)  # kept bare, but it must run
        write(path, strip(notebook))
    elif action == "run":
        write(path, scrub(execute(path)))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [] if action == "strip" else problems(notebook, name=path.stem, nbytes=path.stat().st_size)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "run", "strip"):
        action.add_argument(f"--{name}", dest="action", action="store_const", const=name)
    parser.add_argument("paths", nargs="*", type=Path)
    arguments = parser.parse_args()
    failed = False
    for path in arguments.paths or sorted((ROOT / "notebooks").glob("*.ipynb")):
        try:
            found = _process(path, arguments.action)
        except RuntimeError as error:
            found = [str(error)]
        if arguments.action == "run":
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB", flush=True)
        for problem in found:
            print(f"{path}: {problem}")
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
