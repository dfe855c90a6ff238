"""How well a model predicts a text.

Figures of different programs rarely compare, because windows, BOS and scored positions differ. Here they are stated: the
defaults are calm's definition (SPEC_calm.md 5.4), and the result carries the settings it was made with.
"""

from __future__ import annotations

import importlib.resources
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calmnb._callable import make_callable
from calmnb.errors import CalmnbError, ConfigError
from calmnb.model import Model, token_ids

__all__ = ["MAX_BYTES", "Perplexity", "from_logprobs", "perplexity", "sample_text"]

#: Bytes of a text that are scored, as calm does.
MAX_BYTES = 65536


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text under a model.

    Attributes
    ----------
    value : float
        ``exp(-mean(logprob))``.
    error : float
        Standard error of `value`, taking the scored tokens for independent.
    n_scored : int
        Predictions that count.
    n_tokens : int
        Tokens of the text, BOS included.
    window, stride : int
        Tokens of context at most, and how far apart the windows begin.
    bos : bool
        Whether the text began with BOS.
    seconds : float
        Time taken.
    """

    value: float
    error: float
    n_scored: int
    n_tokens: int
    window: int
    stride: int
    bos: bool
    seconds: float

    def __str__(self) -> str:
        return f"perplexity {self.value:.3f} ± {self.error:.3f} over {self.n_scored} tokens"


def sample_text() -> str:
    """Return the text that comes with calmnb: chapters 1 to 5 of *Pride and Prejudice* (public domain, 29 KB)."""
    return importlib.resources.files("calmnb").joinpath("data/pride_and_prejudice.txt").read_text(encoding="utf-8")


def from_logprobs(logprobs: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Perplexity and its standard error from the natural logarithms of the predicted probabilities.

    Examples
    --------
    >>> value, error = from_logprobs(np.log([0.5, 0.25, 0.125, 0.5]))
    >>> round(value, 6), round(error, 6)
    (3.363586, 0.966572)
    """
    lp = np.asarray(logprobs, dtype=np.float64)
    n = lp.size
    value = math.exp(-lp.sum() / n)
    spread = max(float((lp**2).sum() - lp.sum() ** 2 / n), 0.0)
    return value, value * math.sqrt(spread / n / n)


def perplexity(
    model: Model,
    text: str | Sequence[int] | None = None,
    *,
    window: int = 256,
    stride: int | None = None,
    bos: bool | None = None,
    max_bytes: int | None = MAX_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score a text.

    The text is fed in windows of `window` tokens, each from an empty context; every token but the first is predicted
    once. With the default stride the windows do not overlap, so the first prediction of each has one token of context:
    calm's definition. A smaller stride lets windows overlap, and each scores only the predictions that the one before
    did not: those have at least ``window - stride`` tokens of context, at ``window / stride`` times the work.

    Parameters
    ----------
    model : Model
        Its cache is overwritten.
    text : str or sequence of int, optional
        A text, or token ids as they are; None takes `sample_text`.
    window : int
        Tokens fed from an empty context, >= 1 and at most the model's context.
    stride : int, optional
        Tokens between the beginnings of two windows, 1 to `window`; None means `window`.
    bos : bool or None
        Whether BOS comes before the text (once, not in every window); None follows the model's rule. Ids are taken as
        they are, unless True asks for a BOS they lack.
    max_bytes : int or None
        Only this many bytes of a text are scored, >= 0; None scores all of it. Ids are not cut.
    progress : callable, optional
        Called with (tokens done, tokens in all).

    Returns
    -------
    Perplexity

    Raises
    ------
    ConfigError
        If an argument is out of range, or the text makes fewer than two tokens.
    BusyError
        If the model is generating.
    """
    context = model.engine.seq_len
    step = window if stride is None else stride
    if not 1 <= window <= context:
        raise ConfigError(f"perplexity: window is {window}; accepted are 1 to {context}, the context the model was opened with")
    if not 1 <= step <= window:
        raise ConfigError(f"perplexity: stride is {step}; accepted are 1 to the window, {window}")
    if max_bytes is not None and (not isinstance(max_bytes, int | np.integer) or max_bytes < 0):
        raise ConfigError(f"perplexity: max_bytes is {max_bytes!r}; accepted are an integer >= 0, or None for the whole text")
    ids = _ids(model, sample_text() if text is None else text, bos, max_bytes)
    if len(ids) < 2:
        raise ConfigError(f"perplexity: the text makes {len(ids)} tokens; at least 2 are needed, one to predict from the other")
    began = time.perf_counter()
    logprobs = np.empty(len(ids) - 1)
    size = 4 * model.prefill_chunk  # larger batches run faster, and nobody waits for a Stop button here
    done = 0  # predictions made: token done + 1 comes next
    with model.exclusive("perplexity"):
        prefix = model.prefix
        for start in range(0, len(ids) - 1, step):
            prefix.forget()
            end = min(start + window, len(ids) - 1)
            for at in range(start, end, size):
                batch = ids[at : min(at + size, end)]
                first = max(done - at, 0)
                if first >= len(batch):
                    prefix.prefill(batch)
                    continue
                logits = prefix.prefill(batch, all_logits=True)[first:]
                targets = ids[at + first + 1 : at + len(batch) + 1]
                logprobs[done : done + len(targets)] = _log_softmax_at(logits, targets)
                done += len(targets)
                if progress is not None:
                    progress(done + 1, len(ids))
            if done == len(ids) - 1:
                break
        prefix.forget()
    if not np.isfinite(logprobs).all():
        raise CalmnbError("perplexity: a predicted probability is 0 or not a number; the model's numbers have overflowed")
    value, error = from_logprobs(logprobs)
    return Perplexity(
        value=value,
        error=error,
        n_scored=len(logprobs),
        n_tokens=len(ids),
        window=window,
        stride=step,
        bos=ids[0] == model.tokenizer.bos_id,
        seconds=time.perf_counter() - began,
    )


def _ids(model: Model, text: str | Sequence[int], bos: bool | None, max_bytes: int | None) -> list[int]:
    if isinstance(text, str):
        if max_bytes is not None:
            text = text.encode("utf-8", errors="surrogatepass")[:max_bytes].decode("utf-8", errors="ignore")
        return model.tokenizer.encode(text, bos=bos, specials=False)
    try:
        ids = token_ids(text)
    except TypeError:
        raise ConfigError(
            f"perplexity: the text is {str(text)[:80]!r}; accepted are a str or a sequence of token ids"
        ) from None
    first = model.tokenizer.bos_id
    if bos and first >= 0 and ids[:1] != [first]:
        ids.insert(0, first)
    bad = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise ConfigError(f"perplexity: token {bad[0]} is outside the vocabulary (0 to {model.config.vocab_size - 1})")
    return ids


def _log_softmax_at(logits: NDArray[np.float32], targets: Sequence[int]) -> NDArray[np.float64]:
    """Log-probability of target i in row i of float32 logits (n, vocab_size)."""
    top = logits.max(axis=1)
    total = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(len(targets)), np.asarray(targets)]
    return np.asarray(chosen.astype(np.float64) - top - np.log(total))


make_callable(__name__, "perplexity")
