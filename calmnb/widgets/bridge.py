"""Between a widget and the notebook kernel: the parts that depend on which ipykernel runs underneath."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["start_thread", "use_own_subshell"]


def use_own_subshell(comm: Any) -> bool:
    """Let a widget's messages be handled where the browser sent them, even while a cell blocks the main thread.

    ipykernel 7.4 sends an incoming widget message to the shell that last published on the same comm, usually the main
    one, which may be busy for as long as its cell runs; Stop would wait for the cell to end. This restores the rule of
    7.3. It touches a private method, so it does nothing on versions that lack it.

    Returns
    -------
    bool
        Whether there was something to change.
    """
    if comm is None or not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = _keep_subshell
    return True


def _keep_subshell(data: Any, default: Any) -> Any:
    return default


def start_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a daemon thread in a copy of the caller's context.

    ipykernel keeps the request that output belongs to in a context variable, so the copy makes what the thread publishes
    belong to the cell that asked for it.
    """
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target, *args), name=name, daemon=True)
    thread.start()
    return thread
