"""A fake engine that remembers exactly what it was fed, and a model around it: what the token loop is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.chat import ChatTemplate
from calmnb.config import ModelConfig
from calmnb.engine.base import EngineInfo, Recorder
from calmnb.errors import ContextError
from calmnb.model import Model
from calmnb.sampler import Sampler, Sampling
from calmnb.tokenizer import Tokenizer
from calmnb.tokenizer_calm import CalmTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz .[]/INST"
#: Ids 0-2 `<s> </s> <|im_end|>`, then the 256 bytes, then letters.
TOKENS = [b"<s>", b"</s>", b"<|im_end|>", *(b"<0x%02X>" % i for i in range(256)), *(c.encode() for c in LETTERS)]
VOCAB = len(TOKENS) + 5  # five rows that no token owns


def ids_of(text: str) -> list[int]:
    """Ids of a text, one a letter, or one a byte for other characters."""
    return letters().encode(text, bos=False)


def letters(*, bos: bool = False) -> CalmTokenizer:
    """One token a letter; no merges."""
    return CalmTokenizer(TOKENS, np.zeros(len(TOKENS), np.float32), bos_id=0 if bos else -1, eos_id=1)


class Decoded(NamedTuple):
    """What an engine that chooses tokens itself yields."""

    token: int
    pos: int
    logprob: float


class FakeEngine:
    """Likes best whatever `reply` says to the ids fed so far; by default a hash of all of them.

    A wrong idea of what is cached therefore changes every answer. `log` holds (pos, ids) of every call. `on_call` is
    called before the work of each, and may raise.
    """

    def __init__(
        self, reply: Callable[[list[int]], int] | None = None, *, seq_len: int = 64, on_full: str = "stop", vocab: int = VOCAB
    ) -> None:
        self.info = EngineInfo("reference", "fake", 1, "cpu")
        self.config = ModelConfig("fake", "fp16", 8, 8, 8, 1, 1, 1, vocab, max_seq_len=4096, eos_token_id=1, stop_ids=(1,))
        self.seq_len = seq_len
        self.kv_dtype = "fp16"
        self.on_full: Any = on_full
        self.recorder: Recorder | None = None
        self.cache: list[int] = []
        self.log: list[tuple[int, list[int]]] = []
        self.recorders: list[Recorder | None] = []
        self.on_call: Callable[[], None] = lambda: None
        self.is_closed = False
        self._reply = reply or self._hash

    def _hash(self, cache: list[int]) -> int:
        h = 0
        for token in cache:
            h = (h * 31 + token + 1) % 1_000_003
        return 3 + 256 + h % 26

    def _feed(self, tokens: Sequence[int], pos: int) -> list[NDArray[np.float32]]:
        assert not self.is_closed
        assert pos <= len(self.cache), "a gap in the cache"
        rolled = len(self.cache) > self.seq_len
        if rolled and pos != len(self.cache):
            raise ContextError("the cache has rolled")
        if self.on_full == "stop" and pos + len(tokens) > self.seq_len:
            raise ContextError("full")
        self.recorders.append(self.recorder)
        del self.cache[pos + 1 :]  # like a real engine, it has begun to overwrite when it is interrupted
        self.on_call()
        self.log.append((pos, list(tokens)))
        out = []
        for token in tokens:
            self.cache[pos:] = [token]
            pos += 1
            logits = np.zeros(self.config.vocab_size, np.float32)
            logits[self._reply(list(self.cache))] = 5.0
            out.append(logits)
        return out

    def step(self, token: int, pos: int) -> NDArray[np.float32]:
        return self._feed([token], pos)[0]

    def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> NDArray[np.float32]:
        rows = self._feed(tokens, pos)
        return np.stack(rows) if all_logits else rows[-1]

    def reset(self) -> None:
        self.cache = []

    def close(self) -> None:
        self.is_closed = True


class ChoosingEngine(FakeEngine):
    """A fake engine that, like the CUDA engine, chooses tokens itself and computes `ahead` steps beyond the one asked for."""

    ahead = 2
    n_open = 0

    def chooses(self, sampling: Sampling) -> bool:
        return True

    def decode_many(
        self, token: int, pos: int, n: int, *, sampling: Sampling, rng_state: int, history: Sequence[int], n_ids: int
    ) -> Iterator[Decoded]:
        sampler = Sampler(sampling, n_ids=n_ids)
        sampler.rng.state = rng_state
        sequence = list(history)
        assert sequence[-1] == token
        assert self.cache == sequence[:-1]
        if self.on_full == "stop":
            n = min(n, self.seq_len - pos)
        queue: list[Decoded] = []
        end = pos
        self.n_open += 1
        try:
            for i in range(n):
                rolls = pos + i + self.ahead >= self.seq_len
                while len(queue) < 1 or (len(queue) <= self.ahead and not rolls and pos + i + len(queue) < pos + n):
                    at = pos + i + len(queue)
                    logits = self._feed([sequence[at]], at)[0]
                    sequence.append(sampler.sample(logits, sequence))
                    queue.append(Decoded(sequence[-1], at + 1, -1.0))
                end = pos + i + 1
                yield queue.pop(0)
        finally:
            self.n_open -= 1
            del self.cache[end:]


def fake_model(engine: FakeEngine | None = None, *, tokenizer: Tokenizer | None = None, template: str | None = None) -> Model:
    """A model around a fake engine; its file is a stand-in."""
    engine = engine or FakeEngine()
    tokenizer = tokenizer or letters()
    file: Any = SimpleNamespace(path=Path("fake.calm"), config=engine.config, n_params=1000, close=lambda: None)
    return Model(file, engine, tokenizer, ChatTemplate(template, tokenizer))


def says(text: str, after: int, *, end: int = 1) -> Callable[[list[int]], int]:
    """A reply function: `text` letter by letter to a prompt of `after` ids, then the id `end`."""
    ids = [*ids_of(text), end]
    return lambda cache: ids[min(len(cache) - after, len(ids) - 1)]
