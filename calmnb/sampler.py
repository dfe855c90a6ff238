"""Choosing the next token from logits, exactly enough to be reproduced on a device.

The algorithm, in this order. All arithmetic is float32 unless stated; `l` are the logits, `n` how many ids may be chosen
(``min(tokenizer size, rows of the output matrix)``: rows that no token owns are never chosen).

1. *Repetition penalty* r over the last `repetition_range` ids of the sequence, prompt included: every distinct id
   among them has ``l = l / r if l > 0 else l * r``, once however often it occurs (CTRL, Keskar et al. 2019,
   arXiv 1909.05858, section 4.1).
2. *Greedy* if ``temperature < 1e-5``, ``min_p >= 1`` or ``top_k == 1``: the first maximum. No random number is used.
3. *Temperature* T: weights are ``w = exp((l - max) / T)``.
4. *Top-k*: keep ``l >=`` the k-th largest l. Ties with the k-th are all kept.
5. *Top-p*: of what is left, keep an id if the weights strictly greater than its own sum to less than ``p * total``. The
   id that crosses p is kept, ties live or die together, and the largest always stays. Both sums are float64.
6. *Min-p*, relative to the largest: keep ``l >= max + ln(min_p) * T``. The largest always stays.
7. *Draw*: ``r = coin * sum(w)``; scan the kept ids upward and take the first whose running sum exceeds r, the last kept
   one if none does. Sums run in id order.

Every keep-rule is a threshold on l, so no sort order matters and a device may find the threshold any way it likes.
With only temperature and min-p this is calm's sampler (SPEC_calm.md 5.1), coin for coin: xorshift64*, one 24-bit coin
per drawn token.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import CalmnbError, ConfigError

__all__ = ["GREEDY_BELOW", "Sampler", "Sampling", "XorShift64"]

#: Temperatures below this are treated as 0: ``(l - max) / T`` would leave float32 for ordinary logits.
GREEDY_BELOW = 1e-5
#: Temperatures and penalties go this far from 1: logits divided or multiplied by them stay within float32.
_FAR = 1e30

_MASK = (1 << 64) - 1
_SEED_FOR_ZERO = 0x9E3779B97F4A7C15  # xorshift never leaves state 0


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    temperature : float
        0 (or below 1e-5) always takes the most likely token. In [0, 1e30].
    top_k : int
        Keep only the `top_k` most likely tokens; 0 keeps all.
    top_p : float
        Keep the most likely tokens that together reach this probability, in (0, 1]; 1 keeps all.
    min_p : float
        Drop tokens less likely than `min_p` times the most likely one, in [0, 1]; 0 keeps all.
    repetition_penalty : float
        Above 1 makes recent tokens less likely, 1 does nothing. In [1e-30, 1e30].
    repetition_range : int
        How many of the last tokens, prompt included, the penalty looks at; -1 means all, 0 none.
    seed : int or None
        Equal seeds give equal draws; None takes a fresh one from the operating system.

    Raises
    ------
    ConfigError
        If a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.1
    repetition_penalty: float = 1.0
    repetition_range: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        t, p, m, r = (_number(self, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty"))
        _check(0 <= t <= _FAR, f"temperature is {t}", f"a number in [0, {_FAR:g}] (0 always takes the most likely token)")
        _check(0 < p <= 1, f"top_p is {p}", "a number in (0, 1] (1 keeps all)")
        _check(0 <= m <= 1, f"min_p is {m}", "a number in [0, 1] (0 keeps all)")
        _check(1 / _FAR <= r <= _FAR, f"repetition_penalty is {r}", f"a number in [{1 / _FAR:g}, {_FAR:g}] (1 does nothing)")
        _check(_is_int(self.top_k) and self.top_k >= 0, f"top_k is {self.top_k!r}", "an integer >= 0 (0 keeps all)")
        _check(
            _is_int(self.repetition_range) and self.repetition_range >= -1,
            f"repetition_range is {self.repetition_range!r}",
            "an integer >= -1 (-1 means the whole sequence)",
        )
        _check(self.seed is None or _is_int(self.seed), f"seed is {self.seed!r}", "an integer or None")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is used."""
        return self.temperature < GREEDY_BELOW or self.min_p >= 1 or self.top_k == 1


class XorShift64:
    """The xorshift64* generator (Vigna 2016, arXiv 1402.6246, section 3), as calm seeds it.

    Parameters
    ----------
    seed : int
        Taken modulo 2**64. 0, which the generator cannot leave, is replaced by a fixed odd constant.
    """

    def __init__(self, seed: int) -> None:
        self.state = (seed & _MASK) or _SEED_FOR_ZERO

    def u32(self) -> int:
        """Next 32 random bits."""
        s = self.state
        s ^= s >> 12
        s = (s ^ (s << 25)) & _MASK
        s ^= s >> 27
        self.state = s
        return ((s * 0x2545F4914F6CDD1D) & _MASK) >> 32

    def coin(self) -> float:
        """Next float in [0, 1), a multiple of 2**-24."""
        return (self.u32() >> 8) / (1 << 24)


