"""CompareView and KernelTable in a real JupyterLab, and the pictures of the documentation."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import REPOSITORY
from tests.browser.test_profile_view import IMPORTS, LEAST_FPS, frames, keep, line, opened, saved, spot, until

# One run in about fifteen loses JupyterLab's first message on a busy machine, whatever the notebook holds: one more try.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.flaky(reruns=1)]

TWO = IMPORTS + (
    "import dataclasses\n"
    "a = noisy_recorder(SMOL, tokens=60, model='smollm2-135m').session()\n"
    "b = noisy_recorder(dataclasses.replace(SMOL, dtype='gf4'), tokens=60, model='smollm2-135m', seed=3).session()\n"
    "view = calmnb.CompareView(a, b)\nview"
)


def test_two_sessions_side_by_side(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "compare.ipynb", TWO)
    view = page.locator(".calmnb-compare")
    view.scroll_into_view_if_needed()
    assert "times as fast" in view.locator(".cn-verdict-box").inner_text()
    assert "weights" in view.locator(".cn-settings").inner_text()
    until(page, "v.dataset.rows === '9'")
    rows = view.locator(".cn-vrow").all_inner_texts()
    assert rows[4].startswith("ffn up")
    assert "faster" in rows[4]

    # keyboard on the waterfall: first a, then the stages
    chart = view.get_by_label("Waterfall of the differences")
    chart.focus()
    for _ in range(6):
        chart.press("ArrowRight")
    tip = view.locator(".cn-tip")
    assert tip.inner_text().startswith("ffn up")
    assert "ratio" in tip.inner_text()
    chart.press("Enter")
    until(page, "v.querySelector('.cn-vrow[aria-selected=true]')?.innerText.startsWith('ffn up')")

    view.get_by_role("button", name="layers × stages").click()
    until(page, "v.dataset.rows === '154'")
    view.get_by_label("Filter Differences").fill("logits verdict:faster")
    until(page, "v.querySelector('.cn-vbox').dataset.rows === '1'")
    view.get_by_label("Filter Differences").fill("")
    view.get_by_role("button", name="stages", exact=True).click()
    until(page, "v.querySelector('.cn-vbox').dataset.rows === '9'")
    name, content = saved(page, view, "CSV")
    table = list(csv.DictReader(io.StringIO(content.decode())))
    assert name == "compare.csv"
    assert len(table) == 9
    assert float(table[4]["time_us_b"]) < float(table[4]["time_us_a"])
    assert saved(page, view, "PNG")[1][:4] == b"\x89PNG"
    assert view.locator("img, script").count() == 0
    outputs = notebook_outputs(page)
    assert any("1 settings differ" in html or "settings differ" in html for html in outputs)
    assert notebook.errors == []


def notebook_outputs(page: Any) -> list[str]:
    """HTML of all outputs of the first cell, as the notebook file would keep it."""
    return [
        "".join(html)
        for html in page.evaluate(
            """() => { const cell = [...window.jupyterapp.shell.currentWidget.content.model.cells][0];
            return cell.outputs.toJSON().map((out) => out.data?.["text/html"] ?? ""); }"""
        )
    ]


@pytest.mark.timed
def test_a_table_of_thirty_thousand_rows(page: Any, lab: str, folder: Path) -> None:
    code = IMPORTS + "table = calmnb.KernelTable(noisy_recorder(SMOL, tokens=200).session(), 'events')\ntable"
    notebook = opened(page, lab, folder, "table.ipynb", code)
    view = page.locator(".calmnb-table")
    assert int(view.evaluate("(node) => node.dataset.rows")) > 30_000
    fps = frames(page, ".cn-vscroll", "scroll", "KernelTable, 30,000 rows, scrolled 100 pixels a frame")
    assert fps >= LEAST_FPS
    assert view.locator(".cn-vrow").count() < 100, "only rows in sight are in the page"
    view.locator(".cn-sort", has_text="exclusive µs").click()
    until(page, "v.querySelector('[data-key=exclusive_us]').getAttribute('aria-sort') === 'descending'")
    view.get_by_label("Filter Table of events").fill("stage:attention layer:3 exclusive_us>0")
    until(page, "v.querySelector('.cn-vbox').dataset.rows === '201'")
    grid = view.get_by_role("grid")
    grid.focus()
    grid.press("End")
    until(page, "v.querySelector('.cn-vscroll').getAttribute('aria-activedescendant').endsWith('-200')")
    assert grid.get_attribute("aria-rowcount") == "202"
    grid.press("Control+c")
    until(page, "v.querySelector('.cn-count').innerText === 'copied 201 rows'")
    lines = page.evaluate("() => navigator.clipboard.readText()").split("\n")
    assert len(lines) == 202
    titles = lines[0].split("\t")
    seconds = [float(text.split("\t")[titles.index("exclusive_s")]) for text in lines[1:]]
    assert seconds == sorted(seconds, reverse=True), "in the order shown, in the session's own units"
    assert 0 < seconds[-1] < 1e-2
    assert notebook.errors == []


def recordings(smollm2: Callable[[str], Path], folder: Path) -> list[Path]:
    """Sessions for the pictures: those named in CALMNB_PICTURE_SESSIONS (two paths), else the demo model, recorded here."""
    given = os.environ.get("CALMNB_PICTURE_SESSIONS", "").split(os.pathsep)
    if len(given) == 2:
        return [Path(path) for path in given]
    import calmnb

    made = []
    for dtype in ("fp8", "gf4"):
        with calmnb.load(smollm2(dtype)) as model:
            session = calmnb.profile(model, "Why is the sky blue? Explain it to a child.", tokens=64)  # type: ignore[operator]
            made.append(session.save(folder / f"{dtype}.calmprof"))
    return made


@pytest.mark.model
@pytest.mark.skipif(os.environ.get("CALMNB_UPDATE_SCREENSHOT") != "1", reason="takes the documentation's pictures when asked")
def test_pictures_of_a_measured_session(page: Any, lab: str, folder: Path, smollm2: Callable[[str], Path]) -> None:
    first, second = recordings(smollm2, folder)
    code = f"import calmnb\nview = calmnb.ProfileView({str(first)!r})\nview"
    page.set_viewport_size({"width": 1440, "height": 1500})
    notebook = opened(page, lab, folder, "picture.ipynb", code)
    view = page.locator(".calmnb-profile")
    view.scroll_into_view_if_needed()
    up = "line.rec.events.layer[i] === 14 && line.rec.stage(i).name === 'matmul_ffn_up'"
    at, lane = line(
        view, f"(() => {{ for (let i = line.members[0]; ; i += 1) if ({up}) return [line.rec.end(i), line.lanes.of[i]]; }})()"
    )
    view.locator(".cn-timeline").hover(position=spot(view, at - 1, lane))
    page.wait_for_timeout(600)
    keep(view, folder, "profile_view.png")
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_timeout(1500)
    view.screenshot(path=folder / "profile_view_dark.png")
    notebook.set_theme("JupyterLab Light")

    notebook = opened(
        page, lab, folder, "picture2.ipynb", f"import calmnb\ncalmnb.CompareView({str(first)!r}, {str(second)!r})"
    )
    view = page.locator(".calmnb-compare")
    view.scroll_into_view_if_needed()
    page.wait_for_timeout(600)
    keep(view, folder, "compare_view.png")
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_timeout(1500)
    view.screenshot(path=folder / "compare_view_dark.png")
    notebook.set_theme("JupyterLab Light")
    assert notebook.errors == []
    assert (REPOSITORY / "docs" / "images" / "profile_view.png").exists()
