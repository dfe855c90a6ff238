"""ChatWidget in a real JupyterLab, in a headless Chromium: what a person would do, and what must never happen to them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import REPOSITORY, Notebook, notebook_json

# One run in about fifteen loses JupyterLab's first message on a busy machine, whatever the notebook holds: one more try.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.flaky(reruns=1)]

ATTACK = "<img src=x onerror=\"window.pwned=1\"><svg onload='window.pwned=2'></script><script>window.pwned=3</script>"
FAKE = "from tests.fake_model import FakeModel\nfrom calmnb.widgets import ChatWidget\n"
LONG = "('The sky is blue because molecules of air scatter short waves far more than long ones. ' * 40)"


def opened(page: Any, lab: str, folder: Path, name: str, *cells: str) -> Notebook:
    """Write a notebook of `cells`, open it, run it, and wait for its first chat."""
    (folder / name).write_text(notebook_json(*cells))
    notebook = Notebook(page, lab, name)
    notebook.open()
    notebook.run_all()
    page.wait_for_selector(".calmnb-chat", timeout=90_000)
    notebook.wait_status("ready", timeout=90)
    return notebook


def said(notebook: Notebook, index: int = 0) -> list[str]:
    return list(notebook.chat(index).locator(".cn-text").all_inner_texts())


def ink(page: Any, chart: int) -> int:
    """How many pixels of a chart are drawn."""
    return int(
        page.evaluate(
            """i => { const c = document.querySelectorAll('.calmnb-chat canvas')[i];
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            let n = 0; for (let k = 3; k < d.length; k += 4) n += d[k] > 0; return n; }""",
            chart,
        )
    )


def stop_and_measure(notebook: Notebook, index: int = 0) -> float:
    """Press Stop; return milliseconds from the click to the answer shown as ended."""
    notebook.chat(index).get_by_role("button", name="Stop").click()
    notebook.wait_status("ready", index)
    ms = float(notebook.page.evaluate("i => document.querySelectorAll('.calmnb-chat')[i].dataset.stopMs", index))
    print(f"Stop: {ms:.0f} ms from the click to the end of the answer")
    return ms


@pytest.mark.model
def test_the_chat_notebook_with_the_real_model(page: Any, lab: str, folder: Path, smollm2_gguf: Path) -> None:
    shutil.copy(REPOSITORY / "notebooks" / "02_chat.ipynb", folder / "02_chat.ipynb")
    notebook = Notebook(page, lab, "02_chat.ipynb")
    notebook.open()
    notebook.run_all(timeout=300)
    notebook.wait_status("ready", timeout=90)
    assert "sky is blue" in said(notebook)[1], "what Python asked is in the widget"

    chat = notebook.chat()
    chat.scroll_into_view_if_needed()
    before = chat.locator(".cn-big").first.inner_text(), ink(page, 1), ink(page, 2)
    notebook.page.locator(".cn-settings summary").click()

    def setting(label: str, value: str) -> None:
        chat.get_by_label(label).fill(value)
        chat.get_by_label(label).press("Tab")

    setting("temperature", "0")  # a greedy story here goes on for more than 1500 tokens: it cannot end before Stop
    setting("max tokens", "1500")
    notebook.say("Write a long story about a lighthouse and the sea.")
    notebook.wait_status("generating")
    first = said(notebook)[-1]
    page.wait_for_timeout(1500)
    later = said(notebook)[-1]
    assert len(later) > len(first), "tokens stream"
    assert later.startswith(first)
    assert stop_and_measure(notebook) < 1000
    after = chat.locator(".cn-big").first.inner_text(), ink(page, 1), ink(page, 2)
    assert after[0] != before[0], "the headline moves"
    assert after[2] > before[2], "points are added"
    assert "stopped" in chat.locator(".cn-meta").last.inner_text()

    setting("max tokens", "120")
    notebook.page.locator(".cn-settings summary").click()
    notebook.say("Explain in a few sentences how a rainbow forms.")
    page.wait_for_function("() => document.querySelectorAll('.calmnb-chat .cn-assistant').length === 3", polling=100)
    notebook.wait_status("ready")
    assert len(said(notebook)[-1]) > 3
    assert notebook.errors == []
    picture = folder / "chat_widget.png"
    page.wait_for_timeout(1500)
    chat.screenshot(path=picture)
    if os.environ.get("CALMNB_UPDATE_SCREENSHOT") == "1":
        target = REPOSITORY / "docs" / "images" / "chat_widget.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    print(f"screenshot: {picture}")


def test_stop_send_again_and_figures(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(
        page, lab, folder, "stop.ipynb", FAKE + f"chat = ChatWidget(FakeModel({LONG}, token_s=None), peak=20)\nchat"
    )
    notebook.say("Why?")
    notebook.wait_status("generating")
    page.wait_for_timeout(1000)
    assert stop_and_measure(notebook) < 1000
    stopped = said(notebook)[-1]
    notebook.say("Again?")
    page.wait_for_function("() => document.querySelectorAll('.calmnb-chat .cn-assistant').length === 2", polling=100)
    notebook.wait_status("generating")
    notebook.chat().get_by_label("Message", exact=True).press("Escape")
    notebook.wait_status("ready")
    texts = said(notebook)
    assert texts[1] == stopped, "nothing of the second answer leaked into the first"
    assert [texts[0], texts[2]] == ["Why?", "Again?"]
    assert "of 20 GB/s (given)" in notebook.chat().locator(".cn-peak-line").inner_text()
    assert notebook.chat().locator(".cn-table tbody tr").count() >= 7
    first_row = notebook.chat().locator(".cn-table tbody tr").first
    assert "ffn up" in first_row.inner_text()
    notebook.chat().locator(".cn-sort", has_text="time").click()
    assert "ffn up" not in first_row.inner_text(), "a click on the column turns the order"
    with page.expect_download() as download:
        notebook.chat().get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "events.csv"
    assert notebook.errors == []


def test_stop_works_while_a_cell_waits_for_the_answer(page: Any, lab: str, folder: Path) -> None:
    ipykernel = pytest.importorskip("ipykernel")
    if ipykernel.version_info < (7, 0):
        pytest.skip("ipykernel 6 handles no click while a cell runs; the Interrupt button ends the answer there")
    notebook = opened(
        page, lab, folder, "ask.ipynb", FAKE + f"chat = ChatWidget(FakeModel({LONG}, token_s=None), peak=20)\nchat", "1"
    )
    page.evaluate(
        """() => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
        kernel.requestExecute({ code: 'chat.ask("Go")' }); return null; }"""
    )
    notebook.wait_status("generating")
    page.wait_for_timeout(500)
    assert stop_and_measure(notebook) < 1500


def test_markup_said_by_the_model_is_inert(page: Any, lab: str, folder: Path) -> None:
    code = FAKE + f"chat = ChatWidget(FakeModel({ATTACK!r} * 3), peak=20, system={ATTACK!r})\nchat"
    notebook = opened(page, lab, folder, "attack.ipynb", code, f"chat.ask({ATTACK!r}); None")
    notebook.say(ATTACK)
    page.wait_for_function("() => document.querySelectorAll('.calmnb-chat .cn-assistant').length === 2", polling=100)
    notebook.wait_status("ready")
    assert said(notebook) == [ATTACK, ATTACK * 3] * 2
    assert notebook.chat().locator("img, svg, script").count() == 0
    static = page.locator(".calmnb-static")
    assert ATTACK in static.inner_text() or ATTACK in static.text_content()
    assert page.locator(".calmnb-static img, .calmnb-static svg, .calmnb-static script").count() == 0
    notebook.command("docmanager:save")
    page.wait_for_timeout(1500)
    notebook.open()
    page.wait_for_selector(".calmnb-chat .cn-assistant")
    page.wait_for_timeout(1000)
    assert page.evaluate("() => window.pwned") is None
    saved = json.loads((folder / "attack.ipynb").read_text())
    html = "".join(
        "".join(out["data"].get("text/html", "")) for cell in saved["cells"] for out in cell["outputs"] if "data" in out
    )
    assert "&lt;img" in html
    assert "<img" not in html


def test_reload_keeps_the_chat_and_the_figures(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "reload.ipynb", FAKE + "chat = ChatWidget(FakeModel('Blue. ' * 30), peak=20)\nchat")
    notebook.say("Sky?")
    page.wait_for_selector(".calmnb-chat .cn-assistant")
    notebook.wait_status("ready")
    before = said(notebook), notebook.chat().locator(".cn-big").first.inner_text()
    notebook.command("docmanager:save")
    notebook.open()
    page.wait_for_selector(".calmnb-chat .cn-assistant")
    assert (said(notebook), notebook.chat().locator(".cn-big").first.inner_text()) == before
    notebook.say("More?")
    page.wait_for_function("() => document.querySelectorAll('.calmnb-chat .cn-assistant').length === 2", polling=100)
    notebook.wait_status("ready")
    assert len(said(notebook)) == 4


def test_a_saved_chat_without_its_kernel_is_shown_and_says_so(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "saved.ipynb", FAKE + "chat = ChatWidget(FakeModel('Blue. ' * 30), peak=20)\nchat")
    notebook.say("Sky?")
    page.wait_for_selector(".calmnb-chat .cn-assistant")
    notebook.wait_status("ready")
    before = said(notebook), notebook.chat().locator(".cn-big").first.inner_text()
    page.wait_for_timeout(500)
    notebook.command("docmanager:save")
    page.wait_for_timeout(1000)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown().then(() => null)")
    notebook.open()
    page.wait_for_selector(".calmnb-chat.cn-readonly", timeout=90_000)
    assert (said(notebook), notebook.chat().locator(".cn-big").first.inner_text()) == before
    assert "no kernel" in notebook.chat().locator(".cn-banner").inner_text()
    assert notebook.chat().get_by_role("button", name="Send").is_disabled()
    page.wait_for_timeout(500)
    assert ink(page, 0) > 500, "the charts are drawn from the saved state"


def test_the_notebook_file_shows_the_chat_where_no_widget_runs(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "static.ipynb", FAKE + "chat = ChatWidget(FakeModel('Blue. ' * 30), peak=20)\nchat")
    notebook.say("Sky?")
    page.wait_for_selector(".calmnb-chat .cn-assistant")
    notebook.wait_status("ready")
    page.wait_for_timeout(1000)
    assert not page.locator(".calmnb-static").first.is_visible(), "beside a live widget the static view is hidden"
    notebook.command("docmanager:save")
    page.wait_for_timeout(1500)
    outputs = json.loads((folder / "static.ipynb").read_text())["cells"][0]["outputs"]
    html = "".join("".join(out["data"].get("text/html", "")) for out in outputs)
    assert "Blue. Blue." in html
    assert "tok/s" in html


def test_two_widgets_on_one_model(page: Any, lab: str, folder: Path) -> None:
    code = FAKE + f"model = FakeModel({LONG}, {LONG}.upper(), token_s=0.01)\none = ChatWidget(model, peak=20)\none"
    notebook = opened(page, lab, folder, "two.ipynb", code, "two = ChatWidget(model, peak=20)\ntwo")
    notebook.wait_status("ready", 1)
    notebook.say("A", 0)
    notebook.wait_status("generating", 0)
    notebook.say("B", 1)
    notebook.wait_status("queued", 1)
    assert "waiting" in notebook.chat(1).locator(".cn-state").inner_text()
    notebook.chat(0).get_by_role("button", name="Stop").click()
    notebook.wait_status("generating", 1)
    page.wait_for_timeout(400)
    notebook.chat(1).get_by_role("button", name="Stop").click()
    notebook.wait_status("ready", 1)
    assert said(notebook, 0)[1].startswith("The sky")
    assert said(notebook, 1)[1].startswith("THE SKY")
    ids = page.evaluate("() => [...document.querySelectorAll('.calmnb-chat [id]')].length")
    assert ids == 0


def test_themes_widths_and_keyboard(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(
        page, lab, folder, "look.ipynb", FAKE + f"chat = ChatWidget(FakeModel({LONG}), peak=20)\nchat", "chat.ask('Go'); None"
    )
    page.wait_for_timeout(800)
    colour = "() => getComputedStyle(document.querySelector('.calmnb-chat .cn-panels')).backgroundColor"
    pixels = "() => { const c = document.querySelectorAll('.calmnb-chat canvas')[1]; return c.toDataURL(); }"
    light = page.evaluate(colour), page.evaluate(pixels)
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_function("() => document.querySelector('.calmnb-chat').dataset.theme === 'dark'", polling=200)
    page.wait_for_function(f"before => ({pixels})() !== before", arg=light[1], polling=200)  # canvases are drawn anew
    assert page.evaluate(colour) != light[0]
    notebook.chat().screenshot(path=folder / "dark.png")
    notebook.set_theme("JupyterLab Light")

    columns = "() => getComputedStyle(document.querySelector('.calmnb-chat .cn-layout')).gridTemplateColumns.split(' ').length"
    assert page.evaluate(columns) == 2
    page.set_viewport_size({"width": 760, "height": 1240})
    page.wait_for_function("() => document.querySelector('.calmnb-chat').clientWidth < 700", polling=200)
    assert page.evaluate(columns) == 1
    wide = "() => { const r = document.querySelector('.calmnb-chat'); return r.scrollWidth - r.clientWidth; }"
    assert page.evaluate(wide) <= 1, "nothing sticks out sideways"
    page.set_viewport_size({"width": 1440, "height": 1240})

    chart = notebook.chat().get_by_label("Time per layer, stacked by stage")
    chart.focus()
    chart.press("ArrowRight")
    page.wait_for_selector(".calmnb-chat .cn-tip:not([hidden])")
    assert "layer 0" in notebook.chat().locator(".cn-tip").inner_text()
    notebook.chat().locator(".cn-token").nth(5).hover()
    page.wait_for_function("() => document.querySelector('.calmnb-chat .cn-tip').innerText.includes('position')", polling=100)
    assert "GB/s" in notebook.chat().locator(".cn-tip").inner_text()


def test_the_recording_opens_in_a_profile_view_below_the_chat(page: Any, lab: str, folder: Path) -> None:
    code = FAKE + f"chat = ChatWidget(FakeModel({ATTACK!r} * 3, 'Blue. ' * 30), peak=20)\nchat"
    notebook = opened(page, lab, folder, "profile.ipynb", code, "chat.ask('Sky?'); None")
    chat = notebook.chat()
    chat.get_by_role("button", name="Open in ProfileView").click()
    page.wait_for_selector(".calmnb-chat .calmnb-profile .cn-step-name b")
    view = chat.locator(".calmnb-profile")
    before = int(view.evaluate("(node) => node.dataset.rows"))
    assert before > 1000
    assert "Fake CPU" in view.locator(".cn-chips").inner_text()
    notebook.say("Again?")
    page.wait_for_function("() => document.querySelectorAll('.calmnb-chat .cn-assistant').length === 2", polling=100)
    notebook.wait_status("ready")
    view.get_by_role("button", name="Refresh").click()
    page.wait_for_function("n => Number(document.querySelector('.calmnb-profile').dataset.rows) > n", arg=before, polling=100)
    notebook.command("docmanager:save")
    notebook.open()
    page.wait_for_selector(".calmnb-chat .calmnb-profile .cn-step-name b")  # still there after the page was loaded again
    chat.get_by_role("button", name="close", exact=True).click()
    page.wait_for_function("() => !document.querySelector('.calmnb-chat .calmnb-profile')", polling=100)
    assert page.evaluate("() => window.pwned") is None
    assert notebook.errors == []
