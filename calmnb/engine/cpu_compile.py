"""Compile the CPU kernels once, and keep them on disk.

Numba's own cache looks only at the file of the function it compiles: an edit to a module that this function calls would
go unseen. So the cached code lives in a folder named by a digest of every source it is made from.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calmnb.cache import cache_folder
from calmnb.errors import CalmnbError

__all__ = ["kernel_entry", "kernel_folder"]

_SOURCES = ("cpu_simd.py", "cpu_ops.py", "cpu_products.py", "cpu_attention.py", "cpu_kernels.py")
_lock = threading.Lock()
_entry: Callable[[int, int], None] | None = None


def kernel_folder() -> Path | None:
    """Folder of the compiled kernels, named by a digest of their sources; None where the cache cannot be written."""
    import llvmlite
    import numba

    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    try:
        folder = cache_folder("numba", digest.hexdigest()[:16])
    except CalmnbError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def kernel_entry(progress: Callable[[str], None] | None = None) -> Callable[[int, int], None]:
    """Return the compiled `calmnb.engine.cpu_kernels.enter`; compiling takes seconds, the first time on a machine.

    Parameters
    ----------
    progress
        Called with a line of text before and after a compilation, and not at all when the cache answers.
    """
    global _entry
    with _lock:
        if _entry is None:
            _entry = _compile(progress)
        return _entry


def _compile(progress: Callable[[str], None] | None) -> Callable[[int, int], None]:
    import numba
    from numba import njit, types

    from calmnb.engine import cpu_kernels

    folder = kernel_folder()
    before = numba.config.CACHE_DIR
    if progress is not None and not (folder and any(folder.rglob("*.nbc"))):
        progress("compiling the CPU kernels (once on this machine) ...")
    start = time.perf_counter()
    try:
        # Numba decides where to cache when a function is decorated.
        numba.config.CACHE_DIR = str(folder or "")
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": folder is not None}
        entry: Any = njit(types.void(types.int64, types.int64), **options)(cpu_kernels.enter)
    finally:
        numba.config.CACHE_DIR = before
    if progress is not None and (folder is None or entry.stats.cache_misses):
        progress(f"compiled the CPU kernels in {time.perf_counter() - start:.1f} s")
    compiled: Callable[[int, int], None] = entry
    return compiled
