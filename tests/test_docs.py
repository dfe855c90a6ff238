"""The documentation builds without a warning, asks the network for nothing, and says what the program does."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer.testing

import calmnb
from calmnb.cli import app
from calmnb.cli.common import COMMANDS
from calmnb.engine.stages import weight_bytes_per_token
from calmnb.shapes import shape_config
from tests.nsys_files import ReportFile, step_names
from tests.profile_fakes import LLAMA_1B, noisy_recorder

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
TEXTS = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in PAGES}
WITH_CODE = [name for name, text in TEXTS.items() if "```python\n" in text]

sys.path.insert(0, str(DOCS / "_site"))
from api_reference import PAGES as API_PAGES  # noqa: E402
from api_reference import module_file, public_names  # noqa: E402
from cli_reference import cli_page, commands  # noqa: E402
from columns_reference import columns_page  # noqa: E402
from figures import figure_files  # noqa: E402
from notebook_pages import notebook_files  # noqa: E402


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI and readers build it: any warning is a failure."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


class Assets(HTMLParser):
    """Collects what a browser would fetch to show a page, and the ids that links may lead to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.fetched.append(given.get("src", ""))
        if tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given.get("href", ""))


@pytest.mark.slow
@pytest.mark.beside
def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        for address in Assets(page.read_text(encoding="utf-8")).fetched:
            assert not re.match(r"(https?:)?//", address), f"{page.relative_to(site)} fetches {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
@pytest.mark.beside
def test_every_public_name_is_documented(site: Path) -> None:
    known: set[str] = set()
    for page in (site / "api").rglob("index.html"):
        known |= Assets(page.read_text(encoding="utf-8")).ids
    assert not [identifier for identifier in known if re.match(r"calmnb\..*\._(?!_)", identifier)], (
        "private names are documented"
    )
    listed = [module for section in API_PAGES.values() for module in section]
    for module in ["calmnb", *listed]:
        for name in public_names(module):
            assert any(identifier.startswith("calmnb.") and identifier.endswith(f".{name}") for identifier in known), (
                f"{module}.{name} is public, but the site has no entry for it: see PAGES in docs/_site/api_reference.py"
            )


def test_modules_with_a_page_exist_and_say_what_is_public() -> None:
    for module in (module for section in API_PAGES.values() for module in section):
        assert module_file(module).is_file(), f"{module} is in PAGES of docs/_site/api_reference.py, but not in the package"
        assert public_names(module)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_its_options_and_example(name: str) -> None:
    section = re.split(r"^## ", cli_page(), flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(f"{name}\n"))
    shown = (
        typer.testing.CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    )
    options = set(re.findall(r"(?<![\w`-])--[a-z][a-z-]*", shown.partition("Options")[2])) - {"--help"}
    assert options, shown
    for option in options:
        assert f"`{option}`" in text, f"docs: calmnb {name} lacks {option}"
    examples = re.findall(r"Example: `(.+?)`", commands()[name].help)
    assert examples, f"calmnb {name} has no example"
    for example in examples:
        assert f"\n{example}\n" in text.partition("```sh")[2]


def shell_lines() -> list[tuple[str, str]]:
    found = []
    for name, text in TEXTS.items():
        for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if kind == "sh" or line.startswith("$ "):
                    found.append((name, line.removeprefix("$ ")))
    return found


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_every_command_line_is_one_that_the_program_accepts(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    if program != "calmnb":
        assert program in ("pip", "conda", "git", "mkdocs"), f"{page}: {line}"
        return
    while program == "calmnb":
        name, *options = words
        commands()[name].make_context(name, list(options))  # raises where an option is unknown or an argument missing
        program, *words = options[options.index("--") + 1 :] if "--" in options else ["done"]


def test_every_column_of_a_session_is_described() -> None:
    session = noisy_recorder(LLAMA_1B, tokens=20).session()
    sections = {part.partition("\n")[0]: part for part in columns_page().split("\n## ")}
    shown = {
        "Events": session.events,
        "Steps": session.steps,
        "Stages": session.stages(),
        "Layers": session.layers(),
        "Kernels": session.kernels(),
        "Tokens": session.tokens(),
        "KV cache": session.kv_cost(),
    }
    for heading, table in shown.items():
        for column in table.columns:
            assert f"| `{column}` |" in sections[heading], f"{heading} lacks {column}"


def test_figures_are_drawn_from_the_recordings_that_are_there(tmp_path: Path) -> None:
    assert figure_files(tmp_path) == {}
    noisy_recorder(LLAMA_1B, tokens=20).session().save(tmp_path / "card-shape-fp16.calmprof")
    files = figure_files(tmp_path)
    page = files.pop("kernels/figures.md")
    assert isinstance(page, str)
    for name, content in files.items():
        assert f"({name.removeprefix('kernels/')})" in page
        assert isinstance(content, bytes)
        assert content.startswith(b"\x89PNG")


def test_every_notebook_is_a_page_with_its_figures() -> None:
    files = notebook_files()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = files[f"notebooks/{path.stem}.md"]
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert isinstance(page, str)
        assert page.startswith("# ")
        assert page.count("```python") + page.count("```ipython") >= sum(cell["cell_type"] == "code" for cell in cells)
        for name in re.findall(rf"\]\(({path.stem}-\d+-\d+\.png)\)", page):
            assert bytes(files[f"notebooks/{name}"]).startswith(b"\x89PNG")  # type: ignore[arg-type]


def test_outputs_of_notebooks_become_markdown(tmp_path: Path) -> None:
    def shown(output: dict[str, Any]) -> str:
        cell = {"cell_type": "code", "source": ["show()"], "outputs": [output]}
        (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell]}), encoding="utf-8")
        page = notebook_files(tmp_path)["notebooks/n.md"]
        assert isinstance(page, str)
        return page.partition("```python\nshow()\n```\n\n")[2].strip()

    def display(**data: str) -> dict[str, Any]:
        return {"output_type": "display_data", "data": {name.replace("_", "/"): value for name, value in data.items()}}

    assert shown({"output_type": "stream", "name": "stdout", "text": ["```\n", "x"]}) == "````text\n```\nx\n````"
    assert shown(display(text_html="<table></table>", text_plain="t")).endswith("<table></table>\n</div>")
    for html in ("<script>x</script>", '<b onclick="x">', "<IFRAME src=x>", "<img src=x>"):
        assert shown(display(text_html=html, text_plain="plain")) == "```text\nplain\n```"


