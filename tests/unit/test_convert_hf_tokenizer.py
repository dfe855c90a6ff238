"""Tokenizers and chat templates of Hugging Face folders, on their way into a `.calm` file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.convert.vocabulary import byte_alphabet
from calmnb.errors import CalmnbError, FormatError, UnsupportedError
from tests.hf_models import edit_json, save, tiny_model, tiny_tokenizer


def test_the_tokenizers_own_bytes_are_kept(checkpoint: Path, out: Path) -> None:
    with open_calm(convert(checkpoint, out)) as file:
        assert file.extras["tokenizer.json"] == (checkpoint / "tokenizer.json").read_bytes()


def test_merges_may_be_pairs(checkpoint: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"]["merges"] = [merge.split(" ") for merge in spec["model"]["merges"]]
    (checkpoint / "tokenizer.json").write_text(json.dumps(spec))
    with open_calm(convert(checkpoint, out)) as file:
        assert file.token_scores[[4, 6, 9, 10]].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_added_token_flags_of_tokenizer_config_override_the_file(checkpoint: Path, out: Path) -> None:
    flags = {
        "content": "<|für you|>",
        "rstrip": True,
        "lstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    edit_json(
        checkpoint / "tokenizer_config.json", added_tokens_decoder={"11": flags, "12": {"content": "<new>", "special": True}}
    )
    with open_calm(convert(checkpoint, out)) as file:
        added = json.loads(file.extras["tokenizer.json"])["added_tokens"]
        assert [(entry["id"], entry["content"], entry["rstrip"]) for entry in added] == [
            (11, "<|für you|>", True),
            (12, "<new>", False),
        ]
        assert file.token_bytes[12] == b"<new>"


def test_added_tokens_beyond_the_rows_are_taken_out(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", added_tokens_decoder={"40": {"content": "[PAD]", "special": True}})
    with open_calm(convert(checkpoint, out)) as file:
        assert b"[PAD]" not in file.extras["tokenizer.json"]


def test_a_vocabulary_larger_than_the_model_is_refused(checkpoint: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"]["vocab"]["d"] = 40
    (checkpoint / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(FormatError, match=r"id 40.*40 rows"):
        convert(checkpoint, out)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"model": {"type": "Unigram", "vocab": []}}', '{"model": {"type": "BPE", "vocab": {"a": -1}}}', "\x00"],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(checkpoint: Path, out: Path, text: str) -> None:
    (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(CalmnbError, match=r"tokenizer\.json"):
        convert(checkpoint, out)


@pytest.mark.parametrize(
    ("model", "normalizer", "message"),
    [
        ({"unk_token": "<unk>"}, None, "unk_token '<unk>'"),
        ({"unk_token": "<unk>", "byte_fallback": True}, None, "unk_token '<unk>'"),
        ({}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "does not hold together"),
    ],
)
def test_a_tokenizer_that_would_fail_in_use_is_refused(
    checkpoint: Path, out: Path, model: dict[str, Any], normalizer: Any, message: str
) -> None:
    spec = tiny_tokenizer()
    spec["model"] |= model
    spec["normalizer"] = normalizer
    (checkpoint / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(FormatError, match=message):
        convert(checkpoint, out)


def test_an_unknown_token_may_be_missing_where_bytes_spell_everything(checkpoint: Path, out: Path) -> None:
    checkpoint = save(tiny_model("llama", vocab_size=256), checkpoint.parent / "bytes")
    spec = tiny_tokenizer()
    vocab = {character: index for index, character in enumerate(byte_alphabet())}
    spec |= {"added_tokens": [], "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []}}
    (checkpoint / "tokenizer.json").write_text(json.dumps(spec))
    with open_calm(convert(checkpoint, out)) as file:
        assert len(file.token_bytes) == 256


def test_byte_fallback_pieces_become_text_and_spaces(checkpoint: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"] |= {"byte_fallback": True, "vocab": {"<0x0A>": 0, "▁a": 1, "é": 2}, "merges": []}
    (checkpoint / "tokenizer.json").write_text(json.dumps(spec))
    with open_calm(convert(checkpoint, out)) as file:
        assert file.token_bytes[:3] == [b"<0x0A>", b" a", "é".encode()]


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny SentencePiece BPE model without byte fallback."""
    import io

    import sentencepiece

    model = io.BytesIO()
    text = iter(["hello world", "hello there", "low lower lowest"] * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_writer=model, vocab_size=30, model_type="bpe", minloglevel=2
    )
    return model.getvalue()


