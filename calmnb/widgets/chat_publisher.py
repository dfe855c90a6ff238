"""The half of `ChatWidget` that tells the browser: its state, and the one thread that publishes it.

New text is batched into one message every 40 ms, because one message a token makes a browser fall seconds behind.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

import traitlets

from calmnb.widgets.conversation import Conversation
from calmnb.widgets.fallback import StaticFallback
from calmnb.widgets.setup import describe
from calmnb.widgets.worker import Run

__all__ = ["FLUSH_S", "ChatPublisher"]

_log = logging.getLogger("calmnb")

#: New text is sent this often, in seconds.
FLUSH_S = 0.04


class ChatPublisher(StaticFallback):
    """State of a chat as the browser knows it, and how it gets there.

    `_serve` runs in the widget's own thread, the only one that publishes; whatever another thread wants published, it
    hands over with `_post`.
    """

    info = traitlets.Dict().tag(sync=True)
    status = traitlets.Unicode("loading").tag(sync=True)
    progress = traitlets.Dict().tag(sync=True)
    notice = traitlets.Unicode("").tag(sync=True)
    run_id = traitlets.Int(0).tag(sync=True)
    transcript: Any = traitlets.List().tag(sync=True)
    token_data = traitlets.Bytes(b"").tag(sync=True)
    summary = traitlets.Dict().tag(sync=True)
    points_data = traitlets.Bytes(b"").tag(sync=True)
    layers_data = traitlets.Bytes(b"").tag(sync=True)
    sampling = traitlets.Dict().tag(sync=True)
    system = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(360).tag(sync=True)
    profile_id = traitlets.Unicode("").tag(sync=True)

    _chat: Conversation
    _inbox: queue.SimpleQueue[Callable[[], None]]
    _closed: bool
    _peak_label: str

    @property
    def is_busy(self) -> bool:
        """Whether this chat is answering, or waiting for its turn."""
        return self._chat.run is not None

    def _describe(self) -> dict[str, Any]:
        chat = self._chat
        assert chat.recorder is not None
        assert chat.panels is not None
        return describe(chat.recorder.meta, chat.panels, self._peak_label) | {"static_id": self._static_id}

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def _serve(self) -> None:
        next_flush = 0.0
        while not self._closed:
            action = None
            with contextlib.suppress(queue.Empty):
                action = self._inbox.get(timeout=FLUSH_S if self.is_busy else None)
            try:
                if action is not None:
                    action()
                run = self._chat.run
                if run is not None and time.monotonic() >= next_flush:
                    next_flush = time.monotonic() + FLUSH_S
                    self._flush(run)
            except Exception:
                _log.exception("the chat widget could not be updated")
        run = self._chat.run
        if run is not None:  # closed while answering: nobody must wait for ever
            run.computed.wait(10)
            self._chat.finish(run)
            run.finished.set()

    def _set(self, **traits: Any) -> None:
        with self.hold_sync():  # one message for all of them
            for name, value in traits.items():
                setattr(self, name, value)

    def _publish_start(self) -> None:
        self._set(status=self._chat.status(), progress={}, info=self._describe(), summary=self._chat.summary())

    def _publish_status(self) -> None:
        if self.status not in ("loading", "error") and self.status != (status := self._chat.status()):
            self.status = status

    def _publish_conversation(self) -> None:
        self._set(**self._state())

    def _state(self) -> dict[str, Any]:
        with self._chat.lock:
            run = self._chat.run
            fixed = self.status in ("loading", "error")
            return self._chat.state() | {
                "run_id": run.id if run else self.run_id,
                "status": self.status if fixed else self._chat.status(),
                "notice": self.notice if fixed else "",
            }

    def _flush(self, run: Run) -> None:
        message = self._chat.delta(run)
        self._publish_status()
        if message is not None:
            super().send(*message)

    def _finish(self, run: Run) -> None:
        """Settle the answer and tell whoever waits."""
        try:
            self._flush(run)
            self._chat.finish(run)
            self._publish_conversation()
        finally:
            run.finished.set()
        self._update_static()

    def _send_snapshot(self) -> None:
        with self._chat.lock:
            state = self._state()
            buffers = [state.pop(name) for name in ("token_data", "points_data", "layers_data")]
            content = {"type": "snapshot", "run": state["run_id"], "seq": self._chat.seq, "state": state}
        super().send(content, buffers)
