"""The back end for files that calm itself made: byte strings with scores, merged greedily.

calm keeps neither the pre-tokeniser nor the merge table of the original, so its ids can differ from the original's.
This back end gives the ids calm gives (SPEC_calm.md 5.2), ties included, except where calm's way loses something:

* a character that is not in the vocabulary is spelled with single-byte tokens where the vocabulary has them (byte-level
  models), and a warning is given where it must be dropped;
* control tokens that are not written ``<|...|>`` (``<start_of_turn>``, ``</s>``, ``[INST]``) are recognised;
* nothing is merged across a control token;
* byte tokens (``<0x00>`` and the 255 ids after it) count only where all of them fit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calmnb.tokenizer import Tokenizer, any_of, split_at

__all__ = ["CalmTokenizer"]

# `<|`, at least one character, `|>`: the shortest span, so that `<|>` is not one.
_BAR_SPECIAL = re.compile(r"<\|.+?\|>", re.DOTALL)
_OTHER_SPECIAL = re.compile(r"</?[^<>\s/]+>|<\uff5c[^<>]+\uff5c>|\[/?[A-Z_]+\]")
_BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")


class CalmTokenizer(Tokenizer):
    """Byte strings and merge scores.

    Parameters
    ----------
    tokens : sequence of bytes
        Byte string of every id; empty ones are unused ids.
    scores : float32 (len(tokens),)
        Of two possible merges, the one whose result scores higher happens first.
    bos_id, eos_id : int
        -1 means none. Texts begin with BOS if there is one.
    """

    space_rule = "after_bos"

    def __init__(self, tokens: Sequence[bytes], scores: NDArray[np.float32], *, bos_id: int = -1, eos_id: int = -1) -> None:
        self._tokens = tokens
        self._scores: list[float] = np.asarray(scores, dtype=np.float32).tolist()
        self._ids: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            if token:
                self._ids.setdefault(token, i)
        self.vocab_size = len(tokens)
        self.bos_id, self.eos_id = bos_id, eos_id
        self.adds_bos = bos_id >= 0
        first_byte = self._ids.get(b"<0x00>", -1)
        self._fallback = first_byte if first_byte + 256 <= len(tokens) else -1
        self.specials = {text: i for token, i in self._ids.items() if (text := self._special_text(token, i))}
        self._pattern = any_of(self.specials)

    def _special_text(self, token: bytes, i: int) -> str:
        """Text of a control token, or "" for an ordinary one. No merge makes a control token, so its score is 0."""
        if token[:1] not in b"<[" or _BYTE_TOKEN.fullmatch(token):
            return ""
        text = token.decode("utf-8", errors="replace")
        if _BAR_SPECIAL.fullmatch(text):
            return text
        return text if self._scores[i] == 0.0 and _OTHER_SPECIAL.fullmatch(text) else ""

    def _encode(self, text: str, specials: bool) -> list[int]:
        ids: list[int] = []
        for part in split_at(text, self._pattern if specials else None, self.specials):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._merge(self._characters(part)))
        return ids

    def _characters(self, text: str) -> list[int]:
        """One id a character, or one a byte for characters that are not in the vocabulary."""
        ids: list[int] = []
        dropped: dict[str, None] = {}
        for char in text:
            raw = char.encode("utf-8")
            if raw in self._ids:
                ids.append(self._ids[raw])
            elif self._fallback >= 0:
                ids.extend(self._fallback + byte for byte in raw)
            elif all(bytes([byte]) in self._ids for byte in raw):
                ids.extend(self._ids[bytes([byte])] for byte in raw)
            else:
                dropped[char] = None
        if dropped:
            shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in list(dropped)[:5])
            warnings.warn(
                f"the model's vocabulary cannot express {shown}{' and more' if len(dropped) > 5 else ''}: left out of the text",
                UserWarning,
                stacklevel=5,
            )
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge neighbours, best score first, until no two make a token."""
        n = len(ids)
        after = list(range(1, n + 1))
        before = list(range(-1, n - 1))
        alive = [True] * n
        heap = _MaxHeap()

        def offer(left: int, right: int) -> None:
            made = self._ids.get(self._tokens[ids[left]] + self._tokens[ids[right]])
            if made is not None:
                heap.push(self._scores[made], (left, right, ids[left], ids[right], made))

        for i in range(n - 1):
            offer(i, i + 1)
        while heap:
            left, right, was_left, was_right, made = heap.pop()
            if not (alive[left] and alive[right] and ids[left] == was_left and ids[right] == was_right):
                continue  # one of the two has been merged since
            ids[left] = made
            alive[right] = False
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
            if before[left] >= 0:
                offer(before[left], left)
            if after[left] < n:
                offer(left, after[left])
        return [token for token, living in zip(ids, alive, strict=True) if living]

    def id_of(self, text: str) -> int | None:
        """Id of the token whose bytes are `text`, or None."""
        return self._ids.get(text.encode("utf-8"))

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= self._fallback <= token < self._fallback + 256:
            return bytes([token - self._fallback])
        return self._tokens[token]


class _MaxHeap:
    """A binary heap whose ties come out in calm's order.

    The library's `heapq` would break ties by position. calm's order is that of a plain array heap: equal scores do not
    rise past their parent, of two equal children the left one is taken, and equal scores do not sink.
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, tuple[int, int, int, int, int]]] = []

    def __len__(self) -> int:
        return len(self._items)

    def push(self, score: float, item: tuple[int, int, int, int, int]) -> None:
        items = self._items
        items.append((score, item))
        at = len(items) - 1
        while at > 0 and items[(up := (at - 1) // 2)][0] < score:
            items[at], items[up] = items[up], items[at]
            at = up

    def pop(self) -> tuple[int, int, int, int, int]:
        items = self._items
        top = items[0][1]
        last = items.pop()
        if items:
            items[0] = last
            at, n = 0, len(items)
            while (child := 2 * at + 1) < n:
                if child + 1 < n and items[child + 1][0] > items[child][0]:
                    child += 1
                if items[child][0] <= last[0]:
                    break
                items[at], items[child] = items[child], items[at]
                at = child
        return top
