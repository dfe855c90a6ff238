"""Chat with a model in a notebook, and watch where each token's time and bytes go.

`ChatWidget` ties a `Conversation` to the browser half in ``static/``, which only draws. Three kinds of thread take part.
The model's worker computes tokens. The widget's own thread batches what is new into one message every 40 ms, because one
message a token makes a browser fall seconds behind, and is the only one that publishes. The kernel's threads, where
cells and clicks arrive, only set flags and put requests in queues, so that Stop never waits for anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calmnb.errors import BusyError, CalmnbError, ConfigError
from calmnb.files import write_text
from calmnb.widgets import bridge
from calmnb.widgets.assets import bundle, static_text
from calmnb.widgets.chat_publisher import ChatPublisher
from calmnb.widgets.conversation import Conversation, explain
from calmnb.widgets.downloads import export_text, make_download
from calmnb.widgets.setup import check_text, checked_sampling, peak_of
from calmnb.widgets.transcript import Message, to_html
from calmnb.widgets.worker import ModelWorker, Run, adopt, worker_for

if TYPE_CHECKING:
    from calmnb.widgets.profile_view import ProfileView

__all__ = ["ChatWidget"]

_log = logging.getLogger("calmnb")


class ChatWidget(ChatPublisher):
    """A chat on the left, live figures of every token on the right.

    Parameters
    ----------
    model : Model, or path of a ``.calm`` file
        A path is loaded in the background, with its progress in the widget.
    system : str, optional
        System prompt.
    max_tokens : int
        Longest answer, in tokens.
    peak : float, optional
        Memory bandwidth in GB/s that percentages refer to. By default this machine's own, measured once
        (or the data sheet's, on a GPU).
    height : int
        Least height of the transcript in pixels, at least 160.
    temperature : float
        0 always takes the likeliest token.
    **sampling
        ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``seed``: see `calmnb.sampler.Sampling`.

    Attributes
    ----------
    system : str
        The system prompt of the next answer; may be set.
    sampling : dict
        ``max_tokens`` and the sampling options; change them with `configure`.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Everything shown can be read back: `messages`, `session`, `figures`. `ask` and `aask` wait for the answer; `send`
    returns at once. Interrupting the kernel ends `ask` and `aask`, and the answer with them; for an answer started by
    `send` or in the browser, use Stop or `stop`. Widgets that share a model take turns.

    Examples
    --------
    >>> chat = ChatWidget(calmnb.load("model.calm"))  # doctest: +SKIP
    >>> chat.ask("Why is the sky blue?")  # doctest: +SKIP
    """

    _esm = bundle("format.js", "charts.js", "theme.js", "panels.js", "chat_store.js", "chat.js")
    _css = static_text("base.css") + static_text("chat.css")

    def __init__(
        self,
        model: Any,
        *,
        system: str | None = None,
        max_tokens: int = 512,
        peak: float | None = None,
        height: int = 360,
        temperature: float = 0.7,
        **sampling: Any,
    ) -> None:
        if peak is not None and not 0 < peak < 1e6:
            raise ConfigError(f"peak is {peak}; it must be a bandwidth in GB/s, above 0 (or None to measure it)")
        if height < 160:
            raise ConfigError(f"height is {height}; it must be at least 160 pixels")
        chosen = checked_sampling({"max_tokens": max_tokens, "temperature": temperature} | sampling)
        self._chat = Conversation()
        self._model: Any = None
        self._peak, self._peak_label = peak, f"{peak:.4g} GB/s (given)" if peak else ""
        self._closed = False
        self._profile: ProfileView | None = None
        self._last_run: Run | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        super().__init__(system=system or "", height=height, sampling=chosen)
        self._static_id = f"calmnb-{self.model_id}"
        bridge.use_own_subshell(self.comm)
        self.on_msg(self._on_browser_message)
        if isinstance(model, str | os.PathLike):
            self._worker = ModelWorker("load")
        else:
            self._worker = worker_for(model)
            self._take_model(model)
        bridge.start_thread(self._serve, name=f"calmnb-chat-{self.model_id[:6]}")
        self._worker.submit(lambda: self._start(model))

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model; None while its file is still loading."""
        return self._model

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, as a chat template takes it: dicts with ``role`` and ``content``, system prompt first."""
        return self._chat.as_prompt(self.system)

    @property
    def session(self) -> Any:
        """A `calmnb.profile.Session` of every step of this conversation so far."""
        if self._chat.recorder is None:
            raise BusyError("the chat's model is still loading; wait for it with chat.wait()")
        return self._chat.recorder.session()

    @property
    def figures(self) -> dict[str, Any]:
        """What the panels show for the latest answer; see `calmnb.widgets.panels.LivePanels.summary`."""
        return self._chat.summary()

    def __repr__(self) -> str:
        return f"ChatWidget({self.info.get('model', 'loading')}, {len(self.messages)} messages, {self.status})"

    # ---- acting -----------------------------------------------------------------------------------------------------

    def send(self, text: Any, buffers: Any = None, **options: Any) -> None:
        """Say `text` and return at once; the answer streams into the widget.

        Parameters
        ----------
        text : str
            Not empty.
        **options
            ``max_tokens`` and sampling options for this answer only.

        Raises
        ------
        BusyError
            If this chat is already answering.
        ConfigError
            If `text` is blank or an option is out of range.
        """
        if isinstance(text, dict):  # ipywidgets' own meaning of the name: a message to the views
            super().send(text, buffers)
        else:
            self._begin(text, options)

    def ask(self, text: str, **options: Any) -> str:
        """Say `text`, wait for the answer and return it.

        Interrupting the kernel stops the answer, keeps what was said so far, and raises KeyboardInterrupt.
        Options and errors are those of `send`, and any error of the answer itself.
        """
        run, message = self._begin(text, options)
        try:
            while not run.finished.wait(0.1):
                pass
        except KeyboardInterrupt:
            run.stop()
            run.finished.wait(10)
            raise
        return _answer(run, message)

    async def aask(self, text: str, **options: Any) -> str:
        """Like `ask`, for ``await``: the kernel goes on handling other messages meanwhile. Cancelling stops the answer."""
        run, message = self._begin(text, options)
        try:
            while not run.finished.is_set():
                await asyncio.sleep(0.02)
        except (asyncio.CancelledError, KeyboardInterrupt):
            run.stop()
            raise
        return _answer(run, message)

    def stop(self) -> None:
        """End the answer in progress before its next token, keeping its text. Does nothing when there is none."""
        run = self._chat.run
        if run is not None:
            run.stop()
            self._post(self._publish_status)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the model is loaded and no answer is in progress.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits as long as it takes.

        Returns
        -------
        bool
            False if `timeout` passed first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_busy or self.status == "loading" or (self._last_run and not self._last_run.finished.is_set()):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def retry(self) -> None:
        """Answer the last message again; returns at once.

        Raises
        ------
        ConfigError
            If nothing has been said yet.
        BusyError
            If this chat is already answering.
        """
        with self._chat.lock:
            self._check_ready()
            text = self._chat.take_back(self._chat.last_user_index())
            self._begin(text, {})

    def edit(self, index: int, text: str) -> None:
        """Replace what you said in message `index`, forget what came after, and answer again; returns at once.

        Parameters
        ----------
        index : int
            Index into `messages`; negative counts from the end. It must be one of yours, or the system prompt, which is
            replaced without a new answer.
        text : str
        """
        check_text(text)
        with self._chat.lock:
            self._check_ready()
            messages = self.messages
            where = index + len(messages) if index < 0 else index
            if self.system and where == 0:
                self.system = text
                return
            self._chat.take_back(where - bool(self.system) if where >= 0 else -len(messages) - 1)
            self._begin(text, {})

    def new(self) -> None:
        """Start a new conversation: stops the answer in progress, forgets messages, figures and session."""
        self.stop()
        self.wait()
        self._clear()

    def configure(self, **options: Any) -> None:
        """Change ``max_tokens`` or sampling options for the following answers; ConfigError if one is out of range."""
        self.sampling = checked_sampling(dict(self.sampling) | options)

    def open_profile(self) -> ProfileView:
        """Open a `ProfileView` of this conversation in the chat's place, below it; returns it.

        It shows what has been recorded so far; its Refresh and Live buttons follow what comes after. Opened again, it is
        the same view, brought up to date.

        Raises
        ------
        BusyError
            If the model is still loading.
        """
        from calmnb.widgets.profile_view import ProfileView

        recorder = self._chat.recorder
        if recorder is None:
            raise BusyError("the chat's model is still loading; wait for it with chat.wait()")
        if self._profile is None or not self._profile.follows(recorder):
            self.close_profile()
            self._profile = ProfileView(recorder)
        else:
            self._profile.refresh()
        self.profile_id = str(self._profile.model_id)
        return self._profile

    def close_profile(self) -> None:
        """Close the view that `open_profile` opened. Does nothing when there is none."""
        self.profile_id = ""
        if self._profile is not None:
            self._profile.close()
            self._profile = None

    def export(self, path: str | Path) -> Path:
        """Write the conversation to `path`; the suffix chooses Markdown (``.md``), ``.json`` or ``.html``.

        Returns
        -------
        Path

        Raises
        ------
        ConfigError
            If the suffix is another one.
        CalmnbError
            If the file cannot be written; what stood there before is kept.
        """
        return write_text(path, self._exported(Path(path).suffix.lower().lstrip(".")))

    def static_html(self) -> str:
        """The conversation and headline as escaped HTML without scripts: what a saved notebook shows without a kernel."""
        with self._chat.lock:
            return to_html(self._chat.messages, self.info, self.figures, self.system, self._static_id)

    def close(self) -> None:
        """Stop, and free the widget. The model stays open."""
        chat: Conversation | None = getattr(self, "_chat", None)
        if chat is not None and not self._closed:  # None when the constructor refused its arguments
            self._closed = True
            if chat.run is not None:
                chat.run.stop()
            self._post(lambda: None)
            self.close_profile()
        super().close()

    # ---- starting, in the model's worker ------------------------------------------------------------------------------

    def _start(self, source: Any) -> None:
        try:
            if self._model is None:
                from calmnb.model import load

                self._show_progress("loading the model")
                model = load(source, progress=self._show_progress)
                adopt(model, self._worker)
                self._take_model(model)
            if not self._peak:
                self._show_progress("measuring the memory bandwidth")
                self._find_peak()
        except BaseException as error:
            problem = explain(error)
            self._post(lambda: self._set(status="error", notice=problem, progress={}))
        else:
            self._post(self._publish_start)

    def _show_progress(self, text: str) -> None:
        self._post(lambda: self._set(progress={"text": text}))

    def _take_model(self, model: Any) -> None:
        self._model = model
        self._chat.attach(model, self._peak)
        self.info = self._describe()

    def _find_peak(self) -> None:
        chat = self._chat
        assert chat.recorder is not None
        assert chat.panels is not None
        peak, self._peak_label = peak_of(chat.recorder)
        with chat.lock:
            chat.panels.peak_gb_per_s = peak

    # ---- answering ----------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._closed:
            raise BusyError("this chat is closed; make a new ChatWidget on the same model")
        if self.status == "error":
            raise ConfigError(f"this chat has no model: {self.notice}")
        self._chat.check_idle()

    def _begin(self, text: str, options: Mapping[str, Any]) -> tuple[Run, Message]:
        check_text(text)
        chosen = checked_sampling(dict(self.sampling) | dict(options))
        with self._chat.lock:
            self._check_ready()
            run, answer = self._chat.begin(text)
            self._last_run = run
            prompt = self.messages
        self._post(self._publish_conversation)
        self._worker.submit(lambda: self._compute(run, prompt, chosen))
        return run, answer

    def _compute(self, run: Run, prompt: list[dict[str, str]], options: dict[str, Any]) -> None:
        """In the model's worker: the whole answer."""

        def start() -> Any:
            if self._model is None:
                raise ConfigError(f"this chat has no model: {self.notice or 'it could not be loaded'}")
            self._chat.begin_figures()
            return self._model.generate(prompt, recorder=self._chat.recorder, **options)

        run.execute(start)
        self._post(lambda: self._finish(run))

    def _clear(self) -> None:
        self._chat.clear()
        self.close_profile()
        self._post(self._publish_conversation)
        self._post(self._update_static)

    # ---- from the browser ---------------------------------------------------------------------------------------------

    def _on_browser_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """In a kernel thread, possibly not the main one: stop at once, queue everything else."""
        if not isinstance(content, dict):
            return
        if content.get("type") == "stop":
            self.stop()
        else:
            self._post(lambda: self._handle(content))

    def _handle(self, content: dict[str, Any]) -> None:
        actions: dict[Any, Callable[[], object]] = {
            "hello": self._send_snapshot,
            "send": lambda: self._begin(content.get("text", ""), {}),
            "retry": self.retry,
            "edit": lambda: self.edit(int(content["index"]) + bool(self.system), content.get("text", "")),
            "new": self._clear,
            "sampling": lambda: self.configure(**content.get("values", {})),
            "system": lambda: setattr(self, "system", str(content.get("text", ""))),
            "profile": self.open_profile,
            "close_profile": self.close_profile,
            "download": lambda: self._download(str(content.get("what")), content.get("view")),
        }
        action = actions.get(content.get("type"))
        if action is None:
            return
        try:
            action()
            if content["type"] != "hello" and self.status != "error":
                self.notice = ""
        except Exception as error:
            if not isinstance(error, CalmnbError):
                _log.exception("a request of the chat widget failed")
            self.notice = explain(error)
            self.send_state(["sampling", "notice"])  # the view shows again what is in force

    def _download(self, what: str, view: Any) -> None:
        if what in ("md", "json", "html"):
            name, mime, data = f"chat.{what}", "text/plain;charset=utf-8", self._exported(what).encode()
        else:
            name, mime, data = make_download(self.session, what)
        super().send({"type": "download", "view": view, "name": name, "mime": mime}, [data])

    def _exported(self, kind: str) -> str:
        with self._chat.lock:
            return export_text(kind, self._chat.messages, self.info, self.figures, self.system)


def _answer(run: Run, message: Message) -> str:
    if run.error is not None:
        raise run.error
    return message.content
