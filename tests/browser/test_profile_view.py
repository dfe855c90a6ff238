"""ProfileView, CompareView and KernelTable in a real JupyterLab: what a person does, and how fast it moves."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import REPOSITORY, Notebook, notebook_json

# One run in about fifteen loses JupyterLab's first message on a busy machine, whatever the notebook holds: one more try.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.flaky(reruns=1)]

ATTACK = '<img src=x onerror="window.pwned=1"></script><script>window.pwned=2</script>'
IMPORTS = "import calmnb\nfrom tests.profile_fakes import LLAMA_1B, SMOL, noisy_recorder\n"
#: 66 steps of 152 kernels, a choice of token and a gap each: more than 10,000 rows.
LONG = (
    IMPORTS
    + "session = noisy_recorder(SMOL, tokens=66, model='smollm2-135m').session()\nview = calmnb.ProfileView(session)\nview"
)
LEAST_FPS = 30.0

#: Counts frames while something is done in each of them; resolves to frames a second and the longest frame in ms.
FRAMES = """([selector, ms, kind]) => new Promise((resolve) => {
  const node = document.querySelector(selector);
  const box = node.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.55, clientY: box.top + 120, bubbles: true, cancelable: true };
  const start = performance.now();
  let [frames, last, worst] = [0, start, 0];
  const step = (now) => {
    worst = Math.max(worst, now - last);
    last = now;
    if (now - start >= ms) return resolve([1000 * frames / (now - start), worst]);
    frames += 1;
    const phase = (now - start) / ms;
    if (kind === "zoom") node.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: phase < 0.5 ? -40 : 40 }));
    if (kind === "pan") node.dispatchEvent(new WheelEvent("wheel", { ...at, deltaX: phase < 0.5 ? 30 : -30, deltaY: 0 }));
    if (kind === "scroll") node.scrollTop += phase < 0.5 ? 100 : -100;
    (window.calmViews ||= []).push(document.querySelector(".calmnb-profile .cn-window")?.style.cssText);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def opened(page: Any, lab: str, folder: Path, name: str, *cells: str) -> Notebook:
    """Write a notebook of `cells`, open it, run it, and wait for its first widget."""
    (folder / name).write_text(notebook_json(*cells))
    notebook = Notebook(page, lab, name)
    notebook.open()
    notebook.run_all()
    problems = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
    assert not problems, problems[0]
    page.wait_for_selector(".calmnb-profile", timeout=90_000)
    page.wait_for_timeout(500)
    return notebook


def keep(locator: Any, folder: Path, name: str) -> None:
    """Take a picture, into the documentation too where asked."""
    locator.screenshot(path=folder / name)
    if os.environ.get("CALMNB_UPDATE_SCREENSHOT") == "1":
        shutil.copy(folder / name, REPOSITORY / "docs" / "images" / name)
    print(f"screenshot: {folder / name}")


def frames(page: Any, part: str, kind: str, words: str) -> float:
    """Frames a second while something moves: the best of up to three tries, for other work may hold up one."""
    best = 0.0
    for _ in range(3):
        fps, worst = page.evaluate(FRAMES, [f".calmnb-profile {part}", 2500, kind])
        print(f"{words}: {fps:.1f} frames/s, longest frame {worst:.0f} ms")
        best = max(best, fps)
        if best >= LEAST_FPS:
            break
    return best


def data(view: Any, name: str) -> str:
    return str(view.evaluate("(node, name) => node.dataset[name]", name))


def until(page: Any, condition: str, *, timeout: float = 10) -> None:
    """Wait until an expression about the first view, `v`, is true."""
    page.wait_for_function(
        f"() => {{ const v = document.querySelector('.calmnb-profile'); return {condition}; }}",
        timeout=timeout * 1000,
        polling=50,
    )


def python(page: Any, expression: str) -> str:
    """Value of an expression in the notebook's kernel, as text."""
    return str(
        page.evaluate(
            """async (code) => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            const future = kernel.requestExecute({ code: '', user_expressions: { x: `str(${code})` }, silent: true });
            const reply = await future.done; return reply.content.user_expressions.x.data["text/plain"]; }""",
            expression,
        )
    ).strip("'\"")


