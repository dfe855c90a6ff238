"""How fast this machine really reads memory: the line that decoding on a CPU is held against.

Threads read slices of a buffer far larger than the last-level cache, with loads that the compiler turns into wide,
independent accumulators, so that neither latency nor adding is the limit. One, two and four streams a thread are tried,
because which of them keeps most lines in flight differs between machines.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import ConfigError, DeviceError
from calmnb.profile.device import cpu_info

__all__ = ["Bandwidth", "known_bandwidth", "measure_bandwidth"]

_MIN_BYTES = 1 << 20
_MEASURED: dict[tuple[int, int | None, bool], list[Bandwidth]] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Bandwidth:
    """Result of `measure_bandwidth`.

    Attributes
    ----------
    gb_per_s : float
        Best pass of the best shape, 1e9 bytes a second: the physical limit as far as it could be seen.
    median_gb_per_s : float
        Median pass of that shape.
    one_thread_gb_per_s : float
        Best pass of a single thread; nan in quick mode.
    threads : int
        Threads that read.
    streams : int
        Streams a thread, the best shape.
    nbytes : int
        Size of the buffer.
    repeats : int
        Passes of each shape.
    fits_cache : bool
        Whether the buffer is less than four times the last-level cache, which flatters the result.
    device : str
        The processor.
    """

    gb_per_s: float
    median_gb_per_s: float
    one_thread_gb_per_s: float
    threads: int
    streams: int
    nbytes: int
    repeats: int
    fits_cache: bool
    device: str

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        text = f"{self.gb_per_s:.1f} GB/s read by {threads} (median {self.median_gb_per_s:.1f}"
        if self.one_thread_gb_per_s == self.one_thread_gb_per_s and self.threads > 1:
            text += f", one thread {self.one_thread_gb_per_s:.1f}"
        text += f"; {self.nbytes / 1e6:.0f} MB buffer) on {self.device}"
        return text + (", part of it from cache" if self.fits_cache else "")

    def as_peak(self) -> dict[str, Any]:
        """Entry for ``Session.meta["peaks"]["measured"]``."""
        return {
            "gb_per_s": self.gb_per_s,
            "median_gb_per_s": self.median_gb_per_s,
            "threads": self.threads,
            "nbytes": self.nbytes,
            "source": f"read of {self.nbytes / 1e6:.0f} MB by {self.threads} thread(s), best of {self.repeats}",
        }


def known_bandwidth(threads: int) -> Bandwidth | None:
    """The best bandwidth measured so far in this process with `threads` threads, or None. Measures nothing.

    The best of several moments, since a busy neighbour can only make a reading too low.
    """
    with _LOCK:
        found = [result for results in _MEASURED.values() for result in results if result.threads == threads]
    return max((result for result in found if not result.fits_cache), key=lambda result: result.gb_per_s, default=None)


def measure_bandwidth(
    threads: int | None = None, *, nbytes: int | None = None, repeats: int = 15, quick: bool = False, fresh: bool = False
) -> Bandwidth:
    """Measure the read bandwidth of main memory.

    Parameters
    ----------
    threads
        Threads that read, >= 1; None for all cores usable here. Give the engine's, to compare like with like.
    nbytes
        Buffer size, >= 1 MiB; None for 512 MB (256 in quick mode), at least eight times the last-level cache.
    repeats
        Passes of each shape, >= 1.
    quick
        One shape and a smaller buffer: well under a second, even with the first call's compilation.
    fresh
        Measure again even if this process has done so.

    Returns
    -------
    Bandwidth

    Raises
    ------
    ConfigError
        If an argument is out of range.
    DeviceError
        If the buffer does not fit in memory.
    """
    count = cpu_info().cores if threads is None else threads
    for name, value, least in (("threads", count, 1), ("repeats", repeats, 1), ("nbytes", nbytes or _MIN_BYTES, _MIN_BYTES)):
        if value < least:
            raise ConfigError(f"measure_bandwidth: {name} is {value}; it must be at least {least}")
    key = (count, nbytes, quick)
    with _LOCK:
        results = _MEASURED.setdefault(key, [])
        if fresh or not results:
            results.append(_measure(count, nbytes, repeats, quick))
        return results[-1]


def _measure(threads: int, nbytes: int | None, repeats: int, quick: bool) -> Bandwidth:
    cache_bytes = cpu_info().l3_bytes
    size = nbytes or max(8 * cache_bytes, (256 if quick else 512) * 1_000_000)
    with ThreadPoolExecutor(threads) as pool:
        buffer = _touched(size, threads, pool)
        shapes = (1,) if quick else (1, 2, 4)
        passes = {streams: _time(_reader(streams), buffer, threads, repeats, pool) for streams in shapes}
        best = max(shapes, key=lambda streams: max(passes[streams]))
        single = max(_time(_reader(1), buffer, 1, 3, pool)) if not quick else float("nan")
    return Bandwidth(
        gb_per_s=max(passes[best]),
        median_gb_per_s=statistics.median(passes[best]),
        one_thread_gb_per_s=single if threads > 1 or quick else max(passes[best]),
        threads=threads,
        streams=best,
        nbytes=buffer.nbytes,
        repeats=repeats,
        fits_cache=bool(cache_bytes) and buffer.nbytes < 4 * cache_bytes,
        device=cpu_info().name,
    )


def _touched(size: int, threads: int, pool: ThreadPoolExecutor) -> NDArray[np.uint64]:
    """Buffer whose every page is really there: untouched pages all map to one page of zeros, which sits in cache."""
    try:
        buffer = np.empty(max(size, _MIN_BYTES) // 8, np.uint64)
    except MemoryError as error:
        raise DeviceError(f"measure_bandwidth: a buffer of {size / 1e6:.0f} MB does not fit in memory; pass nbytes=") from error
    list(pool.map(lambda part: part.fill(1), np.array_split(buffer, threads)))
    return buffer


def _time(
    read: Callable[[NDArray[np.uint64]], int], buffer: NDArray[np.uint64], threads: int, repeats: int, pool: ThreadPoolExecutor
) -> list[float]:
    """GB/s of each pass; every pass is checked to have read all of the buffer."""
    parts = np.array_split(buffer, threads)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        total = sum(int(part) for part in pool.map(read, parts))
        rates.append(buffer.nbytes / (time.perf_counter() - start) / 1e9)
        assert total == buffer.size, "the read loop was optimised away"
    return rates


@cache
def _reader(streams: int) -> Callable[[NDArray[np.uint64]], int]:
    """Compile a function that sums an array of uint64 through 1, 2 or 4 streams, without the GIL (0.1-0.2 s)."""
    import numba

    def read1(a):  # type: ignore[no-untyped-def]
        total = np.uint64(0)
        for i in range(a.size):
            total += a[i]
        return total

    def read2(a):  # type: ignore[no-untyped-def]
        n = a.size // 2
        b, c = a[:n], a[n : 2 * n]
        s = t = np.uint64(0)
        for i in range(n):
            s += b[i]
            t += c[i]
        for i in range(2 * n, a.size):
            s += a[i]
        return s + t

    def read4(a):  # type: ignore[no-untyped-def]
        n = a.size // 4
        b, c, d, e = a[:n], a[n : 2 * n], a[2 * n : 3 * n], a[3 * n : 4 * n]
        s = t = u = v = np.uint64(0)
        for i in range(n):
            s += b[i]
            t += c[i]
            u += d[i]
            v += e[i]
        for i in range(4 * n, a.size):
            s += a[i]
        return s + t + u + v

    body = {1: read1, 2: read2, 4: read4}[streams]
    compiled: Callable[[NDArray[np.uint64]], int] = numba.njit("uint64(uint64[::1])", nogil=True)(body)
    return compiled