def test_documented_files_exist() -> None:
    for name, text in TEXTS.items():
        for path in re.findall(r"`((?:tests|kernels|docs|calmnb|notebooks)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{name} names {path}"


def error_templates() -> list[str]:
    """Texts of the package with … for what varies, f-strings and adjacent literals joined as Python joins them."""
    found = []
    for path in (ROOT / "calmnb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_quotes_messages_that_the_program_has() -> None:
    quoted = re.findall(r"^`(.+)`$", TEXTS["howto/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 20
    templates = error_templates()
    for message in quoted:
        words = [re.escape(part) for part in message.replace("nsys is", "… is").split("…")]
        assert any(re.search(".*".join(words), text, re.DOTALL) for text in templates), f"no message says: {message}"


def table_rows(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in rows if cells[0] and not cells[0].startswith("-")}


def test_readme_and_site_give_the_same_measured_numbers() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("### NVIDIA H200")[2].partition("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    there = TEXTS["measured/h200.md"].splitlines()
    assert len(rows) > 9
    for row in rows:
        assert row in there, f"README has this row of the H200's table, docs/measured/h200.md has not: {row}"


@pytest.mark.parametrize(
    ("device", "attainable_gb_per_s"), [("RTX 4090", 955.0), ("A100 80 GB", 1700.0)], ids=["RTX 4090", "A100"]
)
def test_predicted_numbers_follow_from_their_formula(device: str, attainable_gb_per_s: float) -> None:
    rows = table_rows(TEXTS["measured/predicted.md"])
    for name, shape in (("Mistral-7B", "mistral-7b"), ("Llama-3.2-1B", "llama-3.2-1b")):
        for dtype, cell in zip(("fp16", "fp8", "gf4"), rows[f"{device}, {name}"], strict=True):
            config = shape_config(shape, dtype)  # type: ignore[arg-type]
            seconds = weight_bytes_per_token(config) / attainable_gb_per_s / 1e9 + (5 * config.n_layers + 3) * 1.5e-6
            if (device, dtype) == ("A100 80 GB", "gf4"):  # lowered for its instructions, as the text says
                assert float(cell) < 1 / seconds
            else:
                assert float(cell) == pytest.approx(1 / seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("page", WITH_CODE)
def test_python_blocks_run(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    smollm2: Callable[[str], Path],
    smollm2_gguf: Path,
) -> None:
    """All blocks of a page, one after another, as a reader would in one notebook; files that they read lie ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("calmnb.download.fetch_demo_model", lambda: smollm2_gguf)
    monkeypatch.setattr(calmnb, "demo_model", smollm2, raising=False)
    write_inputs(tmp_path)
    text = TEXTS[page]
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if re.search(r"<!-- not run: .+ -->\n\n$", text[: block.start()]):
                compile(block[1], page, "exec")
                continue
            line = text.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(DOCS / page), "exec")
            exec(code, names)
    finally:
        for value in names.values():
            if type(value).__name__ in ("Model", "ChatWidget", "ProfileView", "KernelTable", "CompareView"):
                value.close()


def write_inputs(folder: Path) -> None:
    """A report of Nsight Systems, the CSV of Nsight Compute and a session, as the pages name them."""
    report = ReportFile(folder / "report.sqlite", "new")
    for step in range(3):
        report.graph(step_names(30), at=500.0 * step, start=500.0 * step + 10)
    report.write()
    with (folder / "launches.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, quoting=csv.QUOTE_ALL)
        rows.writerow(["ID", "Process ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"])
        for i, kernel in enumerate(step_names(2)):
            rows.writerow([i, 41, kernel, "dram__bytes_read.sum", "byte", "1,024"])
            rows.writerow([i, 41, kernel, "dram__bytes_write.sum", "byte", "128"])
    noisy_recorder(LLAMA_1B, tokens=40).session().save(folder / "h200.calmprof")
