"""ProfileView without a browser: what it sends, what it accepts, windows of steps, live recorders, the static view."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.engine.base import STAGES, Kernel
from calmnb.errors import CalmnbError, ConfigError, FormatError
from calmnb.profile import Session, SessionRecorder
from calmnb.widgets import ChatWidget, ProfileView
from calmnb.widgets.columns import unpack_columns
from calmnb.widgets.profile_data import EVENT_FIELDS, STEP_FIELDS, ProfileData
from tests.fake_model import FakeModel
from tests.profile_fakes import SMOL, meta_of, noisy_recorder

ATTACK = "<img src=x onerror=alert(1)></script>"


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def session() -> Session:
    return noisy_recorder(SMOL, tokens=20).session()


def overlapping() -> SessionRecorder:
    """One step of three kernels of 10, 20 and 10 us: the second begins 5 us before the first ends, the third 4 us late."""
    kernels = (Kernel("embed", -1, "e"), Kernel("matmul_qkv", 0, "m"), Kernel("attention", 0, "a"))
    recorder = SessionRecorder(meta_of(SMOL, settings={"warmup": 0}))
    starts, ends = np.array([0.0, 5.0, 29.0]) * 1e-6, np.array([10.0, 25.0, 39.0]) * 1e-6
    recorder.add("decode", 7, 8, 1, kernels, starts, ends, 0.0, 40e-6)
    return recorder


def steps_of(view: ProfileView) -> dict[str, Any]:
    return unpack_columns(view.layout_of["steps"], view.steps_data)


def rows_of(view: ProfileView) -> dict[str, Any]:
    return unpack_columns(view.layout_of["events"], view.events_data)


def test_sums_of_a_step_add_up() -> None:
    view = ProfileView(overlapping().session())
    steps = {name: values[0] for name, values in steps_of(view).items()}
    assert set(steps) == set(STEP_FIELDS)
    assert steps["step_us"] == pytest.approx(40)
    assert steps["rows_us"] == pytest.approx(10 + 15 + 10)
    assert steps["gap_us"] == pytest.approx(5)
    assert steps["wall_us"] - steps["rows_us"] == pytest.approx(5), "what overlaps"
    assert steps["rows_us"] + steps["gap_us"] == pytest.approx(steps["step_us"])
    rows = rows_of(view)
    assert set(EVENT_FIELDS) <= set(rows)
    np.testing.assert_allclose(rows["start"][:3], [0, 5, 29], atol=1e-4)
    np.testing.assert_allclose(rows["own"][:3], [10, 15, 10], atol=1e-4)
    assert [STAGES[code] for code in rows["stage"]] == ["embed", "matmul_qkv", "attention", "gap"], "the gap comes last"


def test_rows_are_those_of_the_session(session: Session) -> None:
    view = ProfileView(session)
    rows, steps = rows_of(view), steps_of(view)
    assert len(rows["start"]) == len(session.events)
    assert rows["own"].sum() == pytest.approx(session.events["exclusive_s"].sum() * 1e6, rel=1e-5)
    moved = rows["cost_min"][rows["cost"]]
    assert moved.sum() == session.events["bytes_min"].sum()
    assert rows["cost_flops"][rows["cost"]].sum() == session.events["flops"].sum()
    names = [view.info["kernels"][code] for code in rows["kernel"]]
    assert sorted(names) == sorted(session.events["kernel"].astype(str))
    np.testing.assert_allclose(steps["rows_us"] + steps["gap_us"], steps["step_us"], rtol=1e-4)
    assert steps["row"][0] == 0
    assert (np.diff(steps["row"]) > 0).all()


def test_it_opens_at_a_typical_decode_step(session: Session) -> None:
    view = ProfileView(session)
    chosen = session.steps.iloc[view.step]
    settled = session.steps[(session.steps["phase"] == "decode") & ~session.steps["warmup"]]
    assert chosen["phase"] == "decode"
    assert not chosen["warmup"]
    assert abs(chosen["duration_s"] - settled["duration_s"].median()) == pytest.approx(
        (settled["duration_s"] - settled["duration_s"].median()).abs().min()
    )


def test_a_long_session_travels_in_windows() -> None:
    session = noisy_recorder(SMOL, tokens=60).session()
    view = ProfileView(session, max_rows=2000, step=30)
    first, last = view.info["window"]
    assert first <= 30 < last < 61
    assert len(rows_of(view)["start"]) <= 2000
    assert len(steps_of(view)["pos"]) == 61, "the steps are all there"
    view.step = 60
    assert view.info["window"][1] == 61
    assert view.selected["step"].unique().tolist() == [60]
    with pytest.raises(ConfigError, match="step is 61; this session has 61 steps, 0 to 60"):
        view.step = 61
    assert view.step == 60


def test_a_step_that_is_larger_than_the_limit_is_shown_all_the_same() -> None:
    data = ProfileData.of(noisy_recorder(SMOL, tokens=3).session())
    assert data.window(2, 1) == (2, 3)
    assert data.window(99, 10_000) == (0, 4)


def test_what_is_selected_in_the_browser_is_a_frame(session: Session) -> None:
    view = ProfileView(session, step=4)
    assert view.selected["step"].unique().tolist() == [4]
    view.set_state({"selection": memoryview(np.array([0, 2, 10**6], "<u4").tobytes())})  # as a message brings it
    assert view.selected["stage"].tolist() == ["embed", "attention"]
    view.selection = b""
    view.scope = "all"
    assert len(view.selected) == len(session.events)


def test_a_saved_session_opens_by_its_path(session: Session, tmp_path: Path) -> None:
    path = session.save(tmp_path / "run.calmprof")
    assert ProfileView(path).info["model"] == "fake-model"
    with pytest.raises(FormatError, match="no such file"):
        ProfileView(tmp_path / "none.calmprof")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"session": 7}, "shows a Session; got a int"),
        ({"step": 99}, "step is 99; this session has 21 steps"),
        ({"max_rows": 3}, "at least 1000 rows"),
        ({"live": True}, "follows a SessionRecorder"),
        ({"peak": "best"}, "accepted are 'user'"),
    ],
)
def test_wrong_arguments_are_explained(session: Session, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProfileView(**({"session": session} | arguments))


def test_a_recorder_is_refreshed_on_request() -> None:
    recorder = SessionRecorder(meta_of(SMOL))
    view = ProfileView(recorder)
    assert view.info["n_steps"] == 0
    assert "no decoded token" in view.static_html()
    recorder.steps += noisy_recorder(SMOL, tokens=9).steps
    view.refresh()
    assert view.info["n_steps"] == 10
    view.step = 3
    recorder.steps += noisy_recorder(SMOL, tokens=4).steps
    view._on_browser_message(view, {"type": "refresh"}, [])
    until(lambda: view.info["n_steps"] == 15)
    assert view.step == 3, "a refresh keeps the step on show"
    view.close()


def test_a_live_view_follows_its_recorder() -> None:
    recorder = SessionRecorder(meta_of(SMOL))
    steps = noisy_recorder(SMOL, tokens=200).steps
    view = ProfileView(recorder, live=True)
    recorder.steps += steps[:5]
    until(lambda: view.info["n_steps"] == 5)
    assert view.step == 4
    recorder.steps += steps[5:]
    until(lambda: view.info["n_steps"] == 128)
    assert steps_of(view)["pos"][-1] == steps[-1].pos, "the latest are shown"
    view.live = False
    view.refresh()
    assert view.info["n_steps"] == 201
    view.close()


def test_the_trace_comes_from_the_kernel(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    view = ProfileView(session)
    monkeypatch.setattr(view, "send", lambda content, buffers=None: sent.append((content, buffers or [])))
    view._on_browser_message(view, {"type": "download", "what": "trace", "view": "v1"}, [])
    until(lambda: bool(sent))
    content, (data,) = sent[0]
    assert (content["view"], content["name"]) == ("v1", "trace.json")
    assert len(json.loads(data)["traceEvents"]) > len(session.events) / 2
    view._on_browser_message(view, {"type": "download", "what": "/etc/passwd"}, [])
    until(lambda: "accepted are" in view.notice)
    view.close()


def test_the_static_view_has_the_layers_and_no_markup_of_the_model() -> None:
    session = noisy_recorder(SMOL, tokens=4, model=ATTACK).session()
    view = ProfileView(session)
    html = view.static_html()
    assert "&lt;img" in html
    assert "<img" not in html
    assert html.count("layer 29, ") == 5, "a bar of each stage of the layer"
    bundle = view._repr_mimebundle_()
    assert bundle is not None
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} <= set(bundle[0])
    assert f"calmnb-{view.model_id}" in html


def test_the_state_is_small_and_free_of_rows_as_json(session: Session) -> None:
    view = ProfileView(session)
    assert len(json.dumps(view.info)) < 6000
    assert len(view.events_data) < 24 * len(session.events) + 4000


def test_a_chat_opens_its_recording() -> None:
    chat = ChatWidget(FakeModel("Blue. " * 9), peak=20.0)
    assert chat.wait(20)
    chat.ask("Sky?")
    view = chat.open_profile()
    assert chat.profile_id == view.model_id
    n = view.info["n_steps"]
    assert n == len(chat.session.steps)
    chat.ask("Again?")
    assert chat.open_profile() is view
    assert view.info["n_steps"] > n
    chat.new()
    assert chat.profile_id == ""
    assert not view.follows(chat._chat.recorder)
    chat.close()


def test_a_chat_without_its_model_says_so(tmp_path: Path) -> None:
    chat = ChatWidget(tmp_path / "none.calm")
    with pytest.raises(CalmnbError, match="loading"):
        chat.open_profile()
    chat.close()
