"""`.calm` files: what is read, what is refused and by which name, and what is written."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calmnb.checkpoint import CalmFile, calm_metadata, open_calm, weight_layout, write_calm
from calmnb.config import ModelConfig, RopeScaling
from calmnb.container import TensorSpec
from calmnb.errors import CalmnbError, FormatError, TensorError, UnsupportedError
from tests import spec_models
from tests.oracles import container_bytes

Edit = Callable[[dict[str, Any]], None]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data area of a container."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def model_bytes(spec_model: Callable[[str], Path]) -> bytes:
    return spec_model("A").read_bytes()


@pytest.fixture
def edited(model_bytes: bytes, tmp_path: Path) -> Callable[[Edit], Path]:
    """``edited(change)``: path of model A after `change` was applied to its header."""

    def make(change: Edit) -> Path:
        header, data = split(model_bytes)
        change(header)
        path = tmp_path / "edited.calm"
        path.write_bytes(join(header, data))
        return path

    return make


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "bad.calm"
    path.write_bytes(data)
    return path


# --- reading good files ----------------------------------------------------------------------------------------------


def test_the_file_is_what_the_specification_says_byte_for_byte(spec_model: Callable[[str], Path]) -> None:
    config = spec_models.BASE
    arrays = [
        (slot.name, "F16" if slot.quantised else "F32", spec_models.weights(config)[slot.name])
        for slot in weight_layout(config)
    ]
    tensors = [(name, code, a.astype(np.float16) if code == "F16" else a) for name, code, a in arrays]
    tokens = np.frombuffer(b"a\0b\0c\0d\0e\0f\0g\0h\0i\0j\0k\0l\0", np.uint8)
    tensors += [("tokenizer.tokens", "U8", tokens), ("tokenizer.scores", "F32", np.zeros(12, np.float32))]
    metadata = {
        "arch": "test", "dtype": "fp16", "dim": "32", "hidden_dim": "64", "head_dim": "16", "n_layers": "2", "n_heads": "2",
        "n_kv_heads": "1", "vocab_size": "12", "max_seq_len": "64", "bos_token_id": "-1", "eos_token_id": "0",
        "rope_theta": "10000.0", "rotary_dim": "16", "norm_eps": "1e-05", "norm_type": "rmsnorm", "act_type": "silu",
    }  # fmt: skip
    assert spec_model("A").read_bytes() == container_bytes(metadata, tensors)


@pytest.mark.parametrize(("name", "params", "nbytes", "bits"), [("A", 19_360, 39_040, 16.13), ("F", 56_480, 28_800, 4.08)])
def test_parameters_and_bytes_are_counted_as_calm_counts(
    spec_model: Callable[[str], Path], name: str, params: int, nbytes: int, bits: float
) -> None:
    with open_calm(spec_model(name)) as file:
        assert (file.n_params, file.nbytes, round(file.bits_per_weight, 2)) == (params, nbytes, bits)


def test_stored_rows_are_the_specifications(spec_model: Callable[[str], Path]) -> None:
    with open_calm(spec_model("B")) as file:
        assert bytes(file.weights.embed[0, :8]) == bytes.fromhex("B0B5332 8B1B63200".replace(" ", ""))
    with open_calm(spec_model("C")) as file:
        assert [hex(word) for word in file.weights.embed[0]] == ["0x98298bb6", "0xace88636", "0xcc7c8734", "0x530531b6"]


@pytest.mark.parametrize("json_length", [100, 248, 249, 504, 1000])
def test_the_header_is_padded_to_a_multiple_of_256(tmp_path: Path, json_length: int) -> None:
    from calmnb.container import _build_header

    plain = len(json.dumps({"__metadata__": {"k": ""}}))
    header = _build_header({"k": "x" * (json_length - plain)}, [])
    expected = {100: 248, 248: 248, 249: 504, 504: 504, 1000: 1016}[json_length]
    assert (int.from_bytes(header[:8], "little"), len(header)) == (expected, expected + 8)


def test_weights_are_views_into_the_file(spec_model: Callable[[str], Path]) -> None:
    with open_calm(spec_model("A")) as file:
        assert not file.weights.embed.flags.owndata
        assert not file.weights.embed.flags.writeable


@pytest.mark.parametrize("name", ["A", "E"])
def test_a_missing_output_matrix_means_tied(spec_model: Callable[[str], Path], name: str) -> None:
    with open_calm(spec_model(name)) as file:
        assert file.weights.is_tied == (name == "E")


def test_tokens_and_scores_come_back(spec_model: Callable[[str], Path]) -> None:
    with open_calm(spec_model("A")) as file:
        assert file.token_bytes == [bytes([ord("a") + i]) for i in range(12)]
        np.testing.assert_array_equal(file.token_scores, np.zeros(12))


def test_a_closed_file_may_be_closed_again_and_its_arrays_stay_valid(spec_model: Callable[[str], Path]) -> None:
    file = open_calm(spec_model("A"))
    embed = file.weights.embed
    file.close()
    file.close()
    assert np.isfinite(embed.astype(np.float32)).all()


def test_tensors_in_any_order_and_members_in_any_order_are_read(model_bytes: bytes, tmp_path: Path) -> None:
    header, data = split(model_bytes)
    turned = {name: dict(reversed(entry.items())) for name, entry in reversed(header.items())}
    with open_calm(write(tmp_path, join(turned, data))) as file:
        assert file.config.dim == 32


def test_a_header_without_padding_and_misaligned_norms_are_read(model_bytes: bytes, tmp_path: Path) -> None:
    header, data = split(model_bytes)
    for length in range(4):
        padded = join(json.dumps(header) + " " * length, data)
        with open_calm(write(tmp_path, padded)) as file:
            assert file.weights.final_norm.flags.aligned
            np.testing.assert_array_equal(file.weights.final_norm, spec_models.weights(spec_models.BASE)["model.norm.weight"])


def test_gaps_between_tensors_and_zeros_after_the_header_are_read(model_bytes: bytes, tmp_path: Path) -> None:
    header, data = split(model_bytes)
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 64 for offset in entry["data_offsets"]]
    with open_calm(write(tmp_path, join(json.dumps(header) + "\0\0", bytes(64) + data))) as file:
        assert file.token_bytes[0] == b"a"


def test_optional_metadata_have_calms_defaults(edited: Callable[[Edit], Path]) -> None:
    def change(header: dict[str, Any]) -> None:
        for key in ("arch", "max_seq_len", "norm_eps", "norm_type", "act_type"):
            del header["__metadata__"][key]

    with open_calm(edited(change)) as file:
        c = file.config
        assert (c.arch, c.max_seq_len, c.norm_eps, c.norm_type, c.act_type) == ("unknown", 4096, 1e-5, "rmsnorm", "silu")
        assert (c.qkv_clip, c.n_experts) == (math.inf, 0)


@pytest.mark.parametrize(
    ("spelling", "eos", "stops"), [("None", -1, ()), ("[6, 7]", 6, (6, 7)), ("-1", -1, ()), ("3", 3, (3,))]
)
def test_eos_as_calms_converter_spells_it(
    edited: Callable[[Edit], Path], spelling: str, eos: int, stops: tuple[int, ...]
) -> None:
    with open_calm(edited(lambda header: header["__metadata__"].update(eos_token_id=spelling))) as file:
        assert (file.config.eos_token_id, file.config.stop_ids) == (eos, stops)


@pytest.mark.slow
def test_a_7_gigabyte_file_opens_within_2_seconds(tmp_path: Path) -> None:
    config = ModelConfig(
        arch="mistral", dtype="fp8", dim=4096, hidden_dim=14336, head_dim=128, n_layers=32, n_heads=32, n_kv_heads=8,
        vocab_size=32000, rotary_dim=128,
    )  # fmt: skip
    specs = [
        TensorSpec(slot.name, "F8_E5M2" if slot.quantised else "F32", slot.shape, lambda: ()) for slot in weight_layout(config)
    ]
    specs += [
        TensorSpec("tokenizer.tokens", "U8", (32000,), lambda: ()),
        TensorSpec("tokenizer.scores", "F32", (32000,), lambda: ()),
    ]
    from calmnb.container import _build_header

    header = _build_header(calm_metadata(config), specs)
    path = tmp_path / "sparse.calm"
    with path.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + sum(spec.nbytes for spec in specs))
    start = time.perf_counter()
    with open_calm(path) as file:
        assert time.perf_counter() - start < 2
        # Specification vector 16.
        assert (file.n_params, file.nbytes) == (7_241_732_096, 7_242_530_816)


# --- refusing bad files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(FormatError, match=f"{size} bytes long"):
        open_calm(write(tmp_path, bytes(size)))


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**63, 2**64 - 1])
def test_a_header_length_outside_the_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(FormatError, match=f"said to be {length} bytes"):
        open_calm(write(tmp_path, length.to_bytes(8, "little") + b"{}" + bytes(64)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere\.calm cannot be opened"):
        open_calm(tmp_path / "nowhere.calm")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be opened"):
        open_calm(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    with pytest.raises(FormatError, match="Git LFS pointer"):
        open_calm(write(tmp_path, pointer))


def test_a_gguf_file_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="calmnb convert"):
        open_calm(write(tmp_path, b"GGUF" + bytes(100)))


@pytest.mark.parametrize("kept", [9, 500, 5000, -1])
def test_a_truncated_file_is_refused(model_bytes: bytes, tmp_path: Path, kept: int) -> None:
    with pytest.raises(FormatError):
        open_calm(write(tmp_path, model_bytes[:kept]))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},}',  # trailing comma
        '{"a": 1} {}',
        '{"a"',
        "[]",
        "12",
        "{" * 100_000,
        "[" * 100_000,
        '{"__metadata__": {"dim": 32}}',
        '{"__metadata__": []}',
        '{"\ud800": 1}',
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1' + "0" * 5000 + "]}}",
    ],
)
def test_a_header_that_is_not_a_json_object_of_tensors_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError):
        open_calm(write(tmp_path, join(text, bytes(64))))


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    with pytest.raises(FormatError, match="'a' occurs twice"):
        open_calm(write(tmp_path, join(f'{{"a": {entry}, "a": {entry}}}', bytes(4))))


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "F64"}, "dtype 'F64'"),
        ({"dtype": "BOOL"}, "dtype 'BOOL'"),
        ({"dtype": 3}, "dtype '3'"),
        ({"shape": []}, "shape"),
        ({"shape": [1, 1, 1, 2, 2]}, "shape"),
        ({"shape": [0, 64]}, "shape"),
        ({"shape": [-2, -2]}, "shape"),
        ({"shape": [2.0, 2]}, "shape"),
        ({"shape": [True, 4]}, "shape"),
        ({"shape": "22"}, "shape"),
        ({"shape": [2**62, 2**62]}, "takes 16 bytes"),
        ({"shape": [2, 3]}, "takes 16 bytes, but F32 .2, 3. takes 24"),
        ({"data_offsets": [0, 20]}, "takes 20 bytes"),
        ({"data_offsets": [64, 80]}, "outside the 64 bytes"),
        ({"data_offsets": [-16, 0]}, "outside"),
        ({"data_offsets": [16, 0]}, "outside"),
        ({"data_offsets": [0, 2**70]}, "outside"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"data_offsets": [0.0, 16.0]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
        ({"offset": 1}, "is described by"),
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(TensorError, match=f"'odd'.*{said}"):
        open_calm(write(tmp_path, join({"odd": GOOD | change}, bytes(64))))


def test_a_tensor_without_dtype_and_offsets_is_named(tmp_path: Path) -> None:
    with pytest.raises(TensorError, match="'odd'"):
        open_calm(write(tmp_path, join({"odd": {}}, bytes(64))))


def test_overlapping_tensors_are_named(tmp_path: Path) -> None:
    header = {"one": GOOD, "two": GOOD | {"data_offsets": [12, 28]}}
    with pytest.raises(TensorError, match=r"'one'.*'two'.*overlap"):
        open_calm(write(tmp_path, join(header, bytes(64))))


REQUIRED = [
    "dtype", "dim", "hidden_dim", "head_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "rope_theta", "rotary_dim",
    "bos_token_id", "eos_token_id",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_metadata_key_is_named(edited: Callable[[Edit], Path], key: str) -> None:
    with pytest.raises(CalmnbError, match=key):
        open_calm(edited(lambda header: header["__metadata__"].pop(key)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dim", "wide"),
        ("dim", "-32"),
        ("dim", "0"),
        ("n_layers", "3"),
        ("n_layers", "1000000000000"),
        ("n_kv_heads", "0"),
        ("n_heads", "3"),
        ("rotary_dim", "18"),
        ("rotary_dim", "7"),
        ("rope_theta", "nan"),
        ("rope_theta", "x"),
        ("norm_eps", "inf"),
        ("norm_type", "batchnorm"),
        ("act_type", "relu"),
        ("dtype", "int4"),
        ("qkv_clip", "-1"),
        ("n_experts", "-1"),
        ("n_experts", "4"),
        ("vocab_size", "13"),
        ("eos_token_id", "stop"),
        ("eos_token_id", '["a"]'),
        ("max_seq_len", "9" * 5000),
    ],
)
def test_a_metadata_value_that_cannot_be_is_refused(edited: Callable[[Edit], Path], key: str, value: str) -> None:
    with pytest.raises(CalmnbError, match=r"edited\.calm"):
        open_calm(edited(lambda header: header["__metadata__"].update({key: value})))


@pytest.mark.parametrize("name", ["model.embed.weight", "model.layers.1.mlp.w2.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(edited: Callable[[Edit], Path], name: str) -> None:
    with pytest.raises(TensorError, match=f"{name} is missing"):
        open_calm(edited(lambda header: header.pop(name)))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(edited: Callable[[Edit], Path]) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.layers.0.attn.wo.weight"]["shape"] = [16, 64]

    with pytest.raises(TensorError, match=r"attn\.wo\.weight is F16 \[16, 64\].*F16 \[32, 32\]"):
        open_calm(edited(change))


def test_a_tensor_of_the_wrong_dtype_is_named(edited: Callable[[Edit], Path]) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.layers.0.attn.wq.weight"]["dtype"] = "BF16"

    with pytest.raises(TensorError, match=r"attn\.wq\.weight is BF16"):
        open_calm(edited(change))


def test_nan_in_a_norm_is_named_on_open(model_bytes: bytes, tmp_path: Path) -> None:
    header, data = split(model_bytes)
    begin = header["model.layers.1.mlp.norm.weight"]["data_offsets"][0]
    broken = data[: begin + 4] + np.float32(np.nan).tobytes() + data[begin + 8 :]
    with pytest.raises(TensorError, match=r"model\.layers\.1\.mlp\.norm\.weight holds NaN"):
        open_calm(write(tmp_path, join(header, broken)))


@pytest.mark.parametrize(("model", "pattern"), [("A", b"\x00\x7c"), ("B", b"\xfc"), ("C", b"\x7e\x24\x49\x92")])
def test_nan_in_a_matrix_is_named_when_asked_for(
    spec_model: Callable[[str], Path], tmp_path: Path, model: str, pattern: bytes
) -> None:
    header, data = split(spec_model(model).read_bytes())
    begin = header["model.layers.0.mlp.w3.weight"]["data_offsets"][0]
    path = write(tmp_path, join(header, data[:begin] + pattern + data[begin + len(pattern) :]))
    with open_calm(path) as file, pytest.raises(TensorError, match=r"model\.layers\.0\.mlp\.w3\.weight holds NaN"):
        file.check_finite()


@pytest.mark.parametrize("tokens", [b"a" * 24, b"ab\0" + b"\0" * 21, b"a\0" * 11 + b"ab"])
def test_token_strings_that_do_not_fit_the_vocabulary_are_refused(model_bytes: bytes, tmp_path: Path, tokens: bytes) -> None:
    header, data = split(model_bytes)
    begin, end = header["tokenizer.tokens"]["data_offsets"]
    assert len(tokens) == end - begin
    with pytest.raises(TensorError, match=r"tokenizer\.tokens"):
        open_calm(write(tmp_path, join(header, data[:begin] + tokens + data[end:])))


def test_a_token_of_more_than_512_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.calm"
    arrays = {k: a.astype(np.float16) if a.ndim > 1 else a for k, a in spec_models.weights(spec_models.BASE).items()}
    write_calm(path, spec_models.BASE, arrays, tokens=[b"x" * 513])
    with pytest.raises(TensorError, match="513 bytes"):
        open_calm(path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8), cut=st.integers(0, 60_000))
def test_no_damage_to_a_file_raises_anything_but_our_own_errors(
    model_bytes: bytes, tmp_path: Path, edits: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(model_bytes)
    for place, byte in edits:
        damaged[place % len(damaged)] = byte
    path = write(tmp_path, bytes(damaged[: max(cut, 8)]))
    try:
        with open_calm(path) as file:
            file.check_finite()
            assert len(file.token_bytes) in (0, file.config.vocab_size)
    except CalmnbError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_header_value_raises_anything_but_our_own_errors(model_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    header, body = split(model_bytes)
    name = data.draw(st.sampled_from(sorted(header)))
    if name == "__metadata__":
        header[name][data.draw(st.sampled_from(sorted(header[name])))] = data.draw(st.text(max_size=12))
    elif data.draw(st.booleans()):
        header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "other"]))] = data.draw(JSON)
    else:
        header[name] = data.draw(JSON)
    with contextlib.suppress(CalmnbError):
        open_calm(write(tmp_path, join(header, body))).close()


# --- extras ----------------------------------------------------------------------------------------------------------


def write_small(path: Path, **options: Any) -> Path:
    arrays = {k: a.astype(np.float16) if a.ndim > 1 else a for k, a in spec_models.weights(spec_models.BASE).items()}
    return write_calm(path, spec_models.BASE, arrays, tokens=[b"a"], **options)


def opened_with(tmp_path: Path, settings_json: Any) -> CalmFile:
    extras = {"calmnb.json": settings_json if isinstance(settings_json, bytes) else json.dumps(settings_json).encode()}
    return open_calm(write_small(tmp_path / "extra.calm", extras=extras))


def test_extras_come_back_and_leave_the_rest_of_the_data_alone(tmp_path: Path) -> None:
    extras = {"tokenizer.json": b'{"a": "\\n"}', "chat_template": "{{ messages }} é".encode(), "empty": b""}
    plain = write_small(tmp_path / "plain.calm")
    path = write_small(tmp_path / "extra.calm", extras=extras)
    with open_calm(path) as file:
        assert file.extras == {key: value for key, value in extras.items() if value}
    assert split(path.read_bytes())[1].startswith(split(plain.read_bytes())[1])


def test_no_string_of_a_header_with_extras_holds_a_backslash(tmp_path: Path) -> None:
    """calm refuses a file with one."""
    path = write_small(tmp_path / "extra.calm", extras={"tokenizer.json": b"\\ \n \xff"})
    data = path.read_bytes()
    assert b"\\" not in data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_calm_would_open_a_file_with_extras(tmp_path: Path) -> None:
    """Every rule of calm's loader that SPEC_calm.md 1.4 lists, held against a file of ours."""
    extras = {"tokenizer.json": b"{}", "chat_template": b"x", "calmnb.json": b"{}"}
    data = write_small(tmp_path / "extra.calm", extras=extras).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    assert text.startswith(b"{")
    assert (8 + length) % 256 == 0
    assert b"\\" not in text
    header = json.loads(text)
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    assert len(metadata) <= 128
    assert len(header) <= 1024
    sizes = {"F32": 4, "F16": 2, "F8_E5M2": 1, "I32": 4, "U8": 1}
    for entry in header.values():
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        begin, end = entry["data_offsets"]
        assert 1 <= len(entry["shape"]) <= 4
        assert 0 < math.prod(entry["shape"]) < 2**31
        assert end - begin == math.prod(entry["shape"]) * sizes[entry["dtype"]] > 0
        assert end <= len(data) - 8 - length


