"""GGUF files: weights, rotary order, rope scaling and tokenizers come out as those they were made from."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.convert.gguf_file import GgufFile
from calmnb.convert.gguf_tokenizer import import_tokenizer
from calmnb.errors import CalmnbError, FormatError, TensorError, UnsupportedError
from calmnb.quant import decode, encode
from tests.gguf_models import dequantised, tokens_of_bytes, write_gguf
from tests.hf_models import calm_logits, logits, tiny_model

TOLERANCE = 2e-3  # as in test_convert_hf: fp16 keys and values on both sides
Writer = gguf.GGUFWriter


@pytest.fixture(scope="session")
def tiny() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_bytes(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The tiny Llama as a GGUF file, F32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny).read_bytes()


@pytest.fixture
def source(tiny_bytes: bytes, tmp_path: Path) -> Path:
    """Path of that file; it may be damaged."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_bytes)
    return path


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("llama", "llama", {"head_dim": 32}),
        ("mistral", "llama", {"sliding_window": None}),
        ("qwen2", "qwen2", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, architecture: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    path = convert(write_gguf(tmp_path / "m.gguf", model, architecture=architecture), tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=4)
    source = write_gguf(tmp_path / "m.gguf", model, extra=lambda writer: writer.add_sliding_window(4))
    path = convert(source, tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["fp16", "gf4"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_storage_type_is_read_as_the_gguf_package_reads_it(tiny: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny, kind=kind)
    expected = dequantised(source)
    with open_calm(convert(source, tmp_path / "m.calm", dtype=dtype)) as file:
        layer = file.weights.layers[1]
        for name, stored in {
            "token_embd": file.weights.embed,
            "output": file.weights.output,
            "blk.1.attn_q": layer.wq,
            "blk.1.attn_v": layer.wv,
            "blk.1.ffn_down": layer.w2,
        }.items():
            np.testing.assert_array_equal(stored, encode(expected[name + ".weight"], dtype), err_msg=name)
        np.testing.assert_array_equal(layer.attn_norm, expected["blk.1.attn_norm.weight"])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_k_quants_are_read_in_blocks_as_in_one_piece(tmp_path: Path, kind: str) -> None:
    which = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[which][1]
    raw = np.random.default_rng(3).integers(0, 256, (12, 2 * block), np.uint8)
    writer = Writer(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=which)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "k.gguf")
    with np.errstate(all="ignore"):
        blocks = list(file.rows("w", 5))
        whole = gguf.quants.dequantize(raw, which)
    file.close()
    assert [len(b) for b in blocks] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_llama_3_rope_scaling_is_recognised_in_its_table_of_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=131072)
    inverse = model.model.rotary_emb.inv_freq.numpy()
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)

    def edit(arrays: dict[str, Any]) -> None:
        arrays["rope_freqs.weight"] = (plain / inverse).astype(np.float32)

    path = convert(write_gguf(tmp_path / "m.gguf", model, edit=edit), tmp_path / "m.calm", dtype="fp16")
    with open_calm(path) as file:
        scaling = file.config.rope_scaling
        assert scaling is not None
        assert (scaling.kind, scaling.factor, scaling.original_max_seq_len) == ("llama3", 8.0, 8192)
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


@pytest.mark.parametrize("divisors", [np.full(8, 3.0), np.arange(8.0), np.full(8, np.nan), np.ones(7) * 2])
def test_other_tables_of_divisors_are_refused(tiny: Any, tmp_path: Path, divisors: np.ndarray) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny, edit=lambda arrays: arrays.update({"rope_freqs.weight": divisors}))
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        convert(source, tmp_path / "m.calm")


def test_a_table_of_ones_means_no_scaling(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny, edit=lambda arrays: arrays.update({"rope_freqs.weight": np.ones(8)}))
    with open_calm(convert(source, tmp_path / "m.calm")) as file:
        assert file.config.rope_scaling is None


def scaled(kind: str, factor: float, original: int | None = None) -> Callable[[Writer], None]:
    def add(writer: Writer) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    return add


