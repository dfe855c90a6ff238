"""Tokenizers of all three kinds: the specification's vectors, the libraries themselves, and reports from other projects.

Row numbers are those of the table of reports in CHECKPOINTS.md.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from calmnb.errors import ConfigError, FormatError, UnsupportedError
from calmnb.tokenizer import Tokenizer, library_errors, tokenizer_for
from calmnb.tokenizer_calm import CalmTokenizer
from calmnb.tokenizer_hf import HfTokenizer, byte_alphabet
from calmnb.tokenizer_sp import SpTokenizer

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so "
    "well fixed in the minds of the surrounding families. Hello world, hello again; the user said 1234 words.\n"
)
TRICKY = [
    "Hello world",
    " Hello",
    "  two  spaces ",
    "철🙂",
    "a\nb\n\n\nc",
    "naïve café",
    "",
    " ",
    "\t",
    "👩‍👩‍👧‍👦 x",
    "1234567'LL",
]


# --- the three kinds -------------------------------------------------------------------------------------------------


def byte_level_json() -> tokenizers.Tokenizer:
    """GPT-2-like: byte-level BPE with a BOS post-processor, special and ordinary added tokens."""
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    hf.train_from_iterator([TEXT], trainer)
    hf.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    hf.add_tokens(["  naïve"])
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return hf


def byte_fallback_json() -> tokenizers.Tokenizer:
    """Llama-2-like: U+2581 for spaces, byte fallback, dummy prefix."""
    letters = sorted(set(TEXT.replace(" ", "▁").replace("\n", "")))
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "o"), ("e", "l"), ("▁", "▁")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    hf = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    hf.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return hf


def metaspace_json() -> tokenizers.Tokenizer:
    """As above, with the newer Metaspace pre-tokeniser and decoder."""
    hf = byte_fallback_json()
    hf.normalizer = None
    hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    hf.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return hf


def hf(source: tokenizers.Tokenizer, **kw: Any) -> HfTokenizer:
    return HfTokenizer(source.to_str().encode(), **kw)


@pytest.fixture(scope="module")
def sp_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small Llama-2-like SentencePiece model: BPE, byte fallback, dummy prefix, identity normalisation."""
    corpus: Path = tmp_path_factory.mktemp("sp") / "text.txt"
    corpus.write_text(TEXT * 4, encoding="utf-8")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        input=str(corpus),
        model_writer=out,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def sp(sp_model: bytes) -> SpTokenizer:
    added = [""] * 340 + ["", "<|im_start|>", "<|im_end|>"]
    return SpTokenizer(sp_model, bos_id=1, eos_id=2, added=added)


def calm(tokens: list[str | bytes], scores: list[float] | None = None, **kw: int) -> CalmTokenizer:
    raw = [t if isinstance(t, bytes) else t.encode() for t in tokens]
    return CalmTokenizer(raw, np.array(scores if scores is not None else [0.0] * len(raw), np.float32), **kw)


FALLBACK = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "ab"]


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace", "sp", "calm"], scope="module")
def any_tokenizer(request: pytest.FixtureRequest, sp: SpTokenizer) -> Tokenizer:
    kinds = {
        "byte_level": lambda: hf(byte_level_json()),
        "byte_fallback": lambda: hf(byte_fallback_json(), bos_id=1, eos_id=2),
        "metaspace": lambda: hf(metaspace_json(), bos_id=1, eos_id=2),
        "sp": lambda: sp,
        "calm": lambda: calm([*FALLBACK, " ", " a"], bos_id=1, eos_id=2),
    }
    return kinds[request.param]()


# --- what holds for all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_encoding_and_decoding(any_tokenizer: Tokenizer, text: str, request: pytest.FixtureRequest) -> None:
    if text.startswith(" ") and "metaspace" in request.node.name:
        text = text.lstrip(" ")  # Metaspace itself takes a leading space for its prefix
    assert any_tokenizer.decode(any_tokenizer.encode(text, bos=False)) == text


@pytest.mark.parametrize("text", TRICKY)
def test_a_stream_joined_is_the_whole_decoding_without_broken_characters(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    stream = any_tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == any_tokenizer.decode(ids, skip_specials=True)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30).map("a".__add__))
def test_any_text_streams_back(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text, bos=False, specials=False)
    stream = any_tokenizer.stream(skip_specials=False)
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == text


