"""`ProfileView`: a session as an interactive timeline with a linked table and roofline.

The kernel puts a session in order and sends columns of numbers; the browser half in ``static/`` draws, selects and
sorts without asking back, so the view goes on working in a saved notebook. Only what must be computed or written here
is asked for: rows of another window of steps, a Chrome trace, what a live recorder has added.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import traitlets

from calmnb.errors import CalmnbError, ConfigError
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.report import html_report
from calmnb.profile.session import PeakChoice, Session
from calmnb.widgets import bridge
from calmnb.widgets.assets import bundle, static_text
from calmnb.widgets.columns import pack_columns, pack_texts
from calmnb.widgets.conversation import explain
from calmnb.widgets.downloads import make_download
from calmnb.widgets.fallback import StaticFallback, layer_bars, wrap_static
from calmnb.widgets.profile_data import ProfileData, describe_session

__all__ = ["LIVE_S", "LIVE_STEPS", "ProfileView", "open_session"]

_log = logging.getLogger("calmnb")

#: A live view looks for new steps this often, in seconds.
LIVE_S = 0.5
#: And shows so many of the latest, so that an update costs the same however long the recording is.
LIVE_STEPS = 128

_SCOPES, _TIMES, _LANES = ("step", "all"), ("exclusive", "wall"), ("layer", "layer-stage", "stage", "kernel")


def open_session(source: Any, who: str) -> Session:
    """`source` itself, or the session saved at that path.

    Raises
    ------
    ConfigError
        If it is neither.
    FormatError
        If there is no session at the path.
    """
    if isinstance(source, str | os.PathLike):
        return Session.load(Path(source))
    if not isinstance(source, Session):
        raise ConfigError(
            f"{who} shows a Session; got a {type(source).__name__}. Record one with calmnb.profile(...), or give the path "
            "of a saved one"
        )
    return source


class ProfileView(StaticFallback):
    """A timeline of a session, with a table and a roofline of whatever is selected in it.

    Parameters
    ----------
    session : Session, path of a saved one, or SessionRecorder
        A recorder may still be recording: Refresh shows what it has, and Live follows it twice a second.
    peak : {"user", "measured", "datasheet"}, number of GB/s, or None
        What percentages refer to; see `Session.peak`.
    step : int, optional
        Row of `Session.steps` to show first; by default a decode step of median time.
    live : bool
        Follow a recorder from the start.
    max_rows : int
        Rows (kernels) kept in the browser at a time, at least 1000. A longer session is shown in windows of steps around
        the one selected.

    Attributes
    ----------
    step : int
        The step shown; may be set.
    scope : {"step", "all"}
        Whether the timeline shows one step, or all of the window; may be set.
    time : {"exclusive", "wall"}
        Which time of a row counts; may be set. Exclusive times of a step do not overlap and sum, with the gap, to the step.
    lanes : {"layer", "layer-stage", "stage", "kernel"}
        What the rows of the timeline are; may be set.

    Raises
    ------
    ConfigError
        If `session` is something else, or an option is out of range.
    FormatError
        If there is no session at the path.

    Notes
    -----
    Keys on the timeline: arrows move, ``+`` and ``-`` zoom, ``0`` shows all, ``,`` and ``.`` go from kernel to kernel,
    Enter selects it, Escape selects nothing, Page Up and Page Down change the token.

    Examples
    --------
    >>> calmnb.ProfileView(calmnb.profile(model, "Why is the sky blue?", tokens=64))  # doctest: +SKIP
    >>> view.selected  # doctest: +SKIP
    """

    _esm = bundle(
        "format.js", "charts.js", "theme.js", "columns.js", "filter.js", "table.js", "choice.js", "profile_model.js",
        "profile_table.js", "lanes.js", "pixels.js", "timeline_paint.js", "timeline.js", "steps.js", "roofline.js",
        "export.js", "profile.js",
    )  # fmt: skip
    _css = static_text("base.css") + static_text("profile.css")

    info = traitlets.Dict().tag(sync=True)
    layout_of = traitlets.Dict().tag(sync=True)
    steps_data = traitlets.Bytes(b"").tag(sync=True)
    events_data = traitlets.Bytes(b"").tag(sync=True)
    texts_data = traitlets.Bytes(b"").tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    scope = traitlets.Enum(_SCOPES, "step").tag(sync=True)
    time = traitlets.Enum(_TIMES, "exclusive").tag(sync=True)
    lanes = traitlets.Enum(_LANES, "layer").tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    notice = traitlets.Unicode("").tag(sync=True)
    selection = traitlets.Bytes(b"").tag(sync=True, from_json=lambda value, _widget: bytes(value or b""))

    def __init__(
        self,
        session: Session | SessionRecorder | str | os.PathLike[str],
        *,
        peak: PeakChoice = None,
        step: int | None = None,
        live: bool = False,
        max_rows: int = 60_000,
    ) -> None:
        if max_rows < 1000:
            raise ConfigError(f"max_rows is {max_rows}; it must be at least 1000 rows")
        self._recorder = session if isinstance(session, SessionRecorder) else None
        if live and self._recorder is None:
            raise ConfigError("live=True follows a SessionRecorder; a Session is complete already")
        self._peak, self._max_rows, self._seen = peak, max_rows, -1
        self._lock = threading.RLock()
        self._closed = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._data = ProfileData.of(self._recorded() if self._recorder else open_session(session, "ProfileView"))
        self._data.session.peak(peak)  # refuses a wrong one before there is a widget
        if step is not None and not 0 <= step < self._data.n_steps:
            raise ConfigError(f"step is {step}; this session has {self._data.n_steps} steps, from 0")
        super().__init__(live=live)
        self._static_id = f"calmnb-{self.model_id}"
        bridge.use_own_subshell(self.comm)
        self._show(self._data.typical_step() if step is None else step)
        self.observe(self._on_step, "step")
        self.observe(lambda _change: self._inbox.put(lambda: None), "live")
        self.on_msg(self._on_browser_message)
        bridge.start_thread(self._serve, name=f"calmnb-profile-{self.model_id[:6]}")

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session on show; of a live view the steps it shows."""
        return self._data.session

    @property
    def selected(self) -> pd.DataFrame:
        """The rows of `Session.events` that are selected in the browser, in the order of their start; all of the step
        or window if nothing is.
        """
        with self._lock:
            first, last = self.info["window"]
            shown = self._data.events.iloc[self._data.first_row[first] : self._data.first_row[last]]
            if self.selection:
                index = np.frombuffer(self.selection, "<u4")
                return shown.iloc[index[index < len(shown)]]
            return shown[shown["step"] == self.step] if self.scope == "step" else shown

    def __repr__(self) -> str:
        return f"ProfileView({self.info.get('model', 'empty')}, {self._data.n_steps} steps, step {self.step})"

    def static_html(self) -> str:
        """Headline, stages and layers of the session as static HTML: what a saved notebook shows without a kernel."""
        session = self._data.session
        layers: Any = session.layers().to_dict("records") if len(session.steps) else []
        return wrap_static(html_report(session) + layer_bars(layers), self._static_id)

    # ---- acting -----------------------------------------------------------------------------------------------------

    def follows(self, recorder: SessionRecorder) -> bool:
        """Whether this view is open, and of that recorder."""
        return not self._closed and self._recorder is recorder

    def refresh(self) -> None:
        """Show everything that the recorder has by now. Does nothing for a session."""
        if self._recorder is not None:
            self._take(self._recorded(), follow=False)
            self._update_static()

    def close(self) -> None:
        """End the live updates and free the widget."""
        if not getattr(self, "_closed", True):
            self._closed = True
            self._inbox.put(lambda: None)
        super().close()

    # ---- showing ----------------------------------------------------------------------------------------------------

    def _recorded(self, latest: int | None = None) -> Session:
        recorder = self._recorder
        assert recorder is not None
        if latest is None:
            self._seen = len(recorder)
            return recorder.session()
        self._seen = len(recorder)
        steps = recorder.since(max(self._seen - latest, 0))
        return Session.from_steps(steps, recorder.meta, token_text=recorder._text_of)

    def _take(self, session: Session, *, follow: bool) -> None:
        """Show another state of the recording: its last step, or the one shown already."""
        with self._lock:
            had = self._data.n_steps
            self._data = ProfileData.of(session)
            n = self._data.n_steps
            self._show(n - 1 if follow or had == 0 else min(self.step, n - 1))

    def _show(self, step: int) -> None:
        """Send all steps, and the rows of those around `step`."""
        with self._lock:
            data = self._data
            first, last = data.window(step, self._max_rows)
            steps_layout, steps = pack_columns(data.steps(first, last))
            rows, kernels = data.rows(first, last)
            events_layout, events = pack_columns(rows)
            ends, texts = pack_texts(data.texts())
            texts_layout, ends_data = pack_columns({"ends": ends})
            info = describe_session(data.session, self._peak) | {
                "window": [first, last],
                "kernels": kernels,
                "n_steps": data.n_steps,
                "can_refresh": self._recorder is not None,
                "static_id": self._static_id,
            }
            with self.hold_sync():  # one message: the parts fit together
                self.info = info
                self.layout_of = {"steps": steps_layout, "events": events_layout, "texts": [*texts_layout, len(ends_data)]}
                self.steps_data, self.events_data, self.texts_data = steps, events, ends_data + texts
                self.selection = b""
                self.step = max(step, 0)

    @traitlets.validate("step")
    def _checked_step(self, proposal: Any) -> int:
        step, n = int(proposal["value"]), self._data.n_steps
        if not 0 <= step < max(n, 1):
            raise ConfigError(f"step is {step}; this session has {n} steps, 0 to {n - 1}")
        return step

    def _on_step(self, change: Any) -> None:
        first, last = self.info["window"]
        if not first <= change["new"] < last and self._data.n_steps:
            self._show(change["new"])

    # ---- with the browser -------------------------------------------------------------------------------------------

    def _on_browser_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """In a kernel thread, possibly a busy one: only queue."""
        if isinstance(content, dict):
            self._inbox.put(lambda: self._handle(content))

    def _serve(self) -> None:
        while not self._closed:
            try:
                with contextlib.suppress(queue.Empty):
                    self._inbox.get(timeout=LIVE_S if self.live else None)()
                if self.live and self._recorder is not None and len(self._recorder) != self._seen:
                    self._take(self._recorded(LIVE_STEPS), follow=True)
            except Exception as error:
                if not isinstance(error, CalmnbError):
                    _log.exception("a request of the profile view failed")
                self.notice = explain(error)

    def _handle(self, content: dict[str, Any]) -> None:
        kind = content.get("type")
        if kind == "hello":
            self.send({"type": "hello"})
            return
        self.notice = ""
        if kind == "refresh":
            self.refresh()
        elif kind == "download":
            name, mime, data = make_download(self._data.session, str(content.get("what")))
            self.send({"type": "download", "view": content.get("view"), "name": name, "mime": mime}, [data])