@pytest.mark.parametrize(
    ("kind", "rope", "original"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}, None),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
    ],
)
def test_rope_scaling_gives_transformers_logits(tmp_path: Path, kind: str, rope: dict[str, Any], original: int | None) -> None:
    model = tiny_model("llama", rope_parameters=rope | {"rope_theta": 10000.0})
    source = write_gguf(tmp_path / "m.gguf", model, extra=scaled(kind, 4.0, original))
    path = convert(source, tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


def test_an_unknown_rope_scaling_is_refused(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny, extra=scaled("longrope", 4.0))
    with pytest.raises(UnsupportedError, match="longrope"):
        convert(source, tmp_path / "m.calm")


@pytest.mark.parametrize(
    ("name", "said"),
    [("blk.1.attn_q_norm.weight", "no place"), ("blk.7.ffn_up.weight", "no place"), ("blk.0.ffn_up.bias", "bias")],
)
def test_an_unused_tensor_is_named(tiny: Any, tmp_path: Path, name: str, said: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny, edit=lambda arrays: arrays.update({name: np.ones(32, np.float32)}))
    with pytest.raises(CalmnbError, match=f"{name}.*{said}"):
        convert(source, tmp_path / "m.calm")


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tiny: Any, tmp_path: Path, name: str) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        del arrays[name]

    with pytest.raises(TensorError, match=name):
        convert(write_gguf(tmp_path / "m.gguf", tiny, edit=edit), tmp_path / "m.calm")


def test_qwen2_without_its_biases_is_refused(tmp_path: Path) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        del arrays["blk.0.attn_k.bias"]

    source = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), architecture="qwen2", edit=edit)
    with pytest.raises(TensorError, match=r"blk\.0\.attn_k\.bias"):
        convert(source, tmp_path / "m.calm")


def test_nan_is_named_and_nothing_is_left(tiny: Any, tmp_path: Path) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        arrays["blk.1.ffn_gate.weight"] = np.where(np.arange(64) == 5, np.nan, arrays["blk.1.ffn_gate.weight"])

    source = write_gguf(tmp_path / "m.gguf", tiny, edit=edit)
    with pytest.raises(TensorError, match=r"blk\.1\.ffn_gate\.weight holds"):
        convert(source, tmp_path / "m.calm")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


# --- metadata --------------------------------------------------------------------------------------------------------


def test_metadata_numbers_are_written_as_they_were_meant(source: Path, tmp_path: Path) -> None:
    with open_calm(convert(source, tmp_path / "m.calm")) as file:
        assert (file.metadata["norm_eps"], file.metadata["rope_theta"]) == ("1e-06", "10000.0")