def test_half_a_character_at_the_end_is_replaced_once_flushed(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("🙂", bos=False)
    stream = any_tokenizer.stream()
    assert "".join(stream.push(i) for i in ids[:-1]) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_out_of_range_are_refused(any_tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(ConfigError, match=str(bad)):
        any_tokenizer.decode([bad])


def test_a_lone_surrogate_is_refused(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="U\\+D83D"):
        any_tokenizer.encode("a\ud83d")


@pytest.mark.parametrize("bad", [None, b"x", 3])
def test_only_strings_are_encoded(any_tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(ConfigError, match="str"):
        any_tokenizer.encode(bad)


def test_bos_is_first_and_single_by_the_models_rule(any_tokenizer: Tokenizer) -> None:
    t = any_tokenizer
    if t.adds_bos:
        assert t.encode("a").count(t.bos_id) == 1
        assert t.encode("a")[0] == t.bos_id
    assert t.encode("a", bos=True)[0] == t.bos_id
    assert t.bos_id not in t.encode("a", bos=False)


def test_bos_written_in_the_text_is_not_doubled(any_tokenizer: Tokenizer) -> None:
    assert any_tokenizer.encode("<s>a", bos=True).count(any_tokenizer.bos_id) == 1


def test_control_token_text_can_be_plain_characters(any_tokenizer: Tokenizer) -> None:
    t = any_tokenizer
    assert t.eos_id == -1 or t.eos_id in t.encode("a</s>")
    plain = t.encode("a</s>", specials=False)
    assert not any(t.is_special(i) for i in plain if i != t.bos_id)
    assert t.decode(plain, skip_specials=True) == "a</s>"


# --- tokenizer.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_level_json, byte_fallback_json, metaspace_json])
@pytest.mark.parametrize("text", [*TRICKY, "<s>a", "a</s> b"])
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_agrees_with_the_library(make: Any, text: str, skip: bool) -> None:
    theirs = make()
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert hf(theirs).decode(ids, skip_specials=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_every_token_of_a_byte_level_vocabulary_has_its_bytes() -> None:
    t = hf(byte_level_json())
    assert {t.token_bytes(i) for i in range(2, 258)} == {bytes([b]) for b in range(256)}


def test_added_tokens_of_a_byte_level_vocabulary_are_plain_text() -> None:
    t = hf(byte_level_json())
    ids = t.encode("  naïve", bos=False)
    assert len(ids) == 1
    assert t.decode(ids) == "  naïve"


def test_bos_is_found_in_the_post_processor() -> None:
    t = hf(byte_level_json())
    assert (t.bos_id, t.adds_bos) == (0, True)
    assert hf(byte_level_json(), bos_id=0, adds_bos=False).encode("a")[0] != 0


def test_a_bos_rule_from_the_configuration_wins_over_a_missing_post_processor() -> None:
    assert hf(byte_fallback_json(), bos_id=1, adds_bos=True).encode("a")[0] == 1
    assert hf(byte_fallback_json(), bos_id=1).encode("a")[0] != 1


def test_stored_truncation_and_padding_do_not_apply() -> None:
    source = byte_level_json()
    source.enable_truncation(4)
    source.enable_padding(length=64)
    assert hf(source).decode(hf(source).encode("Hello world, hello", bos=False)) == "Hello world, hello"


def test_spaces_and_newlines_after_a_special_follow_its_flags() -> None:
    """Row 24: Phi-3's specials swallow what follows them, Llama's do not."""
    source = byte_level_json()
    source.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    t = hf(source)
    assert t.decode(t.encode("<|end|>\n<|im_start|>a", bos=False)) == "<|end|><|im_start|>a"
    assert t.decode(t.encode("<|im_end|>\n<|im_start|>a", bos=False)) == "<|im_end|>\n<|im_start|>a"


def test_specials_are_those_marked_special() -> None:
    assert set(hf(byte_level_json()).specials) == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}


def test_vocab_size_covers_the_largest_id() -> None:
    description = json.loads(byte_level_json().to_str())
    description["added_tokens"].append(
        {
            "id": 900,
            "content": "<far>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    description["model"]["vocab"]["<far>"] = 900
    t = HfTokenizer(json.dumps(description).encode())
    assert t.vocab_size == 901
    assert t.token_bytes(800) == b""


def test_a_damaged_tokenizer_json_is_a_format_error() -> None:
    for source in (b"", b"{}", b"\xff", b'{"model": 3}', byte_level_json().to_str().encode()[:-100]):
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            HfTokenizer(source)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "a"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}}, "a" * 40 + "b"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}, "post_processor": None}, "é"),
    ],
)
@pytest.mark.parametrize("specials", [True, False])
def test_what_the_library_trips_over_is_a_format_error(changes: dict[str, Any], text: str, specials: bool) -> None:
    description = {**json.loads(byte_level_json().to_str()), "added_tokens": [], **changes}
    with pytest.raises(FormatError, match=r"tokenizer\.json cannot"):
        HfTokenizer(json.dumps(description).encode(), adds_bos=False).encode(text, specials=specials)


