"""The token loop: prompt in, tokens out one by one, stoppable at any of them.

`Generation` is an iterator and does nothing between two ``next()`` calls, so whoever consumes it sets the pace: a
terminal, a widget's worker thread, a profiler. The forward pass that follows a token is computed only when the next
one is asked for; stopping costs nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from calmnb.engine.base import PromptStopped, Recorder
from calmnb.errors import BusyError, ConfigError
from calmnb.sampler import Sampler, Sampling

if TYPE_CHECKING:
    from calmnb.model import Model

__all__ = ["Generation", "StopReason", "StopText", "Token"]

StopReason = Literal["eos", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Token:
    """One chosen token.

    Attributes
    ----------
    id : int
    text : str
        Text that became certain with this token: complete characters that cannot be part of a stop string any more.
        May be empty, and empty for control tokens.
    pos : int
        Position in the sequence, prompt included, from 0.
    logprob : float
        Natural logarithm of the model's probability of this token, before temperature and filters.
    time_s : float
        ``time.perf_counter()`` when it was chosen.
    """

    id: int
    text: str
    pos: int
    logprob: float
    time_s: float


class StopText:
    """Watches a text that comes in pieces for the first of several strings, and holds back what may begin one.

    Parameters
    ----------
    stops : sequence of str
        None of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add a piece; returns the text that is safe to show now, and whether a stop string was met (it is not shown)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """End the text: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0


class Generation(Iterator[Token]):
    """A running answer; made by `calmnb.model.Model.generate`.

    Iterate over it for tokens. The model is this generation's alone from the first ``next()`` until the last token,
    `close`, or an exception; used in a ``with`` statement, it is closed at the end.

    Attributes
    ----------
    prompt_ids : list of int
    token_ids : list of int
        Chosen so far, the one that ended the answer included.
    stop_reason : {"eos", "stop", "length", "context", "cancelled"} or None
        None while running, or when an error ended it. "eos" is any of the stop ids, "stop" a stop string, "context" a
        full context.
    n_reused : int
        Prompt tokens whose keys and values were still cached from the call before.
    prefill_s, decode_s : float
        Seconds spent on the prompt, and on the tokens after the first; time between ``next()`` calls does not count.
    seed : int
        The seed in use.
    """

    def __init__(
        self,
        model: Model,
        prompt_ids: list[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        stop: tuple[str, ...],
        stop_ids: frozenset[int],
        recorder: Recorder | None,
        at_start: bool,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.stop_reason: StopReason | None = None
        self.n_reused = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._model = model
        self._sampler = Sampler(sampling, n_ids=model.n_ids)
        self.seed = self._sampler.seed
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._recorder = recorder
        self._stream = model.tokenizer.stream(skip_specials=True, at_start=at_start)
        self._watch = StopText(stop)
        self._sequence = list(prompt_ids)
        self._parts: list[str] = []
        self._n_steps = 0
        self._started = False
        self._ended = False
        self._owns = False
        self._previous_recorder: Recorder | None = None
        self._device: Any = None  # the engine's own decoding loop, where it has one
        self._cancelled = threading.Event()
        # Held during one step. Re-entrant: a signal handler of the same thread may call close().
        self._stepping = threading.RLock()

    # -- what callers use ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The answer so far, without stop strings and control tokens."""
        return "".join(self._parts)

    @property
    def tok_per_s(self) -> float:
        """Decode rate: forward passes of single tokens per second of `decode_s`; 0 before the second token."""
        return self._n_steps / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def is_done(self) -> bool:
        """Whether no further token will come."""
        return self._ended

    def cancel(self) -> None:
        """Ask for an end; it comes before the next token, or the next batch of the prompt. Safe from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """End now and leave the model to others. Waits for a step that another thread is in. Idempotent."""
        self._cancelled.set()
        with self._stepping:
            if not self._ended:
                self._end("cancelled")

    def __next__(self) -> Token:
        """Compute the next token.

        Raises
        ------
        BusyError
            At the first call, if another generation has the model.
        ContextError
            At the first call, if the prompt does not fit in the context.
        """
        with self._stepping:
            if self._ended:
                raise StopIteration
            try:
                token = self._advance()
            except BusyError:
                if self._owns:
                    self._end(None)
                raise
            except KeyboardInterrupt:
                self._end("cancelled")
                raise
            except BaseException:
                self._end(None)
                raise
            if token is None:
                raise StopIteration
            return token

    def __iter__(self) -> Generation:
        return self

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that was left with `break` must not keep the model busy.
        if getattr(self, "_owns", False):
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        state = self.stop_reason or ("ended" if self._ended else "running" if self._started else "not started")
        return f"<Generation: {len(self.prompt_ids)} prompt tokens, {len(self.token_ids)} generated, {state}>"

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _advance(self) -> Token | None:
        """One turn: logits, choice, text. None when there is no further token."""
        if self._cancelled.is_set():
            self._end("cancelled")
            return None
        chooses = getattr(self._model.engine, "chooses", None)
        if self._max_tokens > len(self.token_ids) > 0 and chooses is not None and chooses(self._sampler.sampling):
            return self._advance_on_device()
        began = time.perf_counter()
        if self._started:
            logits: NDArray[np.float32] | None = self._model.prefix.step(self.token_ids[-1])
            self._n_steps += 1
        else:
            self._begin()
            began = time.perf_counter()
            logits = self._prefill()
            self.prefill_s = time.perf_counter() - began
        if logits is None or self._cancelled.is_set():
            self._end("cancelled")
            return None
        if self._max_tokens == 0:
            self._end("length")
            return None
        start = time.perf_counter()
        token = self._sampler.sample(logits, self._sequence)
        chosen = time.perf_counter()
        logprob = _logprob(logits[: self._model.n_ids], token)
        accepted = self._accept(token, logprob, start, chosen)
        if len(self.token_ids) > 1:
            self.decode_s += time.perf_counter() - began
        return accepted

    def _advance_on_device(self) -> Token | None:
        """One turn where the engine chooses tokens itself and runs ahead of us; the settings are the sampler's."""
        began = time.perf_counter()
        prefix, sampler, last = self._model.prefix, self._sampler, self.token_ids[-1]
        if self._device is None:
            engine: Any = self._model.engine
            self._device = engine.decode_many(
                last,
                len(prefix.ids),
                self._max_tokens - len(self.token_ids),
                sampling=sampler.sampling,
                rng_state=sampler.rng.state,
                history=self._sequence,
                n_ids=self._model.n_ids,
            )
        device = self._device
        decoded = prefix.feed((last,), lambda: next(device))
        self._n_steps += 1
        if self._cancelled.is_set():
            self._end("cancelled")
            return None
        chosen = time.perf_counter()
        accepted = self._accept(decoded.token, decoded.logprob, chosen, chosen)
        self.decode_s += time.perf_counter() - began
        return accepted

    def _begin(self) -> None:
        model = self._model
        model.acquire(self)
        self._owns = True
        self._started = True
        engine = model.engine
        self._previous_recorder = engine.recorder
        if self._recorder is not None:
            engine.recorder = self._recorder
        self.n_reused = model.prefix.rewind(self.prompt_ids)

    def _prefill(self) -> NDArray[np.float32] | None:
        """Feed the prompt in batches; None if cancelled between two of them, or within one where the engine can."""
        prefix, size, engine = self._model.prefix, self._model.prefill_chunk, self._model.engine
        logits = None
        if hasattr(engine, "should_stop"):
            engine.should_stop = self._cancelled.is_set
        for at in range(self.n_reused, len(self.prompt_ids), size):
            if self._cancelled.is_set():
                return None
            batch = self.prompt_ids[at : at + size]
            try:
                logits = prefix.prefill(batch)
            except PromptStopped:
                return None
        return logits

    def _accept(self, token: int, logprob: float, start: float, chosen: float) -> Token:
        """Take a chosen token into the answer; end it if that was the last."""
        pos = len(self._sequence)
        if self._recorder is not None:
            self._recorder.sampled(pos, token, start, chosen)
        self._sequence.append(token)
        self.token_ids.append(token)
        ends = token in self._stop_ids
        # A stop id may be an ordinary token (calm reads a list of them as token 0); it is never shown.
        text, stopped = self._watch.push("" if ends else self._stream.push(token))
        reason: StopReason | None = None
        if stopped:
            reason = "stop"
        elif ends:
            reason = "eos"
        elif len(self.token_ids) >= self._max_tokens:
            reason = "length"
        elif self._model.prefix.is_full():
            reason = "context"
        self._parts.append(text)
        if reason is not None:
            text += self._end(reason)
        return Token(token, text, pos, logprob, chosen)

    def _end(self, reason: StopReason | None) -> str:
        """Give the model back. Returns text that was held back for a stop string which did not come: it is shown."""
        if self._ended:
            return ""
        self._ended = True
        self.stop_reason = reason
        rest = self._watch.flush() if reason != "stop" else ""
        self._parts.append(rest)
        if self._device is not None:
            with contextlib.suppress(ValueError):  # it is running: a signal handler closes us in the middle of a step
                self._device.close()
        if self._owns:
            self._owns = False
            self._model.engine.recorder = self._previous_recorder
            if hasattr(self._model.engine, "should_stop"):
                self._model.engine.should_stop = None
            self._model.release(self)
        return rest


def _logprob(logits: NDArray[np.float32], token: int) -> float:
    top = logits.max()
    total = float(np.exp(logits - top).sum())
    return float(logits[token] - top) - math.log(total)


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; one plain string is one stop string."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise ConfigError(f"stop is {stop!r}; accepted are a string or a sequence of strings, none of them empty")
    return tuple(stops)
