"""How a session shows itself: one line, a text table, a static HTML block. Formatting only; numbers come from tables."""

from __future__ import annotations

from calmnb.profile.session import Session

__all__ = ["html_report", "summary_line", "text_report"]


def summary_line(session: Session) -> str:
    """The one line."""
    return session.meta.get("model", "?")


def text_report(session: Session) -> str:
    """The text."""
    return summary_line(session)


def html_report(session: Session) -> str:
    """The HTML."""
    return summary_line(session)