@pytest.mark.parametrize("architecture", ["gemma", "phi3", "qwen3", "mamba"])
def test_other_architectures_are_named(tiny: Any, tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{architecture}'.*llama"):
        convert(write_gguf(tmp_path / "m.gguf", tiny, architecture=architecture), tmp_path / "m.calm")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (lambda writer: writer.add_expert_count(8), "8 experts"),
        (lambda writer: writer.add_uint16("split.count", 3), "llama-gguf-split"),
        (lambda writer: writer.add_bool("llama.attention.sliding_window", True), "sliding_window"),
    ],
)
def test_variants_that_cannot_be_run_are_refused(tiny: Any, tmp_path: Path, extra: Callable[[Writer], None], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        convert(write_gguf(tmp_path / "m.gguf", tiny, extra=extra), tmp_path / "m.calm")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_byte_level_tokenizer_is_rebuilt(source: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    with open_calm(convert(source, tmp_path / "m.calm")) as file:
        tokenizer = Tokenizer.from_buffer(file.extras["tokenizer.json"])
        encoding = tokenizer.encode("abcab abc<|im_end|>\na")
        assert encoding.tokens == ["abc", "ab", "Ġ", "abc", "<|im_end|>", "Ċ", "a"]
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "abcab abc<|im_end|>\na"
        assert file.token_bytes[27] == b" "
        assert file.token_scores[[30, 31]].tolist() == [-1.0, -2.0]
        assert (file.config.bos_token_id, file.config.eos_token_id, file.config.stop_ids) == (0, 39, (39,))


def pre_tokenized(tmp_path: Path, pre: str, text: str) -> list[str]:
    """How the rule `pre` cuts a text, spaces and newlines as themselves."""
    from tokenizers import Tokenizer

    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    vocabulary = import_tokenizer(metadata, 2, tmp_path)
    tokenizer = Tokenizer.from_buffer(vocabulary.extras["tokenizer.json"])
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in pieces]


CUTS = [
    ("gpt-2", "I'LL go  12345\n\n\nx", ["I", "'", "LL", " go", " ", " 12345", "\n\n", "\n", "x"]),
    ("smollm", "go 123 x", ["go", " ", "1", "2", "3", " x"]),
    ("llama-bpe", "1234567", ["123", "456", "7"]),
    ("llama-bpe", "I'LL go", ["I", "'LL", " go"]),
    ("llama-bpe", "a\n\n\nb", ["a", "\n\n\n", "b"]),
    ("llama-bpe", "a   b", ["a", "  ", " b"]),
    ("llama-bpe", "x=(y)\n", ["x", "=(", "y", ")\n"]),
    ("qwen2", "1234 I'll", ["1", "2", "3", "4", " I", "'ll"]),
    ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
]


@pytest.mark.parametrize(("pre", "text", "pieces"), CUTS)
def test_texts_are_cut_by_the_named_rule(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    assert pre_tokenized(tmp_path, pre, text) == pieces


def test_qwen2_normalises_to_nfc(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["Ã", "©"],
        "tokenizer.ggml.merges": [],
    }
    data = import_tokenizer(metadata, 2, tmp_path).extras["tokenizer.json"]
    from tokenizers import Tokenizer

    assert Tokenizer.from_buffer(data).encode("e\u0301").tokens == ["Ã", "©"]


def test_an_unknown_cutting_rule_is_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    def tokenizer(writer: Writer) -> None:
        tokens_of_bytes()(writer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "klingon"

    with pytest.raises(UnsupportedError, match=r"'klingon'.*llama-bpe"):
        convert(write_gguf(tmp_path / "m.gguf", tiny, tokenizer=tokenizer), tmp_path / "m.calm")


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_missing_cutting_rule_warns(tmp_path: Path, pre: str | None) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        import_tokenizer(metadata, 1, tmp_path)


def test_whole_words_skip_merging_where_the_model_wants_it(tmp_path: Path) -> None:
    """Llama 3 takes a word that is in the vocabulary, even if no merges lead to it."""
    from tokenizers import Tokenizer

    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": [],
    }
    data = import_tokenizer(metadata, 3, tmp_path).extras["tokenizer.json"]
    assert Tokenizer.from_buffer(data).encode("ab").ids == [2]


@pytest.mark.parametrize(
    ("pre", "given_flag", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_bos_is_added_by_the_files_rule(tmp_path: Path, pre: str, given_flag: bool | None, adds: bool) -> None:
    from tokenizers import Tokenizer

    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "<s>"],
        "tokenizer.ggml.token_type": [1, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
    }
    if given_flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = given_flag
    tokenizer = Tokenizer.from_buffer(import_tokenizer(metadata, 2, tmp_path).extras["tokenizer.json"])
    assert tokenizer.encode("a").ids == ([1, 0] if adds else [0])


@pytest.fixture(scope="session")
def sentencepiece() -> Any:
    """A small SentencePiece BPE model with byte fallback, as Llama 2 has one."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "hello there, world", "the lowest of the low"] * 8),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: Any) -> dict[str, Any]:
    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if processor.is_byte(i):
            return 6
        return 4 if processor.id_to_piece(i) == "<tool>" else 1

    size = processor.vocab_size()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": np.array([processor.get_score(i) for i in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in range(size)], np.int32),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


@pytest.mark.parametrize(
    "text", ["hello world", "  the  low", "né 철🙂", "", " ", "a\nb\t", "<tool>hello", "the lowest worlds", "\u2581x"]
)
def test_a_sentencepiece_model_is_rebuilt(sentencepiece: Any, tmp_path: Path, text: str) -> None:
    import sentencepiece as sp

    metadata = sentencepiece_metadata(sentencepiece)
    data = import_tokenizer(metadata, sentencepiece.vocab_size(), tmp_path).extras["tokenizer.model"]
    again = sp.SentencePieceProcessor(model_proto=data)
    assert again.encode(text) == sentencepiece.encode(text)
    assert again.decode(again.encode(text)) == sentencepiece.decode(sentencepiece.encode(text))
    assert (again.bos_id(), again.eos_id(), again.unk_id()) == (1, 2, 0)


def test_a_sentencepiece_model_without_a_dummy_space_is_rebuilt(sentencepiece: Any, tmp_path: Path) -> None:
    import sentencepiece as sp

    metadata = sentencepiece_metadata(sentencepiece) | {"tokenizer.ggml.add_space_prefix": False}
    data = import_tokenizer(metadata, sentencepiece.vocab_size(), tmp_path).extras["tokenizer.model"]
    pieces = sp.SentencePieceProcessor(model_proto=data).encode("hello", out_type=str)
    assert not pieces[0].startswith("\u2581")


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", 3])
def test_other_kinds_of_tokenizers_are_named(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(UnsupportedError, match=str(kind)):
        import_tokenizer({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]}, 1, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a"] * 5},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.merges": ["a c"]},
        {"tokenizer.ggml.merges": ["ab"]},
    ],
)
def test_tokenizer_metadata_that_contradict_themselves_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(FormatError):
        import_tokenizer(metadata | changes, 4, tmp_path)


def test_every_end_of_turn_token_is_a_stop_id(tiny: Any, tmp_path: Path) -> None:
    def tokenizer(writer: Writer) -> None:
        tokens_of_bytes()(writer)
        writer.add_eot_token_id(3)

    with open_calm(convert(write_gguf(tmp_path / "m.gguf", tiny, tokenizer=tokenizer), tmp_path / "m.calm")) as file:
        assert file.config.stop_ids == (39, 3)


def test_templates_and_special_tokens_are_kept(tiny: Any, tmp_path: Path) -> None:
    def extra(writer: Writer) -> None:
        writer.add_chat_template([{"name": "default", "template": "D é"}, {"name": "tool_use", "template": "T"}])

    with open_calm(convert(write_gguf(tmp_path / "m.gguf", tiny, extra=extra), tmp_path / "m.calm")) as file:
        assert file.extras["chat_template"].decode() == "D é"
        assert file.settings["chat_templates"] == {"tool_use": "T"}
        assert file.settings["special_tokens"] == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
        assert file.settings["source"]["format"] == "gguf"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 3, 8, 23, 24, 100, 2000, -33])
def test_a_truncated_file_is_refused(source: Path, tmp_path: Path, kept: int) -> None:
    source.write_bytes(source.read_bytes()[:kept])
    with pytest.raises(FormatError):
        convert(source, tmp_path / "m.calm")


@pytest.mark.parametrize(("version", "said"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_and_byte_orders_are_refused(source: Path, tmp_path: Path, version: int, said: str) -> None:
    data = bytearray(source.read_bytes())
    data[4:8] = struct.pack("<I", version)
    source.write_bytes(data)
    with pytest.raises(UnsupportedError, match=said):
        convert(source, tmp_path / "m.calm")


@pytest.mark.parametrize("place", [8, 16])
def test_counts_larger_than_the_file_are_refused(source: Path, tmp_path: Path, place: int) -> None:
    data = bytearray(source.read_bytes())
    data[place : place + 8] = struct.pack("<Q", 2**63)
    source.write_bytes(data)
    with pytest.raises(FormatError, match="cannot be in"):
        convert(source, tmp_path / "m.calm")


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=st.lists(st.tuples(st.integers(24, 4500), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_damage_raises_anything_but_our_own_errors(tiny_bytes: bytes, tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    data = bytearray(tiny_bytes)
    for place, byte in edits:
        data[place] = byte
    (tmp_path / "bad.gguf").write_bytes(data)
    # A damaged key may be the one that names the cutting rule, which warns.
    with contextlib.suppress(CalmnbError, UserWarning):
        open_calm(convert(tmp_path / "bad.gguf", tmp_path / "m.calm")).close()


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_demo_models_prompt_has_the_golden_ids(smollm2: Callable[[str], Path]) -> None:
    from tokenizers import Tokenizer

    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    golden = (
        "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 "
        "1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
    )
    with open_calm(smollm2("gf4")) as file:
        ids = Tokenizer.from_buffer(file.extras["tokenizer.json"]).encode(prompt).ids
    assert ids == [int(word) for word in golden.split()]


@pytest.mark.model
def test_the_demo_models_weights_are_those_of_the_gguf_package(smollm2: Callable[[str], Path], smollm2_gguf: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    with open_calm(smollm2("fp16")) as file:
        for name, stored in {
            "blk.17.attn_q": file.weights.layers[17].wq,
            "blk.29.ffn_down": file.weights.layers[29].w2,
        }.items():
            tensor = tensors[name + ".weight"]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
            np.testing.assert_array_equal(decode(stored, "fp16"), expected.astype(np.float32))


@pytest.mark.model
def test_the_demo_model_is_what_its_metadata_say(smollm2: Callable[[str], Path]) -> None:
    with open_calm(smollm2("fp8")) as file:
        c = file.config
        assert (c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim) == (576, 1536, 30, 9, 3, 64)
        assert (c.vocab_size, c.max_seq_len, c.rope_theta, c.norm_eps) == (49152, 8192, 100000.0, 1e-5)
        assert (file.n_params, file.weights.is_tied, c.eos_token_id) == (134_515_008, True, 2)
        assert json.loads(file.extras["calmnb.json"])["add_bos_token"] is False