def wait_python(page: Any, expression: str, wanted: str) -> None:
    """Wait until an expression has a value in the kernel: what the browser says arrives there a little later."""
    for _ in range(50):
        found = python(page, expression)
        if found == wanted:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{expression} is {found}, not {wanted}")


def saved(page: Any, view: Any, button: str) -> tuple[str, bytes]:
    """Press a button that saves a file; return its name and contents."""
    with page.expect_download() as download:
        view.get_by_role("button", name=button, exact=True).click()
    return str(download.value.suggested_filename), Path(download.value.path()).read_bytes()


def spot(view: Any, t_us: float, lane: int) -> dict[str, float]:
    """Where in the timeline a time and a lane are, in pixels."""
    x, y = line(view, f"[line.x({t_us}), line.y({lane}) + line.laneHeight / 2]")
    return {"x": x, "y": y}


def line(view: Any, expression: str) -> Any:
    return view.locator(".cn-timeline").evaluate(f"(node) => {{ const line = node.calmTimeline; return {expression}; }}")


@pytest.mark.timed
def test_ten_thousand_rows_move_at_thirty_frames_a_second(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "frames.ipynb", LONG)
    view = page.locator(".calmnb-profile")
    view.scroll_into_view_if_needed()
    assert int(data(view, "rows")) >= 10_000
    view.get_by_role("button", name="all tokens").click()
    view.get_by_role("button", name="single rows").click()
    until(page, "Number(v.querySelector('.cn-vbox').dataset.rows) >= 10000")
    page.wait_for_timeout(500)
    view.locator(".cn-timeline").focus()
    for lanes in ("layers", "layers × stages"):
        view.get_by_role("group", name="rows").get_by_role("button", name=lanes, exact=True).click()
        view.locator(".cn-timeline").focus()
        for kind in ("zoom", "pan"):
            fps = frames(page, ".cn-timeline", kind, f"{kind}, {lanes}, {data(view, 'rows')} rows")
            assert fps >= LEAST_FPS
    assert len(set(page.evaluate("() => window.calmViews"))) > 20, "the frames were those of a moving picture"
    fps = frames(page, ".cn-vscroll", "scroll", "table, 10,000 rows, scrolled 100 pixels a frame")
    assert fps >= LEAST_FPS
    assert view.locator(".cn-vscroll tbody tr").count() < 100, "only rows in sight are in the page"
    assert notebook.errors == []


