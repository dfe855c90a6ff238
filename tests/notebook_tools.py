"""Keep notebooks clean: ``--check`` fails where outputs are stored, ``--strip`` removes them.

Outputs change on every run and hide a change of the text; a notebook is executed by CI instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def dirty_cells(notebook: dict[str, object]) -> list[int]:
    """Return the indices of cells that carry outputs, execution counts or volatile metadata."""
    cells = notebook["cells"]
    assert isinstance(cells, list)
    return [i for i, cell in enumerate(cells) if cell.get("outputs") or cell.get("execution_count") is not None]


def strip(notebook: dict[str, object]) -> dict[str, object]:
    """Return the notebook without outputs, execution counts and widget state."""
    cells = notebook["cells"]
    assert isinstance(cells, list)
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        cell["metadata"] = {key: value for key, value in cell.get("metadata", {}).items() if key == "tags"}
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--strip", action="store_true")
    parser.add_argument("paths", nargs="*", type=Path)
    arguments = parser.parse_args()
    failed = False
    for path in arguments.paths or sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        if arguments.strip:
            path.write_text(json.dumps(strip(notebook), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        elif dirty_cells(notebook):
            print(f"{path}: cells {dirty_cells(notebook)} carry outputs; run: python tests/notebook_tools.py --strip {path}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
