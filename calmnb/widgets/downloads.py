"""A session as bytes for the browser to save: the widget's Session, CSV and trace buttons."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from calmnb.errors import ConfigError

__all__ = ["DOWNLOADS", "make_download"]

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
