"""The ``tokenizers`` back end: byte-level and SentencePiece-like vocabularies described by a tokenizer.json."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import tokenizers

from calmnb.errors import UnsupportedError
from calmnb.tokenizer import Tokenizer, library_errors

__all__ = ["HfTokenizer", "byte_alphabet"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REMEDY = "convert the model again from an undamaged source"


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, inverted: character to byte.

    Notes
    -----
    GPT-2's rule (Radford et al. 2019): printable Latin-1 characters stand for themselves, the other bytes, in order,
    for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class HfTokenizer(Tokenizer):
    """A tokenizer.json.

    Parameters
    ----------
    source : bytes
        The file's content.
    bos_id, eos_id : int
        From the model's configuration; -1 means none.
    adds_bos : bool or None
        Whether texts begin with BOS; None asks the file's own post-processor.

    Raises
    ------
    FormatError
        If the content is not a tokenizer.json.
    UnsupportedError
        If its decoder is of a kind that generating models do not use (WordPiece, CTC).
    """

    def __init__(self, source: bytes, *, bos_id: int = -1, eos_id: int = -1, adds_bos: bool | None = None) -> None:
        with library_errors("tokenizer.json cannot be read", _REMEDY):
            self._read(source, bos_id, eos_id, adds_bos)

    def _read(self, source: bytes, bos_id: int, eos_id: int, adds_bos: bool | None) -> None:
        text = source.decode("utf-8")
        description = json.loads(text)
        self._hf = _load(text)
        vocab: dict[str, int] = self._hf.get_vocab(with_added_tokens=True)
        self._texts = {i: t for t, i in vocab.items()}
        self.vocab_size = max(self._texts, default=-1) + 1
        added = self._hf.get_added_tokens_decoder()
        self._added = {i: str(t.content) for i, t in added.items()}
        self.specials = {str(t.content): i for i, t in added.items() if t.special}
        self._byte_level, fallback, dummy_space = _decoder_kind(description.get("decoder"))
        self._byte_fallback = fallback or bool((description.get("model") or {}).get("byte_fallback"))
        self.space_rule = "start" if dummy_space else "keep"
        prefix = self._post_processor_prefix()
        self.bos_id = prefix[0] if bos_id < 0 and prefix and adds_bos is not False else bos_id
        self.eos_id = eos_id
        self.adds_bos = adds_bos if adds_bos is not None else bool(prefix) and prefix[0] == self.bos_id

    def _post_processor_prefix(self) -> list[int]:
        """Ids that the file's own post-processor puts before a text."""
        plain = self._hf.encode("a", add_special_tokens=False).ids
        full = self._hf.encode("a", add_special_tokens=True).ids
        n = len(full) - len(plain)
        at = next((i for i in range(n + 1) if full[i : i + len(plain)] == plain), 0)
        return list(full[:at])

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second tokenizer that takes control tokens' text for ordinary characters: the switch is not thread-safe."""
        plain = _load(self._hf.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return byte_alphabet()

    def _encode(self, text: str, specials: bool) -> list[int]:
        with library_errors("tokenizer.json cannot encode the text", _REMEDY):
            hf = self._hf if specials else self._plain
            return list(hf.encode(text, add_special_tokens=False).ids)

    def id_of(self, text: str) -> int | None:
        """Id of the token that is written `text` in tokenizer.json, or None."""
        found: int | None = self._hf.token_to_id(text)
        return found

    def _bytes_of(self, token: int) -> bytes:
        text = self._texts.get(token, "")
        if self._byte_level:
            if token in self._added:
                return text.encode("utf-8")
            try:
                return bytes(map(self._bytes.__getitem__, text))
            except KeyError:
                return text.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match.group(1), 16)])
        return text.replace("\u2581", " ").encode("utf-8")


def _load(text: str) -> tokenizers.Tokenizer:
    hf = tokenizers.Tokenizer.from_str(text)
    # A file saved from training may still cut texts at 512 tokens.
    hf.no_truncation()
    hf.no_padding()
    return hf


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[bool, bool, bool]:
    """Whether the decoder is byte-level, has byte fallback, and drops a leading space."""
    if decoder is None:
        return False, False, False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    byte_level = fallback = dummy_space = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            dummy_space = scheme != "never"
        elif kind == "Strip":
            dummy_space = dummy_space or (step.get("content") == " " and step.get("start", 0) > 0)
        elif kind not in ("Replace", "Fuse"):
            raise UnsupportedError(
                f"tokenizer.json has a {kind} decoder; accepted are ByteLevel, Metaspace and Replace/ByteFallback/Fuse/Strip"
            )
    return byte_level, fallback, dummy_space
