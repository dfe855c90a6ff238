"""A GGUF file's tokenizer, rebuilt as the file it came from: tokenizer.json for byte-level BPE, else a SentencePiece model.

GGUF keeps tokens, token types and merges, but only a *name* for the rule that splits text before merging. The rules below
are those of the tokenizers that these names stand for, as Hugging Face states them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calmnb.convert.vocabulary import Vocabulary, from_sentencepiece, from_tokenizer_json, sentencepiece_model
from calmnb.errors import FormatError, UnsupportedError

__all__ = ["bos_and_eos", "import_tokenizer", "stop_ids", "tokenizer_settings"]

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _WORDS + r"\p{N}{1,3}|" + _TAIL
_QWEN2 = _WORDS + r"\p{N}|" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _byte_level(False)]


_GPT2 = [_byte_level(True)]
_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(True)]
#: What llama.cpp does for files made before it knew the names: close to the truth for GPT-2-like tokenizers only.
_UNNAMED = [
    {"type": "Split", "pattern": {"Regex": r"[\p{P}\$\+<=>\^~\|]+"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": r"[0-9]{1,3}"}, "behavior": "Isolated", "invert": False},
    _byte_level(True),
]

#: tokenizer.ggml.pre -> (pre-tokenizer steps, whether whole words skip merging, whether text is NFC-normalised)
_PRE: dict[str, tuple[list[dict[str, Any]], bool, bool]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2"), (_GPT2, False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS, False, False)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), (_split(_LLAMA3), True, False)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_split(_LLAMA3), False, False)),
    "qwen2": (_split(_QWEN2), False, True),
    "deepseek-r1-qwen": (_split(_QWEN2), False, False),
    "tekken": (_split(_TEKKEN), True, False),
}

#: Control tokens that end a turn or a text wherever they occur; GGUF files often name only one of a model's stop ids.
_END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def import_tokenizer(metadata: Mapping[str, Any], vocab_size: int, path: Path) -> Vocabulary:
    """Rebuild the tokenizer of a GGUF file.

    Parameters
    ----------
    metadata
        The file's.
    vocab_size
        Rows of the model's embedding.
    path
        For messages.

    Raises
    ------
    FormatError
        If the metadata contradict themselves.
    UnsupportedError
        If the kind of tokenizer or its pre-tokenisation rule is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None and tokens is None:
        return Vocabulary()
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise FormatError(f"{path}: tokenizer.ggml.tokens is missing or is not a list of strings; the file is damaged")
    if len(tokens) > vocab_size:
        raise FormatError(f"{path}: the tokenizer has {len(tokens)} tokens, but the embedding only {vocab_size} rows")
    types = [int(value) for value in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(types) != len(tokens):
        raise FormatError(f"{path}: {len(types)} token types for {len(tokens)} tokens; the file is damaged")
    if kind == "gpt2":
        return from_tokenizer_json(_build_json(metadata, tokens, types, path), vocab_size, path)
    if kind == "llama":
        return from_sentencepiece(_build_sentencepiece(metadata, tokens, types, path), vocab_size, path)
    raise UnsupportedError(
        f"{path}: the tokenizer is of the kind {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are read"
    )


def _build_json(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> bytes:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre in (None, "default"):
        warnings.warn(
            f"{path} does not say how its tokenizer splits text (tokenizer.ggml.pre is {pre!r}), so some texts may be cut "
            "into other tokens than the model was trained on; a newer GGUF file of the same model avoids this",
            UserWarning,
            stacklevel=2,
        )
        steps, whole_words, nfc = _UNNAMED, False, False
    elif pre in _PRE:
        steps, whole_words, nfc = _PRE[pre]
    else:
        raise UnsupportedError(
            f"{path}: the tokenizer splits text by the rule {pre!r}, which this version does not know; known are "
            f"{', '.join(sorted(_PRE))}. Converting the model's Hugging Face folder works where that is at hand."
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise FormatError(f"{path}: tokenizer.ggml.merges is missing or is not a list of strings; the file is damaged")
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED:
            vocab.setdefault(token, index)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token and vocab[token] == index
    ]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": vocab,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return json.dumps(spec, ensure_ascii=False).encode("utf-8", errors="replace")


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    plain = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    bos = _token_id(metadata, "bos", len(tokens))
    if not _adds_bos(metadata) or bos is None:
        return plain
    start = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, start, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }
    return {"type": "Sequence", "processors": [plain, template]}


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> bytes:
    scores = [float(value) for value in metadata.get("tokenizer.ggml.scores", [])]
    if len(scores) != len(tokens):
        raise FormatError(f"{path}: {len(scores)} token scores for {len(tokens)} tokens; the file is damaged")
    ids = {role: _token_id(metadata, name, len(tokens)) for role, name in _ROLES.items()}
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    return sentencepiece_model(
        tokens,
        scores,
        types,
        normaliser=b"" if charsmap is None else bytes(charsmap.astype("u1")),
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        special_ids={role: index for role, index in ids.items() if index is not None},
    )


_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    """Id of a special token ("bos", "eos", "unknown", "padding", "eot", "eom"), or None when there is none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(value) if isinstance(value, int) and 0 <= value < n_tokens else None


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    given = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(given, bool):
        return given
    # Without a statement, SentencePiece models, Llama 3 and Tekken begin with BOS, as llama.cpp assumes too.
    begins = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in begins


def bos_and_eos(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Ids of the tokens that begin and end a text, -1 for none."""
    n_tokens = len(metadata.get("tokenizer.ggml.tokens", []))
    bos, eos = _token_id(metadata, "bos", n_tokens), _token_id(metadata, "eos", n_tokens)
    return -1 if bos is None else bos, -1 if eos is None else eos


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a turn: the declared ones, and control tokens that always do. The declared eos comes first."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    declared = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    ends = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return tuple(dict.fromkeys([index for index in declared if index is not None] + ends))


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of ``calmnb.json`` that concern the tokenizer."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {}
    for role, name in _ROLES.items():
        index = _token_id(metadata, name, len(tokens))
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    templates = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    return {
        "special_tokens": special,
        "add_bos_token": _adds_bos(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_templates": templates,
    }