def test_settings_reach_the_configuration(tmp_path: Path) -> None:
    scaling = {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192}
    with opened_with(tmp_path, {"stop_ids": [0, 5], "rope_scaling": scaling, "sliding_window": 7}) as file:
        assert file.config.stop_ids == (0, 5)
        assert file.config.rope_scaling == RopeScaling("llama3", 8.0, 8192)
        assert file.config.sliding_window == 7


@pytest.mark.parametrize("scaling", [{"kind": "longrope", "factor": 2}, {"kind": "yarn", "factor": 2, "new": 1}, "yarn", {}])
def test_an_unknown_rope_scaling_is_never_ignored(tmp_path: Path, scaling: Any) -> None:
    with pytest.raises(UnsupportedError, match="rope scaling"):
        opened_with(tmp_path, {"rope_scaling": scaling})


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"[]",
        b"\xff",
        {"stop_ids": 3},
        {"stop_ids": [-1]},
        {"stop_ids": ["a"]},
        {"sliding_window": "wide"},
        {"rope_scaling": {"kind": "linear"}},
        {"rope_scaling": {"kind": "linear", "factor": 0}},
        {"rope_scaling": {"kind": "yarn", "factor": float("nan")}},
        {"rope_scaling": {"kind": "yarn", "factor": 2, "original_max_seq_len": -8}},
        {"rope_scaling": {"kind": "llama3", "factor": 8}},
        {"rope_scaling": {"kind": "llama3", "factor": 8, "original_max_seq_len": 64, "low_freq_factor": 4}},
        {"rope_scaling": {"kind": "linear", "factor": "8"}},
        {"rope_scaling": {"kind": "linear", "factor": 10**400}},
        {"rope_scaling": {"kind": "linear", "factor": 5e-324}},
        {"rope_scaling": {"kind": "yarn", "factor": 2, "beta_fast": 5e-324}},
        {"rope_scaling": {"kind": "yarn", "factor": 2, "beta_slow": 1e308}},
        {"rope_scaling": {"kind": "yarn", "factor": 2, "attention_factor": 1e300}},
        {"sliding_window": 10**23 - 1},
    ],
)
def test_damaged_settings_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FormatError):
        opened_with(tmp_path, value)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_zero_bytes_inside_tokens_become_0x07_and_unused_ids_are_empty(tmp_path: Path) -> None:
    arrays = {k: a.astype(np.float16) if a.ndim > 1 else a for k, a in spec_models.weights(spec_models.BASE).items()}
    path = write_calm(tmp_path / "t.calm", spec_models.BASE, arrays, tokens=[b"a\0b", b"\0"], scores=[1.0, -2.0])
    with open_calm(path) as file:
        assert file.token_bytes == [b"a\x07b", b"\x07", *([b""] * 10)]
        assert list(file.token_scores[:3]) == [1.0, -2.0, 0.0]


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"13 tokens.*12 rows"):
        write_calm(tmp_path / "t.calm", spec_models.BASE, [], tokens=[b"a"] * 13)


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_arrays_that_do_not_fit_the_configuration_are_named(tmp_path: Path, change: str) -> None:
    arrays = {k: a.astype(np.float16) if a.ndim > 1 else a for k, a in spec_models.weights(spec_models.BASE).items()}
    name = "model.layers.0.attn.wk.weight"
    if change == "missing":
        del arrays[name]
    elif change == "extra":
        arrays[name := "model.layers.0.attn.gate.weight"] = np.zeros(1, np.float32)
    else:
        arrays[name] = arrays[name].T if change == "shape" else arrays[name].astype(np.float32)
    with pytest.raises(TensorError, match=name.replace(".", r"\.")):
        write_calm(tmp_path / "t.calm", spec_models.BASE, arrays)
    assert not list(tmp_path.iterdir())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    write_small(tmp_path / "p.calm", progress=lambda done, total, name: calls.append((done, total, name)))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][0] == calls[-1][1]
    assert calls[0][2] == "model.embed.weight"


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file-size limit makes writes fail halfway, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CalmnbError, match=r"cannot write .*full\.calm.*MB"):
            write_small(tmp_path / "full.calm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_noticed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    calls: list[Any] = []
    with pytest.raises(CalmnbError, match=r"takes 0\.0 MB, and 0\.0 MB are free"):
        write_small(tmp_path / "small.calm", progress=lambda *call: calls.append(call))
    assert (calls, list(tmp_path.iterdir())) == ([], [])


def test_an_interrupt_leaves_nothing_behind_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = write_small(tmp_path / "kept.calm")
    before = path.read_bytes()

    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_small(path, progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.calm"]
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalmnbError, match="nowhere"):
        write_small(tmp_path / "nowhere" / "t.calm")
