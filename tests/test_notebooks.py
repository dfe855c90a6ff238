"""Every notebook runs top to bottom from a clean kernel, on a machine with no GPU, in under two minutes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import notebook_tools

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 120.0

pytestmark = pytest.mark.filterwarnings("ignore")  # nbclient and its event loop warn in ways that are not ours to fix


def test_the_promised_notebooks_are_there() -> None:
    stems = {path.stem for path in NOTEBOOKS}
    promised = {"00_quickstart", "01_speed_of_light", "02_chat", "03_where_time_goes", "04_roofline", "05_kv_cache"}
    assert promised | {"06_compare_dtypes"} <= stems


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook_tools.dirty_cells(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_asks_one_question_and_says_what_to_expect(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    title = first.source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?"), f"{path.name}: the title asks one question"
    for word in ("Run time", "Look for"):
        assert word in first.source, f"{path.name}: the first cell says {word!r}"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom_in_time(path: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    start = time.perf_counter()
    client.execute(env={**os.environ, "IPYTHONDIR": str(tmp_path)})
    elapsed = time.perf_counter() - start
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    stderr = "".join(out.text for out in outputs if out.output_type == "stream" and out.name == "stderr")
    assert "Warning" not in stderr, stderr
    print(f"{path.name}: {elapsed:.1f} s")
    assert elapsed < LIMIT_S, f"{path.name} took {elapsed:.0f} s, more than {LIMIT_S:.0f}"
