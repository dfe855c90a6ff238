"""One worker thread a model: every answer of every widget on that model is computed there, one after the other.

A cell that generates in the kernel's main thread blocks the Stop button on most ipykernel versions, and CUDA contexts,
NVTX ranges and events want one thread anyway. So widgets put jobs in a queue and return; a second widget on the same
model waits its turn, visibly, and can be stopped while it waits.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["ModelWorker", "Run", "adopt", "worker_for"]

_log = logging.getLogger("calmnb")
_run_ids = itertools.count(1)
_workers: weakref.WeakKeyDictionary[Any, ModelWorker] = weakref.WeakKeyDictionary()
_workers_lock = threading.Lock()


class Run:
    """One answer: from the moment it is asked for to the moment everything about it has been shown.

    Attributes
    ----------
    id : int
        Unique in the process; every message to the browser carries it, so that a stray one can be told apart.
    started : threading.Event
        Its turn has come.
    computed : threading.Event
        The engine is done with it.
    finished : threading.Event
        The transcript holds the final text: what callers wait for.
    tokens : deque
        Chosen tokens not yet sent to the browser.
    stopped_at, asked_at : float
        ``time.perf_counter()`` when Stop was asked for (0 if never) and when the run was created.
    """

    def __init__(self) -> None:
        self.id = next(_run_ids)
        self.asked_at = time.perf_counter()
        self.stopped_at = 0.0
        self.ended_at = 0.0
        self.started = threading.Event()
        self.computed = threading.Event()
        self.finished = threading.Event()
        self.tokens: deque[Any] = deque()
        self.generation: Any = None
        self.stop_reason: str | None = None
        self.text: str | None = None
        self.error: BaseException | None = None
        self._stop = threading.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether Stop has been asked for."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the run to end; it does so before its next token. Safe from any thread, any number of times."""
        if not self._stop.is_set():
            self.stopped_at = time.perf_counter()
            self._stop.set()
        generation = self.generation
        if generation is not None:
            generation.cancel()

    def take(self) -> list[Any]:
        """Remove and return the tokens that nobody has taken yet."""
        return [self.tokens.popleft() for _ in range(len(self.tokens))]

    def execute(self, start: Callable[[], Any]) -> None:
        """Compute the run in the calling thread: ``start()`` returns the generation to drain.

        Never raises: what went wrong is kept in `error`.
        """
        self.started.set()
        try:
            if not self.is_stopping:
                self._drain(start())
            else:
                self.stop_reason = "cancelled"
        except BaseException as error:
            self.error = error
        finally:
            self.generation = None
            self.ended_at = time.perf_counter()
            self.computed.set()

    def _drain(self, generation: Any) -> None:
        self.generation = generation
        try:
            if self.is_stopping:  # stop() may have come between start() and the line above
                generation.cancel()
            for token in generation:
                self.tokens.append(token)
                if self.is_stopping:
                    break
        finally:
            generation.close()
        self.text = generation.text
        self.stop_reason = generation.stop_reason or ("cancelled" if self.is_stopping else None)


class ModelWorker:
    """A daemon thread that runs jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = [0]
        thread = threading.Thread(target=_work, args=(self._jobs, self._pending), name=f"calmnb-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    @property
    def n_pending(self) -> int:
        """Jobs waiting or running."""
        return self._pending[0]

    def submit(self, job: Callable[[], None]) -> int:
        """Add a job; return how many are before it."""
        with _workers_lock:
            ahead = self._pending[0]
            self._pending[0] += 1
        self._jobs.put(job)
        return ahead


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None], pending: list[int]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            job()
        except BaseException:
            _log.exception("a job of the model's worker thread failed")
        finally:
            job = None  # do not keep a closed widget alive until the next job
            with _workers_lock:
                pending[0] -= 1


def worker_for(model: Any) -> ModelWorker:
    """Return the one worker of `model`, started when first asked for and ended with the model."""
    with _workers_lock:
        worker = _workers.get(model)
    if worker is not None:
        return worker
    fresh = ModelWorker(type(model).__name__.lower())
    with _workers_lock:
        return _workers.setdefault(model, fresh)


def adopt(model: Any, worker: ModelWorker) -> None:
    """Make `worker` the worker of `model`, which it has just loaded."""
    with _workers_lock:
        _workers.setdefault(model, worker)
