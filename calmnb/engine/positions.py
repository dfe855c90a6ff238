"""Where a position lives in the KV cache, and which positions may come next.

Every engine shares this bookkeeping: a plain cache while it fits, then (``on_full="roll"``) two attention sinks that
stay and a ring of the newest positions (SPEC_calm.md 4.1; Xiao et al., 2023, arXiv 2309.17453).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calmnb.config import KV_DTYPES, ModelConfig
from calmnb.engine.base import FullPolicy
from calmnb.errors import ConfigError, ContextError

__all__ = ["N_SINKS", "Positions", "check_kv_dtype", "check_tokens", "rope_table"]

#: Slots that keep the first tokens of the sequence once the cache has rolled.
N_SINKS = 2


class Positions:
    """How far a sequence has come in a cache of `seq_len` slots.

    Parameters
    ----------
    config
        The model; rolling is refused when it has a sliding window.
    seq_len
        Slots of the cache, >= 1; >= 3 to roll.
    on_full
        "stop": a position past the cache is an error. "roll": the oldest but the first two are overwritten.

    Attributes
    ----------
    end : int
        The position that comes next when the sequence simply goes on.
    """

    def __init__(self, config: ModelConfig, seq_len: int, on_full: FullPolicy) -> None:
        if on_full not in ("stop", "roll"):
            raise ConfigError(f"on_full is {on_full!r}; accepted are 'stop' and 'roll'")
        if seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}; it must be at least 1")
        if on_full == "roll" and seq_len < N_SINKS + 1:
            raise ConfigError(f"seq_len is {seq_len}; rolling keeps {N_SINKS} sinks and needs at least {N_SINKS + 1} slots")
        if on_full == "roll" and config.sliding_window:
            raise ConfigError(
                f"on_full='roll' was asked for, but the model attends through a sliding window of {config.sliding_window}, "
                "which would lose sight of the sinks; use on_full='stop'"
            )
        self.seq_len = seq_len
        self.on_full = on_full
        self.end = 0

    def check(self, pos: int, n_tokens: int) -> None:
        """Refuse positions that the cache cannot hold or does not follow on from.

        Raises
        ------
        ContextError
            Past the context with "stop", before the end once rolled, or with a gap after the end.
        """
        if pos < 0 or pos > self.end:
            raise ContextError(
                f"position {pos} was asked for, but positions 0 to {self.end - 1} are cached; the next is {self.end}"
            )
        last = pos + n_tokens
        if self.on_full == "stop" and last > self.seq_len:
            what = f"position {pos}" if n_tokens == 1 else f"positions {pos} to {last - 1}"
            raise ContextError(
                f"{what} do not fit in a context of {self.seq_len} tokens; shorten the prompt, open the model with a larger "
                "seq_len, or let the cache roll (on_full='roll')"
            )
        if self.end > self.seq_len and pos not in (0, self.end):
            raise ContextError(
                f"position {pos} was asked for after the cache rolled at {self.seq_len}; only {self.end}, or a new start at 0, "
                "can follow"
            )

    def slot(self, pos: int) -> int:
        """Slot of the cache that holds `pos`."""
        sink = N_SINKS if pos >= self.seq_len else 0
        return sink + (pos - sink) % (self.seq_len - sink)

    def length(self, pos: int) -> int:
        """Positions that `pos` can see in the cache, itself included."""
        return min(pos + 1, self.seq_len)

    def rolls(self, pos: int) -> bool:
        """Whether `pos` overwrites an older position, so that the sinks must be turned by one position first."""
        return pos >= self.seq_len


def rope_table(config: ModelConfig, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """Cosines and sines of the rotary embedding.

    Returns
    -------
    float32 array, shape (len(positions), 2, rotary_dim // 2)
        ``[:, 0]`` cosines and ``[:, 1]`` sines, times the attention factor of yarn. Angles are taken in float64.
    """
    freqs, factor = config.rope_frequencies()
    angles = np.asarray(positions, dtype=np.float64)[:, None] * freqs[None, :]
    return np.ascontiguousarray(np.stack([np.cos(angles), np.sin(angles)], axis=1) * factor, dtype=np.float32)


def check_tokens(config: ModelConfig, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return `tokens` as an int64 array, or raise `ConfigError` for none or for ids outside the vocabulary."""
    ids = np.array([operator.index(t) for t in tokens], dtype=np.int64)
    if ids.size == 0:
        raise ConfigError("no tokens were given; a step needs at least one")
    bad = ids[(ids < 0) | (ids >= config.vocab_size)]
    if bad.size:
        raise ConfigError(
            f"token {bad[0]} is outside the vocabulary of {config.vocab_size} tokens (0 to {config.vocab_size - 1})"
        )
    return ids


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise `ConfigError` unless `kv_dtype` is one of `KV_DTYPES`."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype is {kv_dtype!r}; accepted are {', '.join(KV_DTYPES)}")
