"""What an engine's KV cache holds, kept honest through interrupts, edits and errors.

An engine caches keys and values by position. To reuse them for the next prompt, someone must know which ids they belong
to. `CachedPrefix` does: it counts a position only after the engine has returned from computing it, so an exception, a
Ctrl-C included, at worst forgets work that was done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from calmnb.engine.base import Engine
from calmnb.errors import ContextError

__all__ = ["CachedPrefix"]

T = TypeVar("T")


class CachedPrefix:
    """The ids whose keys and values `engine` holds, at positions 0, 1, ...

    Parameters
    ----------
    engine : Engine
        Nobody else may feed it; whoever does calls `forget`.

    Attributes
    ----------
    ids : list of int
        Oldest first. Longer than ``engine.seq_len`` once the cache has rolled.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids: list[int] = []
        self._torn = False  # a rolling step was interrupted: the sinks may be half turned

    def forget(self) -> None:
        """Start over at position 0."""
        self.ids = []
        self._torn = False
        reset = getattr(self.engine, "reset", None)
        if reset is not None:
            reset()

    def rewind(self, prompt: Sequence[int]) -> int:
        """Go back to the longest common prefix with `prompt`, but at most to its last token, which must be fed for logits.

        Returns
        -------
        int
            How many tokens of `prompt` are cached.

        Raises
        ------
        ContextError
            If the prompt is longer than the context of an engine that stops when it is full.
        """
        self.check_length(len(prompt))
        common = 0
        for ours, theirs in zip(self.ids, prompt, strict=False):
            if ours != theirs:
                break
            common += 1
        common = min(common, len(prompt) - 1)
        if self._torn or (len(self.ids) > self.engine.seq_len and common < len(self.ids)):
            # A rolled cache has overwritten its past and can only go on.
            self.forget()
            return 0
        del self.ids[common:]
        return common

    def check_length(self, n_tokens: int) -> None:
        """Refuse a prompt that is longer than the context of an engine that stops when it is full.

        Raises
        ------
        ContextError
        """
        engine = self.engine
        if n_tokens > engine.seq_len and engine.on_full == "stop":
            raise ContextError(
                f"the prompt is {n_tokens} tokens long, but the context holds {engine.seq_len}: shorten it by "
                f"{n_tokens - engine.seq_len} tokens, open the model with a larger seq_len (it was made for "
                f"{engine.config.max_seq_len}), or let the cache roll with on_full='roll'"
            )

    def is_full(self) -> bool:
        """Whether the engine will take no further token."""
        return self.engine.on_full == "stop" and len(self.ids) >= self.engine.seq_len

    def prefill(self, tokens: Sequence[int], *, all_logits: bool = False) -> NDArray[np.float32]:
        """Feed several tokens; returns what `Engine.prefill` returns."""
        pos = len(self.ids)
        return self.feed(tokens, lambda: self.engine.prefill(tokens, pos, all_logits=all_logits))

    def step(self, token: int) -> NDArray[np.float32]:
        """Feed one token; returns the logits of the next, valid until the next call."""
        pos = len(self.ids)
        return self.feed((token,), lambda: self.engine.step(token, pos))

    def feed(self, tokens: Sequence[int], compute: Callable[[], T]) -> T:
        """Count `tokens` as cached once ``compute()``, which feeds them, has returned; returns what it returns."""
        self._torn = len(self.ids) + len(tokens) > self.engine.seq_len
        result = compute()
        self.ids.extend(tokens)
        self._torn = False
        return result
