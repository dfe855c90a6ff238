"""Hold BLAS to one thread while the CPU engine shares its products among threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_blas_thread"]

_lock = threading.Lock()
_controller: Any = None
_limit: Any = None
_users = 0


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS, process-wide, until the last of the callers inside has left.

    Counted, because two engines may overlap: each restoring what it found would leave the limit behind for ever.
    """
    global _controller, _limit, _users
    with _lock:
        if _users == 0:
            if _controller is None:
                from threadpoolctl import ThreadpoolController

                _controller = ThreadpoolController()
            _limit = _controller.limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.restore_original_limits()
                _limit = None
