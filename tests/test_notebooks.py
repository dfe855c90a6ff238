"""Every notebook runs top to bottom from a clean kernel, without a GPU, in under two minutes, and keeps what it should."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from calmnb.config import KV_DTYPES
from calmnb.profile import Session
from calmnb.profile.shape import CONTEXTS, file_name
from tests import notebook_tools

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "notebooks" / "data"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 120.0
SHAPES = ("llama-3.2-1b", "mistral-7b")

pytestmark = pytest.mark.filterwarnings("ignore")  # nbclient and its event loop warn in ways that are not ours to fix


def test_the_promised_notebooks_are_there() -> None:
    stems = {path.stem for path in NOTEBOOKS}
    promised = {"00_quickstart", "01_speed_of_light", "02_chat", "03_where_time_goes", "04_roofline", "05_kv_cache"}
    assert promised | {"06_compare_dtypes", "07_nsys_and_ncu", "08_one_kernel"} <= stems


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_the_outputs_of_its_own_code(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook_tools.problems(notebook, name=path.stem, nbytes=path.stat().st_size) == []


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
def test_runs_top_to_bottom_in_time(path: Path, smollm2_gguf: Path) -> None:
    start = time.perf_counter()
    notebook = notebook_tools.scrub(notebook_tools.execute(path, timeout_s=300))
    elapsed = time.perf_counter() - start
    print(f"{path.name}: {elapsed:.1f} s")
    assert elapsed < LIMIT_S, f"{path.name} took {elapsed:.0f} s, more than {LIMIT_S:.0f}"
    if path.stem not in notebook_tools.BARE:
        nbytes = len(json.dumps(notebook, indent=1, ensure_ascii=False).encode())
        assert notebook_tools.problems(notebook, name=path.stem, nbytes=nbytes) == []


# -- the recordings that the notebooks show ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp16", "fp16"), ("fp8", "fp16"), ("gf4", "fp16"), ("fp8", "fp8")])
def test_the_saved_recordings_hold_what_the_notebooks_need(shape: str, dtype: str, kv_dtype: str) -> None:
    session = Session.load(DATA / file_name(shape, dtype, kv_dtype))
    meta = session.meta
    assert (meta["model"], meta["dtype"], meta["kv_dtype"], meta["time_source"]) == (shape, dtype, kv_dtype, "stamps")
    assert kv_dtype in KV_DTYPES
    assert "H200" in meta["device"]
    assert session.peak("measured") is not None
    assert session.peak("datasheet") is not None
    assert meta["graph_us"].keys() == {str(context) for context in CONTEXTS}
    for context in CONTEXTS:
        part = session.select(kv_len=context)
        assert part.steps["run"].nunique() >= 10, "ten runs a context: two halves of five to compare"
        stamped = 1e6 * float(part.steps.query("not warmup")["duration_s"].median())
        assert stamped == pytest.approx(meta["graph_us"][str(context)], rel=0.05), "a step with stamps and without"
    sums = session.events.groupby("step")["exclusive_s"].sum().to_numpy()
    assert sums == pytest.approx(session.steps["duration_s"].to_numpy(), rel=1e-6)
    weights = session.kernels().query("stage in ['matmul_ffn_up', 'matmul_ffn_down', 'output']")
    # A kernel that begins to read while the one before it runs may seem a little faster than the memory.
    assert weights["percent_of_peak"].between(50, 110).all()
    assert weights[["registers", "occupancy_percent", "waves"]].notna().all(axis=None)


def test_the_recordings_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 5_000_000


# -- the tool ---------------------------------------------------------------------------------------------------------


def a_notebook(*outputs: dict[str, Any], source: str = "1 + 1") -> dict[str, Any]:
    cell = {"cell_type": "code", "id": "a", "metadata": {"execution": {"x": 1}, "tags": ["t"]}, "source": [source]}
    return {"cells": [{**cell, "execution_count": 7, "outputs": list(outputs)}], "metadata": {"widgets": {}}, "nbformat": 4}


def shown(data: dict[str, Any], kind: str = "display_data") -> dict[str, Any]:
    return {"output_type": kind, "data": data, "metadata": {"needs": 1}, "transient": {"display_id": "x"}}


def problems(notebook: dict[str, Any], name: str = "03_x", nbytes: int = 10) -> str:
    return "\n".join(notebook_tools.problems(notebook, name=name, nbytes=nbytes))


def test_scrubbing_keeps_figures_and_drops_what_is_of_one_run() -> None:
    notebook = notebook_tools.scrub(
        a_notebook(
            {"output_type": "stream", "name": "stderr", "text": ["compiling ...\r", "done"]},
            {"output_type": "stream", "name": "stdout", "text": [f"read {ROOT}/notebooks/data/x\n", "<a.B at 0x7f00aa11bb22>"]},
            shown({"image/png": "AAAA", "text/plain": "<Figure>"}),
            shown({notebook_tools._WIDGET: {"model_id": "1"}, "text/plain": "View"}),
            shown({"text/html": ["<div>x</div>"], "text/plain": "View"}, "execute_result"),
        )
    )
    cell = notebook["cells"][0]
    assert [output["output_type"] for output in cell["outputs"]] == ["stream", "display_data", "execute_result"]
    assert cell["outputs"][0]["text"] == "read notebooks/data/x\n<a.B at 0x...>"
    assert cell["outputs"][1] == {
        "output_type": "display_data",
        "data": {"image/png": "AAAA", "text/plain": "<Figure>"},
        "metadata": {},
    }
    assert cell["metadata"] == {"tags": ["t"]}
    assert (cell["execution_count"], cell["outputs"][2]["execution_count"]) == (1, 1)
    assert "widgets" not in notebook["metadata"]
    assert problems(notebook) == ""
    assert problems(notebook, name="02_chat").startswith("cells [0] carry outputs")


def test_outputs_of_other_code_are_told() -> None:
    notebook = notebook_tools.scrub(a_notebook())
    assert problems(notebook) == ""
    changed = copy.deepcopy(notebook)
    changed["cells"][0]["source"] = ["1 + 2"]
    assert "of another version of the code; run: python tests/notebook_tools.py --run" in problems(changed)
    assert "cells [0] carry outputs" in problems(notebook, name="02_chat")
    bare = notebook_tools.strip(notebook)
    assert "the outputs are missing" in problems(bare)
    assert problems(bare, name="02_chat") == ""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"output_type": "error", "ename": "KeyError", "evalue": "x", "traceback": []}, "ended in KeyError: x"),
        ({"output_type": "stream", "name": "stdout", "text": "Traceback (most recent call last):\n"}, "holds a traceback"),
        ({"output_type": "stream", "name": "stdout", "text": "in /home/me/model.calm"}, "/home/me/model.calm"),
        (shown({"text/html": "<p>/work/venv/lib</p>"}), "/work/venv/lib"),
        ({"output_type": "stream", "name": "stdout", "text": r"in C:\Users\me"}, r"C:\U"),
        (shown({notebook_tools._WIDGET: {}}), "shows a live widget"),
    ],
)
def test_what_must_not_be_kept_is_told(output: dict[str, Any], words: str) -> None:
    notebook = a_notebook(output)
    notebook["metadata"] = {"calmnb": {"code": notebook_tools.code_digest(notebook)}}
    notebook["cells"][0]["metadata"] = {}
    assert words in problems(notebook)


@pytest.mark.parametrize("text", ["12 GB/s at 3/4 of it", "https://home/x/tmp/y", "data/h200.calmprof", "a/home/x", "us/step"])
def test_what_only_looks_like_a_path_is_let_through(text: str) -> None:
    notebook = notebook_tools.scrub(a_notebook({"output_type": "stream", "name": "stdout", "text": text}))
    assert problems(notebook) == ""


def test_large_files_volatile_metadata_and_paths_in_code_are_told() -> None:
    notebook = notebook_tools.scrub(a_notebook(source="open('/tmp/x/y')"))
    notebook["metadata"]["widgets"] = {}
    notebook["cells"][0]["metadata"]["execution"] = {}
    said = problems(notebook, nbytes=1_000_001)
    for words in ("1,000,001 bytes", "metadata holds widgets", "metadata holds execution", "/tmp/x/y"):
        assert words in said


def test_a_failing_notebook_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "03_bad.ipynb"
    notebook = {**notebook_tools.strip(a_notebook(source="1 / 0")), "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        notebook_tools.execute(path)
    path.write_text(
        json.dumps({**notebook, "cells": [{**notebook["cells"][0], "source": "import warnings; warnings.warn('w')"}]})
    )
    with pytest.raises(RuntimeError, match="a cell warned"):
        notebook_tools.execute(path)
    assert json.loads(path.read_text())["cells"][0]["outputs"] == []