def test_a_sentencepiece_model_is_imported_with_its_added_tokens(checkpoint: Path, out: Path, sentencepiece: bytes) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece)
    (checkpoint / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 31, "[PAD]": 40}))
    with open_calm(convert(checkpoint, out)) as file:
        assert file.extras["tokenizer.model"] == sentencepiece
        assert file.token_bytes[:3] == [b"<unk>", b"<s>", b"</s>"]
        assert file.token_bytes[31] == b"<|im_start|>"
        assert b" " in file.token_bytes  # the piece that marks the start of a word


def test_a_damaged_sentencepiece_model_is_refused(checkpoint: Path, out: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(b"\x0a\xff\xff not a model")
    with pytest.raises(FormatError, match=r"tokenizer\.model"):
        convert(checkpoint, out)


def test_a_sentencepiece_model_larger_than_the_model_is_refused(tmp_path: Path, sentencepiece: bytes) -> None:
    checkpoint = save(tiny_model("llama", vocab_size=24), tmp_path / "hf")
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece)
    with pytest.raises(FormatError, match=r"30 pieces.*24 rows"):
        convert(checkpoint, tmp_path / "m.calm")


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json"])
def test_a_tokenizer_in_another_format_is_named(checkpoint: Path, out: Path, name: str) -> None:
    (checkpoint / "tokenizer.json").rename(checkpoint / name)
    with pytest.raises(UnsupportedError, match=name):
        convert(checkpoint, out)


def test_a_checkpoint_without_a_tokenizer_converts(checkpoint: Path, out: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with open_calm(convert(checkpoint, out)) as file:
        assert file.token_bytes == []


def test_the_template_is_taken_from_the_tokenizers_configuration(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", chat_template="{{ 'é' }}")
    with open_calm(convert(checkpoint, out)) as file:
        assert file.extras["chat_template"].decode() == "{{ 'é' }}"


def test_of_several_templates_the_default_is_the_template(checkpoint: Path, out: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    edit_json(checkpoint / "tokenizer_config.json", chat_template=listed)
    with open_calm(convert(checkpoint, out)) as file:
        assert (file.extras["chat_template"], file.settings["chat_templates"]) == (b"D", {"tool_use": "T"})


def test_template_files_override_the_configuration(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", chat_template="old")
    (checkpoint / "chat_template.jinja").write_text("new")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "rag.jinja").write_text("R")
    with open_calm(convert(checkpoint, out)) as file:
        assert (file.extras["chat_template"], file.settings["chat_templates"]) == (b"new", {"rag": "R"})


def test_text_that_is_not_unicode_is_kept_or_refused(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "config.json", _name_or_path="\ud800")
    edit_json(checkpoint / "tokenizer_config.json", bos_token="\ud800")
    with open_calm(convert(checkpoint, out)) as file:
        assert file.settings["special_tokens"] == {"bos_token": "\ud800"}
    edit_json(checkpoint / "tokenizer_config.json", chat_template="\ud800")
    with pytest.raises(FormatError):
        convert(checkpoint, out)


def test_special_tokens_and_bos_rules_are_kept(checkpoint: Path, out: Path) -> None:
    edit_json(
        checkpoint / "tokenizer_config.json", bos_token="a", eos_token={"content": "b", "lstrip": True}, add_bos_token=True
    )
    with open_calm(convert(checkpoint, out)) as file:
        assert file.settings["special_tokens"] == {"bos_token": "a", "eos_token": "b"}
        assert file.settings["add_bos_token"] is True
