"""What the widget's Export, Session, CSV and trace buttons save."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calmnb.errors import ConfigError
from calmnb.widgets.transcript import Message, to_html, to_json, to_markdown

__all__ = ["DOWNLOADS", "export_text", "make_download"]

#: What can be asked for: file name, MIME type, and the method of `Session` that writes it.
DOWNLOADS = {
    "session": ("session.calmprof", "application/octet-stream", "save"),
    "csv": ("events.csv", "text/csv;charset=utf-8", "to_csv"),
    "trace": ("trace.json", "application/json", "to_chrome_trace"),
}


def make_download(session: Any, what: str) -> tuple[str, str, bytes]:
    """Write `session` as `what` and read it back.

    Returns
    -------
    name, mime, data

    Raises
    ------
    ConfigError
        If `what` is not in `DOWNLOADS`, or nothing has been recorded.
    """
    if what not in DOWNLOADS:
        raise ConfigError(f"cannot save a session as {what!r}; accepted are {', '.join(DOWNLOADS)}")
    if not len(session.steps):
        raise ConfigError("there is nothing to save yet: no token has been computed; say something first")
    name, mime, method = DOWNLOADS[what]
    with tempfile.TemporaryDirectory(prefix="calmnb-") as folder:
        path = Path(folder) / name
        written = getattr(session, method)(path)
        return name, mime, Path(written or path).read_bytes()


def export_text(
    kind: str, messages: Sequence[Message], info: Mapping[str, Any], figures: Mapping[str, Any], system: str
) -> str:
    """The conversation as a document: `kind` is md, json or html.

    Raises
    ------
    ConfigError
        If it is none of them.
    """
    if kind == "md":
        return to_markdown(messages, info, system)
    if kind == "json":
        return to_json(messages, info, system)
    if kind == "html":
        body = to_html(messages, info, figures, system)
        return f'<!doctype html><meta charset="utf-8"><title>chat</title><body style="font-family:sans-serif">{body}'
    raise ConfigError(f"cannot export a chat as {kind!r}; accepted are md, json and html")
