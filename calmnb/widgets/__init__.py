"""Widgets for notebooks; imported only when one is asked for, because they need the ``lab`` extra."""

from __future__ import annotations

from typing import Any

__all__ = ["ChatWidget"]


def __getattr__(name: str) -> Any:
    if name == "ChatWidget":
        from calmnb.widgets.chat import ChatWidget

        return ChatWidget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