def test_interruptions_pass_through_a_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors("x", "y"):
        raise KeyboardInterrupt


def test_a_decoder_of_another_kind_is_named() -> None:
    source = byte_level_json()
    source.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        hf(source)


# --- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TRICKY)
def test_sentencepiece_ids_and_text_are_the_librarys(sp: SpTokenizer, sp_model: bytes, text: str) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sp_model)
    assert sp.encode(text) == [1, *theirs.Encode(text)]
    assert sp.decode(theirs.Encode(text)) == theirs.Decode(theirs.Encode(text))


def test_tokens_added_past_the_sentencepiece_model_are_single_ids(sp: SpTokenizer) -> None:
    """Row 1."""
    ids = sp.encode("<|im_start|>user", bos=False)
    assert ids[0] == 341
    assert sp.decode(ids[1:]) == "user"
    assert sp.decode([341]) == "<|im_start|>"
    assert sp.decode([341], skip_specials=True) == ""


def test_an_unused_added_id_decodes_to_nothing(sp: SpTokenizer) -> None:
    assert sp.decode([340]) == ""


def test_the_dummy_space_is_dropped_at_the_start_only(sp: SpTokenizer) -> None:
    """Row 3: one by one, without losing or doubling spaces."""
    ids = sp.encode("Hello world", bos=False)
    stream = sp.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == "Hello world"
    assert not pieces[0].startswith(" ")


def test_a_continuation_keeps_its_leading_space(sp: SpTokenizer) -> None:
    head, tail = sp.encode("Hello", bos=False), sp.encode("world", bos=False)
    stream = sp.stream(at_start=False)
    assert sp.decode(head) + "".join(stream.push(i) for i in tail) == "Hello world"


def test_a_lone_space_token_is_the_dummy_prefix(sp: SpTokenizer) -> None:
    space = sp.id_of("▁")
    assert space is not None
    assert sp.decode([space]) == ""
    assert sp.decode([space, space]) == " "


def test_bos_is_added_by_default_where_there_is_one(sp_model: bytes) -> None:
    """Row 34."""
    assert SpTokenizer(sp_model, bos_id=1).encode("a")[0] == 1
    assert SpTokenizer(sp_model, bos_id=-1).encode("a")[0] != 1


def test_a_damaged_sentencepiece_model_is_a_format_error() -> None:
    for source in (b"", b"garbage"):
        with pytest.raises(FormatError, match=r"tokenizer\.model"):
            SpTokenizer(source)


# --- calm's byte strings ---------------------------------------------------------------------------------------------

WORDS = calm(["<s>", *"helo", " ", "he", "ll", "llo", "hello", "lo", "el"], [0] * 6 + [-1, -2, -4, -5, -3, -6])


@pytest.mark.parametrize(
    ("text", "expected"), [("hello", [9]), ("hello hello", [9, 5, 9]), ("hell", [6, 7]), ("helo", [6, 10]), ("lllo", [7, 10])]
)
def test_merges_go_by_score(text: str, expected: list[int]) -> None:
    assert WORDS.encode(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("aaa", [1, 0]), ("aaaaa", [1, 0, 1]), ("aaaaaaa", [1, 0, 1, 1])])
def test_ties_merge_in_calms_heap_order(text: str, expected: list[int]) -> None:
    assert calm(["a", "aa"], [0, -1]).encode(text) == expected


def test_a_better_merge_to_the_right_goes_first() -> None:
    t = calm(["a", "b", "c", "ab", "bc"], [0, 0, 0, -1, 0])
    assert t.encode("abc") == [0, 4]


