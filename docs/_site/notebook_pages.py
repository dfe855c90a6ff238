"""The notebooks as pages: text, code and the outputs that they are committed with. Nothing is executed."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["NOTEBOOKS", "notebook_files"]

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

_INTRODUCTION = """# Notebooks

One question each. `calmnb lab` opens them in JupyterLab; here they stand with the outputs that they were committed with.
Each says on what machine its numbers were measured.

| notebook | question |
|---|---|
"""


def notebook_files(folder: Path = NOTEBOOKS) -> dict[str, str | bytes]:
    """Pages and images by path under docs/: an index, then a page a notebook in the order of their names."""
    files: dict[str, str | bytes] = {}
    index = _INTRODUCTION
    for path in sorted(folder.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text, images = _page(path.stem, cells)
        files |= {f"notebooks/{path.stem}.md": text, **images}
        index += f"| [`{path.stem}`]({path.stem}.md) | {_title(cells)} |\n"
    return {"notebooks/index.md": index, **files}


def _title(cells: list[dict[str, Any]]) -> str:
    first = _text(cells[0]["source"]) if cells else ""
    return first.partition("\n")[0].lstrip("# ").strip()


def _page(stem: str, cells: list[dict[str, Any]]) -> tuple[str, dict[str, str | bytes]]:
    parts: list[str] = []
    images: dict[str, str | bytes] = {}
    for number, cell in enumerate(cells):
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source))
        elif cell["cell_type"] == "code":
            parts.append(_fenced(source, "ipython" if source.lstrip().startswith("%") else "python"))
            for place, output in enumerate(cell.get("outputs", [])):
                shown, image = _output(output)
                if image:
                    name = f"{stem}-{number}-{place}.png"
                    images[f"notebooks/{name}"] = image
                    shown = f"![{_caption(output)}]({name})"
                if shown:
                    parts.append(shown)
    return "\n\n".join(parts) + "\n", images


def _output(output: dict[str, Any]) -> tuple[str, bytes]:
    """Markdown and image of one output; a table's HTML is passed on, unless it wants to run something."""
    if output["output_type"] == "stream":
        return _fenced(_text(output["text"]), "text"), b""
    data = output.get("data", {})
    if "image/png" in data:
        return "", base64.b64decode(_text(data["image/png"]))
    html = _text(data.get("text/html", ""))
    if html and not re.search(r"<(script|iframe|object|embed|img|link)\b|\bon\w+\s*=", html, re.IGNORECASE):
        return f'<div class="notebook-output">\n{html}\n</div>', b""
    plain = _text(data.get("text/plain", ""))
    return (_fenced(plain, "text") if plain else ""), b""


def _caption(output: dict[str, Any]) -> str:
    return re.sub(r"[\[\]<>\n]", " ", _text(output["data"].get("text/plain", "figure"))).strip()[:80] or "figure"


def _fenced(text: str, language: str) -> str:
    """A code block; a fence within the text does not end it."""
    ticks = max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1
    return f"{'`' * ticks}{language}\n{text.rstrip()}\n{'`' * ticks}"


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)
