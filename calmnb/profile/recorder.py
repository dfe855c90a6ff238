"""Keeping what an engine reports, cheaply, while it decodes.

`SessionRecorder` is the one recorder that keeps data. It only copies two small arrays a step: everything that costs
(bytes, exclusive times, data frames) happens when a `Session` is made of it. Live panels read `steps` by index while
another thread appends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calmnb.engine.base import Kernel, Phase

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["SessionRecorder", "StepRecord"]


@dataclass(slots=True)
class StepRecord:
    """One step as the engine reported it, raw.

    Attributes
    ----------
    run : int
        Number of the prompt-and-answer this step belongs to, from 0.
    phase : {"prefill", "decode"}
    pos : int
        Position of the step's first token.
    kv_len : int
        Positions that the step's last token attends to.
    n_tokens : int
        Tokens computed together; 1 when decoding, 0 for a choice of token that no recorded step came before.
    kernels : tuple of Kernel
        One entry a row of `starts` and `ends`.
    starts, ends : float64 (len(kernels),)
        Seconds on the clock of `step_start`; own copies.
    step_start, step_end : float
        Seconds, the forward pass.
    sample_start, sample_end : float
        Seconds, choosing the next token; nan until that has happened.
    token : int
        The token chosen after this step, -1 while unknown.
    """

    run: int
    phase: Phase
    pos: int
    kv_len: int
    n_tokens: int
    kernels: tuple[Kernel, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    step_start: float
    step_end: float
    sample_start: float = nan
    sample_end: float = nan
    token: int = -1


class SessionRecorder:
    """Keeps every step it is told of; makes a `Session` of them at any time.

    Safe to read from other threads while one thread adds: `steps` only ever grows, and a step's ``token`` and
    ``sample_*`` are filled in once, later.

    Parameters
    ----------
    source
        A `Model` (its device, sizes, dtype ... are written down), or a mapping of session metadata.
    **meta
        Further metadata, such as ``settings={...}``, which wins over what `source` says.

    Attributes
    ----------
    steps : list of StepRecord
        Append-only.
    meta : dict
        What the session will carry; see `Session.meta`. May be completed while recording (a measured peak, say).
    """

    def __init__(self, source: Any = None, **meta: Any) -> None:
        from calmnb.profile.describe import describe_model

        self.steps: list[StepRecord] = []
        self.meta: dict[str, Any] = dict(source) if isinstance(source, Mapping) else describe_model(source)
        self.meta.update(meta)
        self._tokenizer = getattr(source, "tokenizer", None)
        self._lock = threading.Lock()
        self._run = 0
        self._next_pos = -1
        self._new_run = False

    def __len__(self) -> int:
        return len(self.steps)

    def __bool__(self) -> bool:
        return True  # an empty recorder is still a recorder: `if recorder:` means "is there one"

    def new_run(self) -> None:
        """Number the following steps as a new run. Happens by itself when a prefill follows a decode or `pos` jumps."""
        with self._lock:
            self._new_run = bool(self.steps)

    def add(
        self,
        phase: Phase,
        pos: int,
        kv_len: int,
        n_tokens: int,
        kernels: Sequence[Kernel],
        starts: NDArray[np.float64],
        ends: NDArray[np.float64],
        step_start: float,
        step_end: float,
    ) -> None:
        """Keep one step; see `calmnb.engine.base.Recorder.add`. Takes a few microseconds."""
        rows = kernels if type(kernels) is tuple else tuple(kernels)
        with self._lock:
            if self.steps:
                turn = phase == "prefill" and self.steps[-1].phase == "decode"
                if self._new_run or turn or pos != self._next_pos:
                    self._run += 1
                    self._new_run = False
            self._next_pos = pos + n_tokens
            self.steps.append(
                StepRecord(
                    self._run, phase, pos, kv_len, n_tokens, rows,
                    np.array(starts, np.float64), np.array(ends, np.float64), float(step_start), float(step_end),
                )
            )  # fmt: skip

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        """Keep the choice of `token`, which will stand at `pos`, with the step that computed its logits."""
        with self._lock:
            last = self.steps[-1] if self.steps else None
            if last is None or last.token >= 0:
                none = np.empty(0)
                last = StepRecord(self._run, "decode", pos, pos, 0, (), none, none, start, start)
                self._next_pos = pos
                self.steps.append(last)
            last.sample_start, last.sample_end, last.token = start, end, token

    def since(self, index: int) -> list[StepRecord]:
        """Steps from `index` on, a snapshot: ``recorder.since(seen)`` is how a live panel reads."""
        with self._lock:
            return self.steps[index:]

    def session(self) -> Session:
        """Make a `Session` of the steps so far; recording may go on."""
        from calmnb.profile.session import Session

        return Session.from_steps(self.since(0), self.meta, token_text=self._text_of)

    def _text_of(self, token: int) -> str:
        if self._tokenizer is None or token < 0:
            return ""
        data: bytes = self._tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace")