@pytest.mark.parametrize(("text", "expected"), [("aéb", [1, 259, 198, 172, 260]), ("€", [1, 229, 133, 175]), ("ab", [1, 261])])
def test_unknown_characters_fall_back_to_bytes(text: str, expected: list[int]) -> None:
    assert calm(FALLBACK, bos_id=1).encode(text) == expected


@pytest.mark.parametrize("after", [0, 1, 254])
def test_byte_tokens_that_do_not_fit_are_not_used(after: int) -> None:
    t = calm([*"abc", "<0x00>", *"x" * after])
    with pytest.warns(UserWarning, match=r"U\+00E9"):
        assert t.encode("abcé") == [0, 1, 2]
    assert t.decode([3]) == "<0x00>"


def test_a_character_that_cannot_be_expressed_is_dropped_with_a_warning() -> None:
    t = calm(["<unk>", "<s>", "</s>", "a", "b", "ab"], [0, 0, 0, 0, 0, -1])
    with pytest.warns(UserWarning, match=r"U\+00E9"):
        assert t.encode("aéb") == [5]


def test_byte_level_vocabularies_spell_rare_characters_with_their_bytes() -> None:
    t = calm(["a", b"\xc3", b"\xa9", b"\xc3\xa9a"], [0, 0, 0, -1])
    assert t.decode(t.encode("aé")) == "aé"


def test_only_whole_known_bar_names_are_specials() -> None:
    t = calm(["<|im_start|>", "<|im_end|>", "x", "<", "|", ">", *"z"])
    assert t.encode("<|im_start|>x<|im_end|>") == [0, 2, 1]
    assert t.encode("<|zz|>") == [3, 4, 6, 6, 4, 5]
    assert t.encode("<|>") == [3, 4, 5]


@pytest.mark.parametrize("name", ["<start_of_turn>", "</s>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>"])
def test_other_control_tokens_are_specials_too(name: str) -> None:
    t = calm([name, *sorted(set(name + "ab"))])
    assert t.encode(f"a{name}b").count(0) == 1
    assert t.is_special(0)


def test_a_token_that_merging_makes_is_not_special_whatever_it_looks_like() -> None:
    t = calm(["<p>", "<", "p", ">", "<p"], [-5, 0, 0, 0, -1])
    assert t.specials == {}
    assert t.encode("<p>") == [0]


def test_nothing_merges_across_a_control_token_or_bos() -> None:
    t = calm(["<s>", "a", "<s>a", "</s>", "a</s>"], [0, 0, -1, 0, -1], bos_id=0)
    assert t.encode("a</s>a") == [0, 1, 3, 1]


def test_a_space_after_bos_is_dropped_in_decoding() -> None:
    t = calm(["<s>", " a", "a"], bos_id=0)
    assert t.decode([0, 1, 1], skip_specials=True) == "a a"
    assert t.decode([1]) == " a"


def test_of_two_equal_strings_the_first_id_is_used() -> None:
    assert calm(["a", "a", ""]).encode("a") == [0]


# --- files -----------------------------------------------------------------------------------------------------------


def fake_file(**kw: Any) -> Any:
    config = SimpleNamespace(bos_token_id=1, eos_token_id=2)
    empty: dict[str, Any] = {"extras": {}, "settings": {}, "token_bytes": [], "token_scores": np.zeros(0), "path": "x.calm"}
    return SimpleNamespace(**{**empty, "config": config, **kw})


def test_the_richest_tokenizer_of_a_file_is_used(sp_model: bytes) -> None:
    extras = {"tokenizer.json": byte_fallback_json().to_str().encode(), "tokenizer.model": sp_model}
    tokens = [t.encode() for t in FALLBACK]
    scores = np.zeros(len(tokens), np.float32)
    kinds = []
    for keep in (extras, {"tokenizer.model": sp_model}, {}):
        kinds.append(type(tokenizer_for(fake_file(extras=keep, token_bytes=tokens, token_scores=scores))))
    assert kinds == [HfTokenizer, SpTokenizer, CalmTokenizer]


def test_a_files_bos_rule_is_followed(sp_model: bytes) -> None:
    file = fake_file(extras={"tokenizer.model": sp_model}, settings={"add_bos_token": False})
    assert tokenizer_for(file).encode("a")[0] != 1


def test_a_file_without_a_tokenizer_says_so() -> None:
    with pytest.raises(FormatError, match="no tokenizer"):
        tokenizer_for(fake_file())