class Sampler:
    """Draws token ids according to a `Sampling`.

    Parameters
    ----------
    sampling : Sampling
    n_ids : int, optional
        Only ids below this are chosen; None means every row of the logits.

    Attributes
    ----------
    seed : int
        The seed in use, also when `sampling` left it open.
    """

    def __init__(self, sampling: Sampling | None = None, *, n_ids: int | None = None) -> None:
        self.sampling = sampling if sampling is not None else Sampling()
        self.n_ids = n_ids
        self.seed = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(63) | 1
        self.rng = XorShift64(int(self.seed))

    def sample(self, logits: NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """Choose the next token.

        Parameters
        ----------
        logits : float32 (vocab_size,)
            Not modified.
        history : sequence of int
            The sequence so far, prompt included; only the repetition penalty reads it.

        Returns
        -------
        int

        Raises
        ------
        CalmnbError
            If a logit that could be chosen is NaN or +inf, or all are -inf.
        """
        s = self.sampling
        x = np.asarray(logits, dtype=np.float32)[: self.n_ids]
        if s.repetition_penalty != 1.0:
            x = self._penalised(x, history)
        best = int(x.argmax())  # the first NaN, if there is one
        top = float(x[best])
        if not math.isfinite(top):
            raise CalmnbError(
                f"the logit of token {best} is {top}: the model's numbers have overflowed or its weights are damaged. "
                "Check the file with `calmnb info`; fp16 weights or an fp16 KV cache have more range than fp8 and gf4."
            )
        if s.is_greedy:
            return best
        t = np.float32(s.temperature)
        lowest = self._threshold(x, np.float32(top), t)
        if lowest == -np.inf:
            ids, kept = None, x
        else:
            ids = np.flatnonzero(x >= lowest)
            kept = x[ids]
        with np.errstate(over="ignore"):  # a tiny temperature sends hopeless logits to -inf, weight 0
            weights = np.exp((kept - np.float32(top)) / t)
        running = weights.cumsum(dtype=np.float32)
        r = np.float32(self.rng.coin()) * running[-1]
        at = min(int(np.searchsorted(running, r, side="right")), len(running) - 1)
        return at if ids is None else int(ids[at])

    def _penalised(self, x: NDArray[np.float32], history: Sequence[int]) -> NDArray[np.float32]:
        reach = self.sampling.repetition_range
        recent = history if reach < 0 else history[max(len(history) - reach, 0) :]
        ids = np.unique(np.asarray(recent, dtype=np.int64))
        ids = ids[ids < len(x)]
        out = x.copy()
        hit = out[ids]
        penalty = np.float32(self.sampling.repetition_penalty)
        out[ids] = np.where(hit > 0, hit / penalty, hit * penalty)
        return out

    def _threshold(self, x: NDArray[np.float32], top: np.float32, t: np.float32) -> np.float32:
        """Lowest logit that survives top-k, top-p and min-p."""
        s = self.sampling
        lowest = np.float32(-np.inf)
        if 0 < s.top_k < len(x):
            lowest = np.float32(np.partition(x, len(x) - s.top_k)[len(x) - s.top_k])
        if s.top_p < 1:
            lowest = max(lowest, _nucleus(x[x >= lowest], top, t, s.top_p))
        if s.min_p > 0:
            lowest = max(lowest, top + np.float32(math.log(s.min_p)) * t)
        return lowest


def _nucleus(x: NDArray[np.float32], top: np.float32, t: np.float32, p: float) -> np.float32:
    """Smallest logit of the top-p set.

    Ids lighter than ``(1 - p) * total / n`` together weigh less than ``1 - p``, so they are outside whatever their
    order: only the few above that line are sorted.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((x - top) / t)
    total = float(weights.sum(dtype=np.float64))
    heavy = weights >= (1 - p) * total / len(x)
    w = weights[heavy]
    order = np.argsort(-w)
    w = w[order]
    before = w.cumsum(dtype=np.float64) - w
    # Ties: what counts is the sum strictly above, that is, the sum before the first of equals.
    first = np.searchsorted(-w, -w, side="left")
    inside = int(np.count_nonzero(before[first] < p * total))
    return np.float32(x[heavy][order[inside - 1]])


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _number(sampling: Sampling, name: str) -> float:
    value = getattr(sampling, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"sampling: {name} is {value!r}; accepted is a number")
    try:
        return float(value)
    except OverflowError:  # an int, beyond what is accepted anywhere
        return math.inf if value > 0 else -math.inf


def _check(condition: bool, found: str, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"sampling: {found}; accepted is {accepted}")
