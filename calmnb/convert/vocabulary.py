"""Tokenizers on their way into a `.calm` file: calm's byte strings and scores, beside the tokenizer's own file.

calm's tokenizer is a list of byte strings and merge scores. It loses what a Hugging Face or SentencePiece tokenizer
knows (pre-tokenisation, flags of added tokens), so the original goes along as an extra, and calmnb reads that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from calmnb.errors import CalmnbError, FormatError, UnsupportedError
from calmnb.tokenizer import library_errors

__all__ = ["Vocabulary", "byte_alphabet", "from_sentencepiece", "from_tokenizer_json", "sentencepiece_model"]

_MAX_TOKEN_BYTES = 512


@dataclass
class Vocabulary:
    """A tokenizer to be stored.

    Attributes
    ----------
    tokens : list of bytes, or None
        Byte string of each id, for calm. None when the checkpoint has no tokenizer.
    scores : list of float
        Merge scores: the higher, the earlier.
    extras : dict of bytes
        ``tokenizer.json`` or ``tokenizer.model``.
    ids : dict of int
        Id of each token by its text, to find special tokens.
    """

    tokens: list[bytes] | None = None
    scores: list[float] = field(default_factory=list)
    extras: dict[str, bytes] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: character -> byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, for U+0100 and the characters after it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def from_tokenizer_json(
    data: bytes, vocab_size: int, path: Path, flags: Mapping[int, Mapping[str, Any]] | None = None
) -> Vocabulary:
    """Import a Hugging Face ``tokenizer.json`` with a BPE model.

    Parameters
    ----------
    data
        The file.
    vocab_size
        Rows of the model's embedding. Added tokens beyond them are taken out: the model could not read them.
    path
        For messages.
    flags
        Added tokens by id (``added_tokens_decoder`` of tokenizer_config.json), which override those in the file.

    Raises
    ------
    FormatError, UnsupportedError
    """
    try:
        return _import_json(data, vocab_size, path, flags or {})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, CalmnbError):
            raise
        raise FormatError(f"{path} is not a tokenizer.json ({error!r}); download it again") from error


def _import_json(data: bytes, vocab_size: int, path: Path, flags: Mapping[int, Mapping[str, Any]]) -> Vocabulary:
    spec = json.loads(data.decode("utf-8"))
    model = spec["model"]
    vocab: dict[str, int] = model["vocab"]
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind != "BPE" or not isinstance(vocab, dict):
        raise UnsupportedError(f"{path}: the tokenizer is of type {kind}; this version reads BPE tokenizers")
    added = _merge_added(spec, flags, vocab_size)
    if added is not None:
        spec["added_tokens"] = added
        data = json.dumps(spec, ensure_ascii=False).encode("utf-8", errors="replace")
    if not all(type(index) is int and index >= 0 for index in vocab.values()):
        raise FormatError(f"{path}: the vocabulary has ids that are not non-negative integers")
    largest = max(vocab.values(), default=-1)
    if largest >= vocab_size:
        raise FormatError(
            f"{path}: the tokenizer's vocabulary goes up to id {largest}, but the model has {vocab_size} rows; "
            "the tokenizer belongs to another model"
        )
    words: list[str | None] = [None] * vocab_size
    for word, index in vocab.items():
        words[index] = word
    _check_unknown(model, vocab, path)
    decode = _piece_bytes if model.get("byte_fallback") else _alphabet_bytes
    tokens = [b"" if word is None else decode(word) for word in words]
    ids = dict(vocab)
    for entry in spec.get("added_tokens") or []:
        tokens[entry["id"]] = entry["content"].encode("utf-8", errors="replace")[:_MAX_TOKEN_BYTES]
        ids[entry["content"]] = entry["id"]
    scores = [0.0] * vocab_size
    for rank, merge in enumerate(model.get("merges") or []):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        made = vocab.get("".join(parts))
        if made is not None and scores[made] == 0.0:
            scores[made] = -(1.0 + rank)
    _check_loads(data, path)
    return Vocabulary(tokens, scores, {"tokenizer.json": data}, ids)


def _check_loads(data: bytes, path: Path) -> None:
    """Load and use the tokenizer once, so that a damaged one is found now and not when the model is first used."""
    from tokenizers import Tokenizer

    with library_errors(f"{path}: the tokenizer does not hold together", "download it again"):
        loaded = Tokenizer.from_buffer(data)
        for text in ("", "a"):
            loaded.encode(text)


def _check_unknown(model: Mapping[str, Any], vocab: Mapping[str, int], path: Path) -> None:
    """The token for unknown characters must exist, unless bytes can spell every character."""
    unknown = model.get("unk_token")
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else list(byte_alphabet())
    if unknown is not None and unknown not in vocab and not all(token in vocab for token in spelled):
        raise FormatError(
            f"{path}: the tokenizer's unk_token {unknown!r} is not in its vocabulary, so unknown characters could not be "
            "encoded; accepted is a token of the vocabulary, or null. Download it again"
        )


def _merge_added(spec: dict[str, Any], flags: Mapping[int, Mapping[str, Any]], vocab_size: int) -> list[dict[str, Any]] | None:
    """Added tokens with the overriding flags applied; None when the file's own list is right as it is."""
    listed: list[dict[str, Any]] = spec.get("added_tokens") or []
    merged = {entry["id"]: dict(entry) for entry in listed}
    for index, changes in flags.items():
        entry = merged.setdefault(index, {"id": index})
        entry.update({key: value for key, value in changes.items() if key != "__type"})
        for key in ("single_word", "lstrip", "rstrip", "normalized", "special"):
            entry.setdefault(key, False)
    result = [entry for index, entry in sorted(merged.items()) if index < vocab_size and entry.get("content")]
    return None if result == listed else result


