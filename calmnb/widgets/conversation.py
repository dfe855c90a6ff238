"""The state of one chat, without any widget: turns, the answer in progress, its figures, and what the browser must know.

Several threads meet here (the model's worker, the widget's own, the kernel's), so everything that is read or written
together is read or written under `Conversation.lock`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import BusyError, CalmnbError, ConfigError, ContextError
from calmnb.profile.recorder import SessionRecorder
from calmnb.widgets.panels import LivePanels
from calmnb.widgets.transcript import Message, State, pack_tokens, utf16_length
from calmnb.widgets.worker import Run

__all__ = ["Conversation", "explain"]

_log = logging.getLogger("calmnb")

#: Figures are sent and drawn at most this often, in seconds: every redraw takes cores away from a model on the CPU.
PANELS_S = 0.25

_ENDINGS: dict[str, State] = {"cancelled": "stopped", "length": "length", "context": "context"}


class Conversation:
    """Turns of a chat and the figures of its tokens.

    Attributes
    ----------
    messages : list of Message
    run : Run or None
        The answer in progress.
    recorder : SessionRecorder or None
        Steps since the conversation began; None until there is a model.
    panels : LivePanels or None
    used : int
        Positions of the context in use.
    seq : int
        Number of the last delta of `run`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.messages: list[Message] = []
        self.run: Run | None = None
        self.recorder: SessionRecorder | None = None
        self.panels: LivePanels | None = None
        self.used = 0
        self.seq = 0
        self._model: Any = None
        self._seen_steps = 0
        self._panels_sent = 0.0

    def attach(self, model: Any, peak_gb_per_s: float | None) -> None:
        """Start recording `model`, holding it against a given peak, or none yet."""
        engine = model.engine
        with self.lock:
            self._model = model
            self.recorder = SessionRecorder(model)
            if peak_gb_per_s:
                self.recorder.meta["peaks"]["user"] = {"gb_per_s": float(peak_gb_per_s), "source": "given"}
            self.panels = LivePanels(
                engine.config, kv_dtype=engine.kv_dtype, seq_len=engine.seq_len, peak_gb_per_s=peak_gb_per_s
            )  # fmt: skip

    # ---- turns

    def begin(self, text: str) -> tuple[Run, Message]:
        """Add a user's message and an empty answer, and return the run that will fill it."""
        with self.lock:
            self.check_idle()
            run, answer = Run(), Message("assistant", "", "queued")
            self.messages += [Message("user", text), answer]
            self.run, self.seq = run, 0
            return run, answer

    def check_idle(self) -> None:
        """Raise BusyError while an answer is in progress."""
        if self.run is not None:
            raise BusyError("this chat is already answering; stop it with chat.stop() or wait for it with chat.wait()")

    def take_back(self, index: int) -> str:
        """Remove the user's message `index` and all after it; return its text. Negative counts from the end."""
        with self.lock:
            self.check_idle()
            where = index + len(self.messages) if index < 0 else index
            if not 0 <= where < len(self.messages) or self.messages[where].role != "user":
                mine = [i for i, m in enumerate(self.messages) if m.role == "user"]
                raise ConfigError(f"message {index} is not one of yours; yours are {mine or 'none, the chat is empty'}")
            text = self.messages[where].content
            del self.messages[where:]
            return text

    def last_user_index(self) -> int:
        """Index of the last message the user sent.

        Raises
        ------
        ConfigError
            If there is none.
        """
        for index in reversed(range(len(self.messages))):
            if self.messages[index].role == "user":
                return index
        raise ConfigError("there is nothing to retry: the conversation is empty; say something first")

    def clear(self) -> None:
        """Forget messages, figures and recording."""
        with self.lock:
            self.check_idle()
            self.messages.clear()
            self.used = self._seen_steps = 0
            if self.panels is not None and self.recorder is not None:
                self.panels.clear()
                self.recorder = SessionRecorder(self._model, peaks=self.recorder.meta.get("peaks", {}))

    def as_prompt(self, system: str) -> list[dict[str, str]]:
        """The conversation as a chat template takes it; an answer that has said nothing is left out."""
        with self.lock:
            head = [{"role": "system", "content": system}] if system else []
            return head + [{"role": m.role, "content": m.content} for m in self.messages if m.content or m.role == "user"]

    # ---- figures

    def begin_figures(self) -> None:
        """The means start anew with the answer that is about to be computed."""
        with self.lock:
            self.read_steps()
            if self.panels is not None:
                self.panels.reset()

    def read_steps(self) -> NDArray[np.float32] | None:
        """Feed the panels what was recorded since the last call; return the new points.

        The last step of an unfinished answer waits until its token has been chosen, which is part of its time.
        """
        with self.lock:
            if self.panels is None or self.recorder is None:
                return None
            steps = self.recorder.since(self._seen_steps)
            if steps and steps[-1].token < 0 and self.run is not None and not self.run.computed.is_set():
                steps.pop()
            self._seen_steps += len(steps)
            return self.panels.update(steps)

    def summary(self) -> dict[str, Any]:
        """Figures of the latest answer, see `LivePanels.summary`, and ``used``, positions of the context in use."""
        with self.lock:
            self.read_steps()
            return (self.panels.summary() if self.panels else {}) | {"used": self.used}

    # ---- the answer in progress

    def delta(self, run: Run) -> tuple[dict[str, Any], list[bytes]] | None:
        """What is new in `run` since the last call, as a message for the browser; None if nothing is.

        Returns
        -------
        content : dict
            ``run``, ``seq`` (1, 2, ... within a run), ``message`` (its index), ``pieces`` (texts of the new tokens),
            ``state``, ``used``; now and then ``summary``.
        buffers : list of bytes
            float32 rows of the new tokens (`TOKEN_FIELDS` without the first), float32 points (`POINT_FIELDS`), and with
            ``summary`` the layer matrix.
        """
        with self.lock:
            if run is not self.run:
                return None
            tokens = run.take()  # before the steps, so that each token's step has been read
            points = self.read_steps()
            message = self.messages[-1]
            pieces, rows = self._add_tokens(run, message, tokens)
            if not pieces and (points is None or not len(points)):
                return None
            self.seq += 1
            content: dict[str, Any] = {"type": "delta", "run": run.id, "seq": self.seq, "message": len(self.messages) - 1}
            content |= {"pieces": pieces, "state": message.state, "used": self.used}
            buffers = [np.array(rows, np.float32).tobytes(), b"" if points is None else points.tobytes()]
            now = time.monotonic()
            if self.panels is not None and self.panels.n_steps and now - self._panels_sent >= PANELS_S:
                self._panels_sent = now
                content["summary"] = self.panels.summary()
                buffers.append(self.panels.layers().tobytes())
            return content, buffers

    def _add_tokens(self, run: Run, message: Message, tokens: list[Any]) -> tuple[list[str], list[tuple[float, ...]]]:
        pieces: list[str] = []
        rows: list[tuple[float, ...]] = []
        for token in tokens:
            ms, rate = self.panels.token_cost(token.pos) if self.panels else (math.nan, math.nan)
            pieces.append(token.text)
            rows.append((utf16_length(token.text), ms, rate, token.pos, token.id))
            self.used = token.pos + 1
        message.content += "".join(pieces)
        message.tokens += rows
        if run.started.is_set() and message.state in ("queued", "prompt"):
            message.state = "streaming" if message.tokens else "prompt"
        generation = run.generation
        if generation is not None and not message.tokens:
            self.used = len(generation.prompt_ids or ())
        return pieces, rows

    def finish(self, run: Run) -> None:
        """Settle the answer of `run`, which has been computed: text, how it ended, figures."""
        with self.lock:
            if run is not self.run:
                return
            tokens = run.take()
            self.read_steps()
            message = self.messages[-1]
            self._add_tokens(run, message, tokens)
            if run.text is not None:
                message.content = run.text  # differs by text held back as a possible stop string, or dropped as one
            _settle(message, run)
            message.stats = {"tokens": len(message.tokens), "seconds": run.ended_at - run.asked_at}
            if self.panels is not None:
                figures = self.panels.own_figures()
                message.stats |= {key: figures[key] for key in ("tok_per_s", "first_token_s", "ms")}
            self.run = None

    def status(self) -> str:
        """Where the chat is: ready, queued, prompt, generating or stopping."""
        with self.lock:
            run = self.run
            if run is None:
                return "ready"
            if run.is_stopping:
                return "stopping"
            if not run.started.is_set():
                return "queued"
            return "generating" if self.messages[-1].tokens else "prompt"

    def state(self) -> dict[str, Any]:
        """Everything a view needs to draw the chat from nothing; arrays as bytes."""
        with self.lock:
            return {
                "transcript": [m.to_dict() for m in self.messages],
                "token_data": pack_tokens(self.messages).tobytes(),
                "summary": self.summary(),
                "points_data": self.panels.points(1024).tobytes() if self.panels else b"",
                "layers_data": self.panels.layers().tobytes() if self.panels else b"",
            }


def _settle(message: Message, run: Run) -> None:
    if run.error is None:
        message.state = _ENDINGS.get(run.stop_reason or "", "done")
        return
    message.state = "context" if isinstance(run.error, ContextError) else "error"
    message.error = explain(run.error)
    if not isinstance(run.error, CalmnbError):
        _log.error("the model failed while answering", exc_info=run.error)


def explain(error: BaseException) -> str:
    """One message for the person at the screen."""
    if isinstance(error, CalmnbError):
        return str(error)
    return f"internal error, {type(error).__name__}: {error}"
