"""Widgets for notebooks; imported only when one is asked for, because they need the ``lab`` extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ChatWidget", "CompareView", "KernelTable", "ProfileView"]

_HOME = {"ChatWidget": "chat", "CompareView": "compare_view", "KernelTable": "kernel_table", "ProfileView": "profile_view"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
