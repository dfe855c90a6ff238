"""ChatWidget without a browser: the conversation, Stop, turns of several widgets, errors in place, what is sent."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.errors import BusyError, ConfigError, ContextError
from calmnb.widgets import ChatWidget
from calmnb.widgets.bridge import use_own_subshell
from calmnb.widgets.transcript import TOKEN_FIELDS
from calmnb.widgets.worker import worker_for
from tests.fake_model import FakeModel

LONG = "word " * 400
ATTACK = "<img src=x onerror=alert(1)></script>"


@pytest.fixture
def make_chat() -> Iterator[Callable[..., ChatWidget]]:
    made: list[ChatWidget] = []

    def make(model: Any = None, **options: Any) -> ChatWidget:
        chat = ChatWidget(model or FakeModel(), **({"peak": 20.0} | options))
        assert chat.wait(20)
        made.append(chat)
        return chat

    yield make
    for chat in made:
        chat.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], list[bytes]]]:
    """Every custom message to the browser."""
    import ipywidgets

    messages: list[tuple[dict[str, Any], list[bytes]]] = []
    monkeypatch.setattr(
        ipywidgets.Widget, "send", lambda _self, content, buffers=None: messages.append((content, buffers or []))
    )
    return messages


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_ask_returns_the_answer_and_keeps_the_conversation(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel("Blue.", "Because."))
    assert chat.ask("What colour is the sky?") == "Blue."
    assert chat.ask("Why?") == "Because."
    assert [m["content"] for m in chat.messages] == ["What colour is the sky?", "Blue.", "Why?", "Because."]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_the_model_sees_system_prompt_history_and_sampling(make_chat: Callable[..., ChatWidget]) -> None:
    model = FakeModel("Yes.")
    chat = make_chat(model, system="Be brief.", temperature=0.5, top_k=3, max_tokens=7)
    chat.ask("One?")
    chat.ask("Two?", temperature=0.0)
    assert [m["content"] for m in model.prompts[1]] == ["Be brief.", "One?", "Yes.", "Two?"]
    assert (model.options[0]["temperature"], model.options[0]["top_k"], model.options[0]["max_tokens"]) == (0.5, 3, 7)
    assert model.options[1]["temperature"] == 0.0
    assert chat.sampling["temperature"] == 0.5, "options of one answer do not stick"


def test_aask_waits_without_blocking_the_loop(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.001))

    async def both() -> tuple[str, int]:
        task = asyncio.create_task(chat.aask("Go", max_tokens=50))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return task.result(), ticks

    text, ticks = asyncio.run(both())
    assert text == LONG[:250]
    assert ticks > 3


def test_cancelling_aask_stops_the_answer(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.005))

    async def cancel() -> None:
        task = asyncio.create_task(chat.aask("Go"))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert chat.wait(5)
    assert chat.transcript[-1]["state"] == "stopped"


def test_interrupting_ask_stops_keeps_the_text_and_raises(
    make_chat: Callable[..., ChatWidget], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.005))
    real_wait, calls = threading.Event.wait, []

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and timeout == 0.1:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
        return real_wait(self, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        chat.ask("Go")
    assert not chat.is_busy
    assert 0 < len(chat.messages[-1]["content"]) < len(LONG)


@pytest.mark.timed
def test_stop_ends_within_200_ms_and_keeps_the_text(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.01))
    chat.send("Go")
    until(lambda: chat.messages[-1]["role"] == "assistant")
    start = time.perf_counter()
    chat.stop()
    assert chat.wait(5)
    assert time.perf_counter() - start < 0.2
    assert chat.transcript[-1]["state"] == "stopped"
    assert LONG.startswith(chat.messages[-1]["content"])


def test_stop_while_the_prompt_is_read(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, prompt_s=30))
    chat.send("Go")
    until(lambda: chat.status == "prompt")
    chat.stop()
    assert chat.wait(5)
    assert chat.transcript[-1]["state"] == "stopped"
    chat.model.prompt_s = 0
    assert chat.ask("Again", max_tokens=1) == "word "


def test_a_second_message_while_answering_is_refused(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.005))
    chat.send("Go")
    until(lambda: chat.messages[-1]["role"] == "assistant")
    with pytest.raises(BusyError, match="already answering"):
        chat.send("More")
    with pytest.raises(BusyError):
        chat.retry()
    chat.stop()
    assert chat.wait(5)
    assert len(chat.messages) == 2


def test_two_widgets_on_one_model_take_turns(make_chat: Callable[..., ChatWidget]) -> None:
    model = FakeModel("first " * 40, "second " * 40, token_s=0.004)
    one, two = make_chat(model), make_chat(model)
    one.send("A")
    two.send("B")
    until(lambda: two.status == "queued")
    assert two.wait(10)
    assert one.messages[-1]["content"] == "first " * 40
    assert two.messages[-1]["content"] == "second " * 40


def test_a_waiting_answer_can_be_stopped_before_its_turn(make_chat: Callable[..., ChatWidget]) -> None:
    model = FakeModel(LONG, token_s=0.005)
    one, two = make_chat(model), make_chat(model)
    one.send("A")
    two.send("B")
    until(lambda: two.status == "queued")
    two.stop()
    one.stop()
    assert two.wait(5)
    assert len(model.prompts) == 1, "the second answer was never begun"
    assert two.transcript[-1]["state"] == "stopped"


def test_a_model_busy_elsewhere_is_an_error_in_place(make_chat: Callable[..., ChatWidget]) -> None:
    model = FakeModel("Hello.")
    chat = make_chat(model)
    model.lock.acquire()
    with pytest.raises(BusyError):
        chat.ask("Hi")
    assert chat.transcript[-1]["state"] == "error"
    assert "generating already" in chat.transcript[-1]["error"]
    model.lock.release()
    assert chat.ask("Hi again") == "Hello."


def test_an_engine_failure_keeps_the_chat(make_chat: Callable[..., ChatWidget], caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel("abcdefghij")
    chat = make_chat(model)
    model.fail_at = 1
    with pytest.raises(RuntimeError):
        chat.ask("Hi")
    assert chat.messages[-1]["content"] == "abcde"
    assert "the fake engine broke" in chat.transcript[-1]["error"]
    assert "the fake engine broke" in caplog.text
    model.fail_at = -1
    chat.retry()
    assert chat.wait(5)
    assert chat.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "abcdefghij"}]


def test_context_full_is_said_and_the_chat_kept(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, seq_len=30))
    chat.ask("Go")
    assert chat.transcript[-1]["state"] == "context"
    with pytest.raises(ContextError):
        chat.ask("one " * 40)
    assert chat.transcript[-1]["state"] == "context"
    assert "the context holds 30" in chat.transcript[-1]["error"]
    assert len(chat.messages) == 3


def test_retry_and_edit_replace_what_followed(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel("1", "2", "3", "4"), system="S")
    chat.ask("a")
    chat.ask("b")
    chat.retry()
    assert chat.wait(5)
    assert [m["content"] for m in chat.messages] == ["S", "a", "1", "b", "3"]
    chat.edit(1, "A")
    assert chat.wait(5)
    assert [m["content"] for m in chat.messages] == ["S", "A", "4"]
    chat.edit(0, "T")
    assert chat.system == "T"
    for index in (2, 9, -9):
        with pytest.raises(ConfigError, match="not one of yours"):
            chat.edit(index, "x")


def test_new_forgets_messages_figures_and_session(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.005))
    chat.send("Go")
    until(lambda: len(chat.session.steps) > 3)
    chat.new()
    assert chat.messages == []
    assert len(chat.session.steps) == 0
    assert chat.figures["tok_per_s"] is None
    until(lambda: chat.transcript == [])


@pytest.mark.parametrize("text", ["", "  \n", None, 3])
def test_an_empty_message_is_refused(make_chat: Callable[..., ChatWidget], text: Any) -> None:
    with pytest.raises(ConfigError, match="empty"):
        make_chat().send(text)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"warmth": 1}, {"peak": -1}, {"height": 1}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ChatWidget(FakeModel(), **options)


def test_figures_and_session_agree(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG))
    chat.ask("Go", max_tokens=40)
    figures, tokens = chat.figures, chat.session.tokens()
    assert figures["tokens"] == 38, "39 decode steps, the first of them warm-up"
    assert figures["ms"] == pytest.approx(tokens["time_ms"].iloc[1:].mean(), rel=1e-3)
    stages = chat.session.stages().set_index("stage")
    for row in figures["stages"]:
        if row["stage"] == "matmul_ffn_up":
            assert row["us"] == pytest.approx(stages.loc["matmul_ffn_up", "time_us"], rel=0.05)
    assert chat.session.peak().gb_per_s == 20.0


def test_deltas_are_numbered_batched_and_complete(
    sent: list[tuple[dict[str, Any], list[bytes]]], make_chat: Callable[..., ChatWidget]
) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.002))
    chat.ask("Go", max_tokens=200)
    deltas = [(c, b) for c, b in sent if c["type"] == "delta"]
    assert [c["seq"] for c, _ in deltas] == list(range(1, len(deltas) + 1))
    assert {c["run"] for c, _ in deltas} == {chat.run_id}
    assert "".join(piece for c, _ in deltas for piece in c["pieces"]) == chat.messages[-1]["content"]
    assert len(deltas) < 100, "tokens travel in batches"
    rows = np.concatenate([np.frombuffer(b[0], np.float32) for _, b in deltas]).reshape(-1, len(TOKEN_FIELDS) - 1)
    assert len(rows) == 200
    assert np.isfinite(rows).all(), "each token knows the time of its step"


def test_a_view_that_asks_gets_everything(
    sent: list[tuple[dict[str, Any], list[bytes]]], make_chat: Callable[..., ChatWidget]
) -> None:
    chat = make_chat(FakeModel("Blue."))
    chat.ask("Sky?")
    chat._on_browser_message(chat, {"type": "hello"}, [])
    until(lambda: any(c["type"] == "snapshot" for c, _ in sent))
    content, buffers = next((c, b) for c, b in sent if c["type"] == "snapshot")
    assert [m["content"] for m in content["state"]["transcript"]] == ["Sky?", "Blue."]
    assert content["state"]["status"] == "ready"
    assert len(buffers) == 3
    json.dumps(content)


def test_requests_of_the_browser(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel("1", "2", "3"), system="S")

    def ask(**content: Any) -> None:
        chat._on_browser_message(chat, content, [])
        time.sleep(0.1)
        assert chat.wait(5)

    ask(type="send", text="a")
    ask(type="retry")
    ask(type="edit", index=0, text="b")
    assert [m["content"] for m in chat.messages] == ["S", "b", "3"]
    ask(type="sampling", values={"temperature": 0.1, "seed": None})
    assert chat.sampling["temperature"] == 0.1
    ask(type="sampling", values={"temperature": -4})
    assert "temperature" in chat.notice
    assert chat.sampling["temperature"] == 0.1
    ask(type="system", text="T")
    assert chat.system == "T"
    assert chat.notice == ""
    ask(type="send", text=" ")
    assert "empty" in chat.notice
    ask(type="new")
    assert len(chat.messages) == 1
    for junk in ({"type": "format c:"}, {}, "text", None, {"type": "edit"}, {"type": "sampling", "values": 3}):
        chat._on_browser_message(chat, junk, [])
    assert chat.ask("still alive?") == "3"


@pytest.mark.parametrize("what", ["session", "csv", "trace", "md", "json", "html"])
def test_downloads(sent: list[tuple[dict[str, Any], list[bytes]]], make_chat: Callable[..., ChatWidget], what: str) -> None:
    chat = make_chat(FakeModel("Blue. " * 5))
    chat.ask("Sky?")
    chat._on_browser_message(chat, {"type": "download", "what": what, "view": "v"}, [])
    until(lambda: any(c["type"] == "download" for c, _ in sent) or bool(chat.notice))
    assert chat.notice == ""
    content, buffers = next((c, b) for c, b in sent if c["type"] == "download")
    assert content["view"] == "v"
    assert len(buffers[0]) > 100


def test_nothing_to_download_is_said(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat()
    chat._on_browser_message(chat, {"type": "download", "what": "csv"}, [])
    until(lambda: "nothing to save" in chat.notice)


def test_export_by_suffix(make_chat: Callable[..., ChatWidget], tmp_path: Path) -> None:
    chat = make_chat(FakeModel(ATTACK))
    chat.ask("Sky?")
    assert json.loads(chat.export(tmp_path / "c.json").read_text())["messages"][1]["content"] == ATTACK
    assert ATTACK in chat.export(tmp_path / "c.md").read_text()
    assert "<img" not in chat.export(tmp_path / "c.html").read_text()
    with pytest.raises(ConfigError, match="md, json and html"):
        chat.export(tmp_path / "c.exe")


def test_saved_state_and_static_view_hold_the_chat_escaped(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(ATTACK))
    chat.ask(ATTACK)
    state = chat.get_state()
    assert [m["content"] for m in state["transcript"]] == [ATTACK, ATTACK]
    assert len(state["points_data"]) > 0
    bundle, _ = chat._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "&lt;img" in bundle["text/html"]
    assert "<img" not in bundle["text/html"]
    assert "</script>" not in bundle["text/html"]


def test_a_path_is_loaded_in_the_background(make_chat: Callable[..., ChatWidget], monkeypatch: pytest.MonkeyPatch) -> None:
    import calmnb.model

    def load(path: str, progress: Callable[[str], None]) -> FakeModel:
        progress("compiling kernels")
        time.sleep(0.1)
        return FakeModel("Hello.")

    monkeypatch.setattr(calmnb.model, "load", load)
    chat = ChatWidget("x.calm", peak=5.0)
    assert chat.status == "loading"
    assert chat.ask("Hi") == "Hello.", "a message sent early waits for the model"
    assert chat.info["peak_label"] == "5 GB/s (given)"
    assert worker_for(chat.model) is chat._worker
    chat.close()


def test_a_path_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    chat = ChatWidget(tmp_path / "none.calm", peak=5.0)
    assert chat.wait(10)
    assert chat.status == "error"
    assert "none.calm" in chat.notice
    with pytest.raises(ConfigError, match=r"none\.calm"):
        chat.ask("Hi")
    chat.close()


def test_closing_ends_the_answer_and_nobody_waits_for_ever(make_chat: Callable[..., ChatWidget]) -> None:
    chat = make_chat(FakeModel(LONG, token_s=0.005))
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(chat.ask("Go")))
    thread.start()
    until(lambda: chat.is_busy)
    chat.close()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(BusyError, match="closed"):
        chat.send("More")


def test_messages_stay_in_the_shell_they_were_sent_to() -> None:
    class Comm:
        def _reply_subshell_for(self, data: Any, default: Any) -> str:
            return "main"

    comm = Comm()
    assert use_own_subshell(comm)
    assert comm._reply_subshell_for({}, "subshell") == "subshell"
    assert not use_own_subshell(object())
    assert not use_own_subshell(None)


def test_importing_calmnb_imports_no_widgets() -> None:
    code = "import sys, calmnb; sys.exit('anywidget' in sys.modules or 'IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_with_the_real_model(smollm2: Callable[[str], Path], make_chat: Callable[..., ChatWidget]) -> None:
    import calmnb

    with calmnb.load(smollm2("fp8"), seq_len=256) as model:
        chat = make_chat(model, temperature=0.0)
        assert "Paris" in chat.ask("What is the capital of France?")
        assert chat.figures["of_peak"] > 0
        assert {row["stage"] for row in chat.figures["stages"]} >= {"matmul_qkv", "attention", "output"}
        assert chat.figures["used"] == 37 + chat.transcript[-1]["stats"]["tokens"]