def test_hover_zoom_select_sort_filter_switch_and_export(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "work.ipynb", LONG)
    view = page.locator(".calmnb-profile")
    view.scroll_into_view_if_needed()
    plot = view.locator(".cn-timeline")
    step = int(python(page, "view.step"))

    # the header is the session's
    own = python(page, f"session.steps.duration_s.iloc[{step}] * 1e6")
    assert view.locator(".cn-main .cn-value").inner_text() == f"{float(own) / 1e3:.2f} ms"
    assert view.locator(".cn-figure").nth(3).inner_text().startswith("0 µs"), "nothing overlaps on a CPU"

    # hover: time, bytes, GB/s, percent of the peak
    origin = line(view, "line.domain[0]")
    middle = line(view, "(line.rec.begin(line.members[0] + 4, false) + line.rec.end(line.members[0] + 4)) / 2")
    plot.hover(position=spot(view, middle, 1))
    tip = view.locator(".cn-tip")
    tip.wait_for()
    said = tip.inner_text()
    assert said.startswith("ffn up, layer 0")
    for part in ("matvec_fp8", "µs exclusive", "of the step", "1.77 MB must move", "GB/s", "% of peak"):
        assert part in said

    # wheel: the page's until the plot has been clicked, then a zoom around the pointer
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(200)
    assert line(view, "line.isWhole()")
    plot.click(position={"x": 300, "y": 8})
    plot.hover(position=spot(view, middle, 1))
    page.mouse.wheel(0, -600)
    page.wait_for_function("() => !document.querySelector('.cn-timeline').calmTimeline.isWhole()", polling=50)
    assert line(view, "line.view[0]") <= middle <= line(view, "line.view[1]")

    # keyboard: plus, arrows, 0, and from kernel to kernel
    plot.focus()
    span = line(view, "line.view[1] - line.view[0]")
    plot.press("+")
    assert line(view, "line.view[1] - line.view[0]") == pytest.approx(0.7 * span)
    at = line(view, "line.view[0]")
    plot.press("ArrowRight")
    assert line(view, "line.view[0]") > at
    plot.press("-")
    plot.press("0")
    assert line(view, "line.isWhole()")
    for _ in range(3):
        plot.press(".")
    assert "attention, layer 1" in view.locator(".cn-hidden[role=status]").inner_text(), "on from the kernel under the pointer"
    plot.press("Enter")
    until(page, "v.dataset.selected === '30'")  # its kernel's group in the table
    assert view.locator(".cn-vrow[aria-selected=true]").inner_text().startswith("attention_fp16")
    plot.press("Escape")
    until(page, "v.dataset.selected === 'all'")

    # a range links table, roofline and the line between
    page.mouse.move(*(plot.bounding_box()[k] + d for k, d in (("x", 300), ("y", 60))))
    page.mouse.down()
    page.mouse.move(*(plot.bounding_box()[k] + d for k, d in (("x", 700), ("y", 90))), steps=4)
    page.mouse.up()
    until(page, "Number(v.dataset.selected) > 20")
    some = int(data(view, "selected"))
    first, last = line(view, "line.range")
    began = f"(session.events.start_s - session.steps.start_s.iloc[{step}]) * 1e6"
    rows = f"session.events[(session.events.step == {step}) & (session.events.stage != 'gap')"
    inside = f"len({rows} & ({began} <= {last - origin}) & ({began} + session.events.duration_s * 1e6 >= {first - origin})])"
    assert int(python(page, inside)) == some, "the rows of the session that reach into the range"
    assert "Selected:" in view.locator(".cn-selection").inner_text()
    wait_python(page, "len(view.selected)", str(some))  # Python can read what is selected
    view.get_by_role("button", name="clear selection").click()
    until(page, "v.dataset.selected === 'all'")

    # a stage too
    view.locator(".cn-stage-key", has_text="attention").click()
    until(page, "v.dataset.selected === '30'")
    assert "30 rows" in view.locator(".cn-selection").inner_text()
    view.locator(".cn-stage-key", has_text="attention").click()

    # table: sort, filter with its rules, choose, copy
    view.get_by_role("button", name="single rows").click()
    until(page, "v.querySelector('.cn-vbox').dataset.rows === '154'")
    times = [float(t.replace(",", "")) for t in view.locator(".cn-vrow .cn-cell:nth-child(5)").all_inner_texts() if t][:5]
    assert times == sorted(times, reverse=True)
    view.locator(".cn-sort", has_text="start µs").click()
    view.locator(".cn-sort", has_text="start µs").click()
    until(page, "v.querySelector('[data-key=start]').getAttribute('aria-sort') === 'ascending'")
    box = view.get_by_label("Filter Kernels")
    for text, count in (
        ("ffn", 60),
        ("ffn -down", 30),
        ("layer:3-7 attention", 5),
        ("stage:logits", 1),
        ("time>1000000", 0),
        ("", 154),
    ):
        box.fill(text)
        until(page, f"v.querySelector('.cn-vbox').dataset.rows === '{count}'")
    box.fill("speed>3")
    until(page, "v.querySelector('.cn-count').innerText.startsWith('no column')")
    box.fill("layer:3-7 ffn")
    until(page, "v.dataset.selected === '10'")  # what the filter leaves is what is selected
    grid = view.get_by_role("grid")
    grid.focus()
    grid.press("ArrowDown")
    grid.press("Enter")
    until(page, "v.dataset.selected === '1'")
    grid.press("Control+c")
    until(page, "v.querySelector('.cn-count').innerText === 'copied 1 row'")
    copied = page.evaluate("() => navigator.clipboard.readText()").split("\n")
    assert copied[0].split("\t")[:3] == ["kernel", "stage", "layer"]
    assert copied[1].split("\t")[:3] == ["matvec_fp8", "ffn up", "3"]
    grid.press("Enter")
    view.get_by_role("button", name="Copy").click()
    until(page, "v.querySelector('.cn-count').innerText === 'copied 10 rows'")

    # exports: the table as it stands, the picture, the trace
    name, content = saved(page, view, "CSV")
    table = list(csv.DictReader(io.StringIO(content.decode())))
    assert name == "profile.csv"
    assert [row["layer"] for row in table] == [str(layer) for layer in range(3, 8) for _ in range(2)], (
        "the rows, in the order shown"
    )
    wanted = python(page, f"session.events[(session.events.step == {step}) & (session.events.layer == 3) & "
                          "(session.events.stage == 'matmul_ffn_up')].exclusive_s.iloc[0] * 1e6")  # fmt: skip
    assert math.isclose(float(table[0]["exclusive_us"]), float(wanted), rel_tol=1e-5)
    name, content = saved(page, view, "PNG")
    assert (name, content[:8]) == ("profile.png", b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000
    name, content = saved(page, view, "Chrome trace")
    assert name == "trace.json"
    assert len(json.loads(content)["traceEvents"]) > 10_000
    box.fill("")
    until(page, "v.dataset.selected === 'all'")

    # another token, and wall time
    strip = view.get_by_role("slider")
    strip.focus()
    strip.press("End")
    until(page, "v.querySelector('[role=slider]').getAttribute('aria-valuenow') === '66'")
    wait_python(page, "view.step", "66")
    view.get_by_role("button", name="wall", exact=True).click()
    until(page, "v.querySelector('[data-key=time] button').title.startsWith('From start to end')")
    wait_python(page, "view.time", "wall")
    assert notebook.errors == []


def test_overlaps_show_in_wall_time(page: Any, lab: str, folder: Path) -> None:
    code = (
        "import calmnb\nfrom tests.unit.test_widget_profile import overlapping\n"
        "view = calmnb.ProfileView(overlapping().session())\nview"
    )
    opened(page, lab, folder, "overlap.ipynb", code)
    view = page.locator(".calmnb-profile")
    figures = [text.split("\n")[0] for text in view.locator(".cn-figure").all_inner_texts()]
    assert figures == ["40.0 µs", "35.0 µs", "5.00 µs", "5.00 µs"], "step, rows, gap, overlap"
    assert line(view, "[...line.rec.gapFrom].map((t, k) => line.rec.gapTo[k] - t)") == pytest.approx([4, 1], abs=1e-3)
    second = "line.rec.begin(1, {}), line.rec.end(1)"
    assert line(view, f"[{second.format('false')}]") == pytest.approx([10, 25], abs=1e-3), "from the end of the one before"
    view.get_by_role("button", name="wall", exact=True).click()
    until(page, "v.querySelector('.cn-figure:nth-of-type(2) .cn-value').innerText === '40.0 µs'")
    assert line(view, f"[{second.format('true')}]") == pytest.approx([5, 25], abs=1e-3)


def test_a_saved_view_works_without_its_kernel_and_as_static_html(page: Any, lab: str, folder: Path) -> None:
    code = IMPORTS + f"calmnb.ProfileView(noisy_recorder(SMOL, tokens=9, model={ATTACK!r}).session())"
    notebook = opened(page, lab, folder, "saved.ipynb", code)
    view = page.locator(".calmnb-profile")
    assert view.locator(".cn-name").inner_text() == ATTACK
    assert view.locator("img, svg, script").count() == 0
    assert not page.locator(".calmnb-static").first.is_visible(), "beside a live widget the static view is hidden"
    notebook.command("docmanager:save")
    page.wait_for_timeout(1500)
    outputs = json.loads((folder / "saved.ipynb").read_text())["cells"][0]["outputs"]
    html = "".join("".join(out["data"].get("text/html", "")) for out in outputs)
    assert "layer 29" in html
    assert "&lt;img" in html
    assert "<img" not in html
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown().then(() => null)")
    notebook.open()
    page.wait_for_selector(".calmnb-profile.cn-readonly", timeout=90_000)
    assert "no kernel" in view.locator(".cn-banner").inner_text()
    assert view.get_by_role("button", name="Chrome trace").is_disabled()
    view.locator(".cn-stage-key", has_text="attention").click()
    until(page, "v.dataset.selected === '30'")
    assert saved(page, view, "CSV")[0] == "profile.csv"
    assert page.evaluate("() => window.pwned") is None
    assert notebook.errors == []


def test_a_recorder_is_followed_live(page: Any, lab: str, folder: Path) -> None:
    code = IMPORTS + (
        "import threading, time\nfrom calmnb.profile import SessionRecorder\nfrom tests.profile_fakes import meta_of\n"
        "recorder = SessionRecorder(meta_of(SMOL))\nsteps = noisy_recorder(SMOL, tokens=40).steps\n"
        "view = calmnb.ProfileView(recorder)\nview"
    )
    feed = (
        "def feed():\n    for step in steps:\n        recorder.steps.append(step)\n        time.sleep(0.1)\n"
        "threading.Thread(target=feed, daemon=True).start()"
    )
    notebook = opened(page, lab, folder, "live.ipynb", code)
    view = page.locator(".calmnb-profile")
    assert "nothing recorded yet" in view.locator(".cn-step-name").inner_text()
    view.get_by_role("button", name="Live", exact=True).click()
    page.evaluate(
        """(code) => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
        kernel.requestExecute({ code }); return null; }""",
        feed,
    )
    until(page, "Number(v.dataset.rows) > 0")
    seen = int(data(view, "rows"))
    until(page, f"Number(v.dataset.rows) > {seen + 152 * 8}")
    until(page, "Number(v.dataset.rows) === 41 * 154", timeout=30)
    assert view.get_by_role("slider").get_attribute("aria-valuenow") == "40", "the latest step is on show"
    assert notebook.errors == []


def test_themes_and_widths(page: Any, lab: str, folder: Path) -> None:
    notebook = opened(page, lab, folder, "look.ipynb", LONG)
    view = page.locator(".calmnb-profile")
    pixels = "() => document.querySelector('.calmnb-profile .cn-timeline canvas').toDataURL()"
    light = page.evaluate(pixels)
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_function("() => document.querySelector('.calmnb-profile').dataset.theme === 'dark'", polling=200)
    page.wait_for_function(f"before => ({pixels})() !== before", arg=light, polling=200)  # canvases are drawn anew
    notebook.set_theme("JupyterLab Light")
    columns = "() => getComputedStyle(document.querySelector('.cn-below')).gridTemplateColumns.split(' ').length"
    assert page.evaluate(columns) == 2
    page.set_viewport_size({"width": 760, "height": 1240})
    until(page, "v.clientWidth < 700")
    assert page.evaluate(columns) == 1
    assert view.evaluate("(node) => node.scrollWidth - node.clientWidth") <= 1, "nothing sticks out sideways"
    page.wait_for_timeout(500)
    view.screenshot(path=folder / "narrow.png")
    wide = view.locator(".cn-timeline canvas").bounding_box()["width"]
    assert wide <= view.bounding_box()["width"]
    named = "n.hidden || n.innerText || n.title || n.getAttribute('aria-label')"
    parts = "[...node.querySelectorAll('button, [tabindex], input')]"
    roles = view.evaluate(f"(node) => {parts}.filter((n) => !({named})).map((n) => n.className)")
    assert roles == [], "everything that takes the focus has a name"
    assert notebook.errors == []