def _alphabet_bytes(word: str) -> bytes:
    """Bytes of a byte-level token; characters outside the alphabet become 0x07, as in calm."""
    alphabet = byte_alphabet()
    return bytes(alphabet.get(character, 7) for character in word)[:_MAX_TOKEN_BYTES]


def _piece_bytes(word: str) -> bytes:
    return word.replace("\u2581", " ").encode("utf-8", errors="replace")[:_MAX_TOKEN_BYTES]


def from_sentencepiece(data: bytes, vocab_size: int, path: Path, added: Mapping[str, int] | None = None) -> Vocabulary:
    """Import a SentencePiece ``tokenizer.model``.

    Parameters
    ----------
    data
        The file.
    vocab_size
        Rows of the model's embedding.
    path
        For messages.
    added
        Tokens beyond the model's own, text -> id.

    Raises
    ------
    FormatError
    """
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, OSError, ValueError) as error:
        raise FormatError(f"{path} is not a SentencePiece model ({error}); download it again") from error
    size = processor.vocab_size()
    if size > vocab_size:
        raise FormatError(
            f"{path}: the tokenizer has {size} pieces, but the model only {vocab_size} rows; it belongs to another model"
        )
    pieces: list[str] = [processor.id_to_piece(index) for index in range(size)]
    tokens = [_piece_bytes(piece) for piece in pieces] + [b""] * (vocab_size - size)
    scores = [float(processor.get_score(index)) for index in range(size)] + [0.0] * (vocab_size - size)
    ids = {piece: index for index, piece in enumerate(pieces)}
    for text, index in (added or {}).items():
        if 0 <= index < vocab_size:
            tokens[index] = text.encode("utf-8")[:_MAX_TOKEN_BYTES]
            ids[text] = index
    return Vocabulary(tokens, scores, {"tokenizer.model": data}, ids)


def sentencepiece_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    normaliser: bytes,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    special_ids: Mapping[str, int],
) -> bytes:
    """Serialise a SentencePiece BPE model with byte fallback, as a Protocol Buffers message.

    Parameters
    ----------
    pieces, scores, kinds
        Per id; kinds are SentencePiece's own (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte).
    normaliser
        Compiled character map; empty for none.
    add_dummy_prefix, remove_extra_whitespaces
        Normaliser switches.
    special_ids
        Ids of "unk", "bos", "eos" and "pad"; absent means none.

    Notes
    -----
    Field numbers are those of ``sentencepiece_model.proto`` in google/sentencepiece.
    """
    body = bytearray()
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        body += _field(1, _field(1, piece.encode("utf-8", errors="replace")) + _float_field(2, score) + _int_field(3, kind))
    trainer = _int_field(3, 2) + _int_field(4, len(pieces)) + _int_field(35, 1)
    for number, role in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")):
        index = special_ids.get(role, -1)
        trainer += _int_field(number, index)
        if 0 <= index < len(pieces):
            trainer += _field(number + 5, pieces[index].encode("utf-8"))
    body += _field(2, trainer)
    switches = _int_field(3, add_dummy_prefix) + _int_field(4, remove_extra_whitespaces) + _int_field(5, 1)
    body += _field(3, _field(1, b"identity") + (_field(2, normaliser) if normaliser else b"") + switches)
    return bytes(body)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value))


def _float_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
