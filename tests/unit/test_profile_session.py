"""Sessions: saving, loading, damaged files, exports, and how they show themselves."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calmnb.engine.base import Kernel
from calmnb.errors import CalmnbError, ConfigError, FormatError
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from calmnb.profile.trace import TABLES, chrome_trace
from tests.profile_fakes import SMOL, meta_of, noisy_recorder

SMALL = SMOL.replace(n_layers=2)


@pytest.fixture(scope="module")
def session() -> Session:
    return noisy_recorder(SMALL, tokens=6).session()


seconds = st.floats(0, 1e6, allow_nan=False)
json_text = st.text(st.characters(codec="utf-8"), max_size=8)
free_keys = json_text.map(lambda key: "my " + key)  # keys that calmnb knows hold values of their kind


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    times=st.lists(st.tuples(seconds, seconds, st.integers(0, 2**31), st.booleans()), max_size=4),
    meta=st.dictionaries(free_keys, st.none() | st.integers(-(2**60), 2**60) | json_text | st.lists(st.floats(0, 1))),
    text=json_text,
)
def test_saving_and_loading_is_identity(tmp_path: Path, times: list[Any], meta: dict[str, Any], text: str) -> None:
    recorder = SessionRecorder({**meta, "settings": {"warmup": 1}})
    for start, length, token, sampled in times:
        kernels = (Kernel("output", -1, text or "k"),)
        recorder.add("decode", 0, 1, 1, kernels, np.array([start]), np.array([start + length]), start, start + length)
        if sampled:
            recorder.sampled(1, token, start + length, start + length)
    recorder._text_of = lambda token: text  # type: ignore[method-assign]
    session = recorder.session()
    loaded = Session.load(session.save(tmp_path / "s.calmprof"))
    assert loaded.meta == session.meta
    pd.testing.assert_frame_equal(loaded.events, session.events)
    pd.testing.assert_frame_equal(loaded.steps, session.steps)


def test_a_loaded_session_gives_the_same_tables(session: Session, tmp_path: Path) -> None:
    loaded = Session.load(session.save(tmp_path / "s.npz"))
    assert loaded == session
    pd.testing.assert_frame_equal(loaded.kernels(), session.kernels())
    assert loaded.config == SMALL


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _header(**fields: Any) -> Any:
    return np.frombuffer(json.dumps({"format": "calmnb session", "version": 1, "meta": {}, **fields}).encode(), np.uint8)


_COLUMN = {"name": "run", "kind": "number"}
_LABELS = {"name": "a", "kind": "category", "labels": ["x"]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a zip",
        b"PK\x03\x04 torn",
        _npz(a=np.arange(3)),
        _npz(header=np.frombuffer(b"{", np.uint8)),
        _npz(header=np.frombuffer(b"[1]", np.uint8)),
        _npz(header=_header(format="other", events=[], steps=[])),
        _npz(header=_header(version=2, events=[], steps=[])),
        _npz(header=_header(events=[], steps=[])),
        _npz(header=_header(events=[_COLUMN], steps=[])),
        _npz(
            header=_header(events=[{"name": "a", "kind": "category", "labels": ["x"]}], steps=[]), **{"events.a": np.array([7])}
        ),
        _npz(header=_header(events=3, steps=[])),
    ],
    ids=[
        "empty",
        "text",
        "torn",
        "foreign",
        "cut JSON",
        "list",
        "format",
        "version",
        "no columns",
        "no array",
        "bad code",
        "type",
    ],
)
def test_a_foreign_or_damaged_file_is_a_format_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"bad\.npz"):
        Session.load(path)


_WRONG_META: list[dict[str, Any]] = [
    {"peaks": None}, {"peaks": {"measured": {"gb_per_s": "fast"}}}, {"peaks": {"user": {"gb_per_s": -1}}},
    {"peaks": {"user": 3}},
    {"kv_dtype": "x"}, {"kv_dtype": None}, {"versions": []}, {"versions": {"calmnb": 1}}, {"settings": "x"}, {"engine": {}},
    {"dtype": 3}, {"seq_len": "x"}, {"seq_len": 1.5}, {"threads": "two"}, {"config": "x"}, {"config": {"dim": 3}},
    {"config": {**meta_of(SMALL)["config"], "dim": 2.5}}, {"config": {**meta_of(SMALL)["config"], "n_layers": 10**30}},
    {"telemetry": {"columns": 3}}, {"gpu": 7, "launches": [{}]}, {"launches": [3]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", _WRONG_META, ids=str)
def test_metadata_of_another_kind_is_a_format_error(session: Session, tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = Session(session.events, session.steps, {**session.meta, **wrong}).save(tmp_path / "bad.npz")
    with pytest.raises(FormatError, match=r"bad\.npz"):
        Session.load(path)


@pytest.mark.parametrize("nan", [np.nan, np.inf, "x", 1j, np.datetime64(5, "s")], ids=str)
@pytest.mark.parametrize("column", ["steps.kv_len", "steps.start_s", "steps.warmup", "events.bytes_min", "events.step"])
def test_columns_of_another_kind_are_named(session: Session, tmp_path: Path, column: str, nan: Any) -> None:
    with np.load(session.save(tmp_path / "s.npz")) as good:
        arrays = dict(good)
    path = tmp_path / "bad.npz"
    path.write_bytes(_npz(**{**arrays, column: np.full(len(arrays[column]), nan)}))
    with pytest.raises(FormatError, match=rf"bad\.npz.*{column}"):
        Session.load(path)


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("events", {"stage": "softmax"}, r"events\.stage holds softmax; accepted are embed"),
        ("steps", {"phase": "both"}, r"steps\.phase"),
        ("steps", {"text": 5}, r"steps\.text"),
        ("steps", {"step": 0}, "twice"),
        ("steps", {"interval_s": np.inf}, "infinity"),
        ("events", {"start_s": 1e308}, "beyond"),
        ("events", {"bytes_min": -1e308}, "beyond"),
    ],
)
def test_values_no_recorder_writes_are_refused(
    session: Session, tmp_path: Path, table: str, changes: dict[str, Any], message: str
) -> None:
    frames = {"events": session.events, "steps": session.steps}
    frames[table] = frames[table].assign(**changes)
    path = Session(**frames, meta=session.meta).save(tmp_path / "bad.npz")
    with pytest.raises(FormatError, match=message):
        Session.load(path)


def test_any_cut_of_a_file_is_a_format_error(session: Session, tmp_path: Path) -> None:
    data = session.save(tmp_path / "s.npz").read_bytes()
    path = tmp_path / "cut.npz"
    for length in range(0, len(data) - 1, max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            Session.load(path)


def test_flipped_bytes_never_escape_as_another_error(session: Session, tmp_path: Path) -> None:
    data = session.save(tmp_path / "s.npz").read_bytes()
    path, random = tmp_path / "flip.npz", np.random.default_rng(0)
    for at in random.integers(0, len(data), 60):
        torn = bytearray(data)
        torn[at] ^= 0x5A
        path.write_bytes(torn)
        try:
            Session.load(path)
        except FormatError:
            continue


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.npz"
    path.write_bytes(_npz(header=_header(events=[_COLUMN], steps=[]), **{"events.run": np.array([{"a": 1}], object)}))
    with pytest.raises(FormatError):
        Session.load(path)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", b"\0" * 100_000)
    monkeypatch.setattr("calmnb.profile.store._MAX_BYTES", 50_000)
    with pytest.raises(FormatError, match="unpacks to"):
        Session.load(path)


def test_a_missing_file_is_a_format_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        Session.load(tmp_path / "nothing.npz")


@pytest.mark.parametrize("write", ["save", "to_csv", "to_chrome_trace"])
def test_a_folder_that_is_not_there_is_our_error(session: Session, tmp_path: Path, write: str) -> None:
    with pytest.raises(CalmnbError, match="choose another folder"):
        getattr(session, write)(tmp_path / "no" / "file")


def test_a_full_disk_leaves_nothing_behind(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(CalmnbError, match="No space left"):
        session.save(tmp_path / "s.npz")
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_is_not_json_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        Session(session.events, session.steps, {"bad": float("nan")})


def test_missing_columns_are_named(session: Session) -> None:
    with pytest.raises(ConfigError, match="events lacks kernel, source"):
        Session(session.events.drop(columns=["kernel", "source"]), session.steps, {})


def test_the_peak_is_the_users_then_measured_then_datasheet() -> None:
    peaks = {kind: {"gb_per_s": rate} for kind, rate in (("datasheet", 3.0), ("measured", 2.0), ("user", 1.0))}
    session = noisy_recorder(SMALL, tokens=1, peaks=peaks).session()
    assert [str(session.peak(which)) for which in (None, "datasheet", 7)] == [
        "1 GB/s (user)", "3 GB/s (datasheet)", "7 GB/s (user)",
    ]  # fmt: skip


@pytest.mark.parametrize("which", [0, -1.0, float("nan"), "fastest"])
def test_an_impossible_peak_is_refused(session: Session, which: Any) -> None:
    with pytest.raises(ConfigError):
        session.peak(which)


def test_chrome_trace_is_strict_json_with_the_times_of_the_events(session: Session, tmp_path: Path) -> None:
    text = session.to_chrome_trace(tmp_path / "t.json").read_text()
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 2]
    rows = session.events[session.events["stage"] != "gap"]
    assert len(slices) == len(rows)
    assert [event["ts"] for event in slices] == pytest.approx((rows["start_s"] * 1e6).tolist(), abs=2e-3)
    assert [event["args"]["bytes_min"] for event in slices] == rows["bytes_min"].tolist()
    assert {"process_name", "thread_name"} == {event["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert sum(event["ph"] == "C" and event["name"] == "GB/s" for event in trace["traceEvents"]) == 6


def test_slices_of_one_thread_never_overlap_even_if_kernels_do() -> None:
    recorder = SessionRecorder({})
    kernels = tuple(Kernel("matmul_qkv", i, "k") for i in range(4))
    starts = np.array([0.0, 1.0, 2.0, 3.0])
    recorder.add("decode", 0, 1, 1, kernels, starts, starts + 1.5, 0.0, 5.0)
    trace = chrome_trace(recorder.session())["traceEvents"]
    assert [event["tid"] for event in trace if event["ph"] == "X" and event["tid"] != 1] == [2, 3, 2, 3]
    for thread in (2, 3):
        ends = 0.0
        for event in (event for event in trace if event["ph"] == "X" and event["tid"] == thread):
            assert event["ts"] >= ends
            ends = event["ts"] + event["dur"]


@pytest.mark.parametrize("table", TABLES)
def test_csv_has_the_table_that_was_asked_for(session: Session, tmp_path: Path, table: str) -> None:
    frame = getattr(session, table)
    frame = frame() if callable(frame) else frame
    read = pd.read_csv(session.to_csv(tmp_path / "t.csv", table), keep_default_na=True)
    assert list(read.columns) == list(frame.columns)
    assert len(read) == len(frame)


def test_an_unknown_table_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'rows'; accepted are events"):
        session.to_csv(tmp_path / "t.csv", "rows")


def test_the_summary_is_one_line_with_all_that_an_issue_needs() -> None:
    recorder = SessionRecorder(meta_of(SMALL, peaks={"measured": {"gb_per_s": 20.0}}))
    kernels = (Kernel("output", -1, "k"),)
    for pos in range(5, 8):
        recorder.add("decode", pos, pos + 1, 1, kernels, np.array([pos * 1.0]), np.array([pos + 0.01]), pos * 1.0, pos + 0.01)
    assert recorder.session().summary() == (
        "fake-model | fp8 (KV fp16) | Fake CPU, 2 threads | 100 tok/s | 10 ms/token | 2.831 GB/s | 14% of 20 GB/s (measured) | "
        "context 7-8 | calmnb 0.1.0 | numba 0.65.0 | numpy 2.2.0 | git abc1234 | 2026-11-29"
    )


def test_text_fits_80_columns_apart_from_the_two_sentences(session: Session) -> None:
    assert max(len(line) for line in repr(session).splitlines()[1:-1]) <= 80


def test_html_escapes_whatever_a_session_brings() -> None:
    evil = "<img src=x onerror=alert(1)>"
    peaks = {"measured": {"gb_per_s": 5.0, "source": evil}}
    recorder = noisy_recorder(SMALL, tokens=3, model=evil, device=evil, time_source=evil, peaks=peaks)
    html = recorder.session()._repr_html_()
    assert "<img" not in html
    assert "&lt;img" in html


def test_html_sets_no_colour_of_text_or_page_and_runs_no_script(session: Session) -> None:
    html = session._repr_html_()
    assert "<script" not in html
    assert "color:" not in html.replace("background:", "")


def test_an_empty_session_shows_itself() -> None:
    session = SessionRecorder({}).session()
    assert "no decoded token" in session._repr_html_()
    assert "no decoded token" in repr(session)


def test_importing_calmnb_and_its_recorder_imports_no_pandas() -> None:
    code = (
        "import sys, calmnb, calmnb.profile.recorder; print(sorted({'pandas','matplotlib','numba','cupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_selected_steps_are_a_session_of_their_own() -> None:
    whole = noisy_recorder(SMALL, tokens=40, first=100, stride=100).session()
    part = whole.select(kv_len=(1001, 2001))
    assert part.steps["kv_len"].tolist() == list(range(1001, 2002, 100))
    assert part.steps["step"].tolist() == list(range(11))
    assert sorted(part.events["step"].unique()) == list(range(11))
    sums = part.events.groupby("step")["exclusive_s"].sum().to_numpy()
    assert sums == pytest.approx(part.steps["duration_s"].to_numpy(), rel=1e-9)
    assert part.meta == whole.meta
    assert whole.select(kv_len=1001).steps["kv_len"].tolist() == [1001]
    assert len(whole.select(runs=[whole.steps["run"].max()]).steps) == 40
    assert whole.select(kv_len=(0, 10**6)) == whole
    with pytest.raises(ConfigError, match=r"no step has kv_len \(7, 8\), runs None; runs begin at the contexts 24, 101"):
        whole.select(kv_len=(7, 8))
