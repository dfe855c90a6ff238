"""Hugging Face folders: converted exactly, streamed, and refused by name when something is off."""

from __future__ import annotations

import json
import resource
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.convert.source import rotary_order
from calmnb.errors import CalmnbError, ConfigError, FormatError, TensorError, UnsupportedError
from calmnb.quant import decode
from tests.hf_models import (
    LLAMA3_ROPE,
    YARN_ROPE,
    calm_logits,
    edit_json,
    logits,
    replace_tensors,
    save,
    tensors_of,
    tiny_model,
    tiny_tokenizer,
)
from tests.oracles import container_bytes, gf4_words, rotary_rows

#: Keys and values lie in an fp16 cache on both sides; where the two engines' float32 values straddle a rounding border, one
#: of them moves by 2**-11 of itself. Anything misplaced changes logits by more than 0.1.
TOLERANCE = 2e-3


# --- the numbers are right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 24}),
        ("llama", {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
        ("llama", {"rope_parameters": YARN_ROPE}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 4}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    path = convert(save(model, tmp_path / "hf"), tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary", "rows"),
    [
        (1, 4, 4, "0 2 1 3"),
        (2, 2, 2, "0 1 2 3"),
        (1, 8, 8, "0 4 1 5 2 6 3 7"),
        (2, 4, 4, "0 2 1 3 4 6 5 7"),
        (1, 8, 4, "0 2 1 3 4 5 6 7"),
        (2, 8, 6, "0 3 1 4 2 5 6 7 8 11 9 12 10 13 14 15"),
    ],
)
def test_the_rotary_permutation_is_the_specifications(heads: int, head_dim: int, rotary: int, rows: str) -> None:
    order = rotary_order(head_dim, rotary)
    found = np.concatenate([order + head * head_dim for head in range(heads)])
    assert found.tolist() == [int(row) for row in rows.split()]
    assert found.tolist() == rotary_rows(heads, head_dim, rotary)


def expected_file(checkpoint: Path, arch: str, dtype: str, *, tied: bool) -> bytes:
    """What calm's converter writes for a checkpoint, put together from the specification with other code than ours."""
    config = json.loads((checkpoint / "config.json").read_text())
    source = {name: tensor.float().numpy() for name, tensor in tensors_of(checkpoint).items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads
    encoders: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "fp16": ("F16", lambda a: a.astype(np.float16)),
        "fp8": ("F8_E5M2", lambda a: a.astype(ml_dtypes.float8_e5m2).view(np.uint8)),
        "gf4": ("I32", lambda a: gf4_words(a).view(np.int32)),
    }
    code, encode = encoders[dtype]
    tensors: list[tuple[str, str, Any]] = [("model.embed.weight", code, encode(source["model.embed_tokens.weight"]))]
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"model.layers.{layer}."
        rows = {"q": rotary_rows(heads, head_dim, head_dim), "k": rotary_rows(kv_heads, head_dim, head_dim), "v": ...}
        tensors.append((new + "attn.norm.weight", "F32", source[old + "input_layernorm.weight"]))
        for which in "qkv":
            weight = source[f"{old}self_attn.{which}_proj.weight"][rows[which]]
            tensors.append((f"{new}attn.w{which}.weight", code, encode(weight)))
        tensors.append((new + "attn.wo.weight", code, encode(source[old + "self_attn.o_proj.weight"])))
        if arch == "qwen2":
            bias = np.concatenate([source[f"{old}self_attn.{which}_proj.bias"][rows[which]] for which in "qkv"])
            tensors.append((new + "attn.wqkv.bias", "F32", bias))
        tensors.append((new + "mlp.norm.weight", "F32", source[old + "post_attention_layernorm.weight"]))
        for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            tensors.append((f"{new}mlp.{ours}.weight", code, encode(source[f"{old}mlp.{theirs}_proj.weight"])))
    tensors.append(("model.norm.weight", "F32", source["model.norm.weight"]))
    if not tied:
        tensors.append(("model.output.weight", code, encode(source["lm_head.weight"])))
    tokens = b"a\0b\0c\0 \0ab\0\n\0abc\0\xc3\0\xa9\0\xc3\xa9\0 a\0" + "<|für you|>".encode() + b"\0" + 28 * b"\0"
    scores = np.zeros(40, np.float32)
    scores[[4, 6, 9, 10]] = [-1, -2, -3, -4]
    tensors += [
        ("tokenizer.tokens", "U8", np.frombuffer(tokens, np.uint8)),
        ("tokenizer.scores", "F32", scores),
    ]
    metadata = {
        "arch": arch,
        "dtype": dtype,
        "dim": str(config["hidden_size"]),
        "hidden_dim": str(config["intermediate_size"]),
        "head_dim": str(head_dim),
        "n_layers": str(config["num_hidden_layers"]),
        "n_heads": str(heads),
        "n_kv_heads": str(kv_heads),
        "vocab_size": str(config["vocab_size"]),
        "max_seq_len": str(config["max_position_embeddings"]),
        "bos_token_id": "-1" if arch == "qwen2" else str(config["bos_token_id"]),
        "eos_token_id": str(config["eos_token_id"]),
        "rope_theta": str(config["rope_theta"]),
        "rotary_dim": str(head_dim),
        "norm_eps": str(config["rms_norm_eps"]),
        "norm_type": "rmsnorm",
        "act_type": "silu",
    }
    return container_bytes(metadata, tensors)


@pytest.mark.parametrize("theta", [10000.0, 1000000])
@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("mistral", False)])
def test_files_without_extras_equal_calms_byte_for_byte(
    tmp_path: Path, family: str, tied: bool, dtype: str, theta: float
) -> None:
    model = tiny_model(family, tie_word_embeddings=tied, num_hidden_layers=1)
    checkpoint = save(model, tmp_path / "hf")
    (checkpoint / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    edit_json(checkpoint / "config.json", rope_parameters=..., rope_theta=theta)
    path = convert(checkpoint, tmp_path / "m.calm", dtype=dtype, extras=False)
    assert path.read_bytes() == expected_file(checkpoint, family, dtype, tied=tied)


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_source_dtypes_do_not_matter(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    """Values exact in bf16 give the same file from F32, F16, BF16, F64 and a mixture."""
    import torch

    exact = {name: tensor.bfloat16().float() for name, tensor in tensors_of(checkpoint).items()}
    files = []
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, None):
        choice = {name: kind or (torch.float32 if "norm" in name or "embed" in name else torch.bfloat16) for name in exact}
        replace_tensors(checkpoint, {name: tensor.to(choice[name]) for name, tensor in exact.items()})
        files.append(convert(checkpoint, tmp_path / "m.calm", dtype=dtype).read_bytes())
    assert all(file == files[0] for file in files)


# --- files and the index ---------------------------------------------------------------------------------------------


def test_shards_are_joined_and_stray_files_beside_the_index_ignored(tmp_path: Path) -> None:
    model = tiny_model("llama")
    whole = convert(save(model, tmp_path / "whole"), tmp_path / "whole.calm", dtype="fp16")
    checkpoint = save(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    wrong = {name: tensor * 0 for name, tensor in tensors_of(tmp_path / "whole").items()}
    replace_tensors(tmp_path / "whole", wrong)
    shutil.copy(tmp_path / "whole" / "model.safetensors", checkpoint / "consolidated.safetensors")
    sharded = convert(checkpoint, tmp_path / "sharded.calm", dtype="fp16")
    with open_calm(whole) as one, open_calm(sharded) as other:
        for name, tensor in one.tensors.items():
            if name.startswith("model."):
                np.testing.assert_array_equal(other.tensors[name], tensor, err_msg=name)


def test_the_single_file_wins_over_other_copies(checkpoint: Path, out: Path) -> None:
    before = convert(checkpoint, out, dtype="fp16").read_bytes()
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "consolidated.safetensors")
    assert convert(checkpoint, out, dtype="fp16").read_bytes() == before


def test_a_tensor_in_two_files_without_an_index_is_named(checkpoint: Path, out: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "b.safetensors")
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    with pytest.raises(TensorError, match=r"a\.safetensors and in b\.safetensors"):
        convert(checkpoint, out)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("gone.safetensors", r"gone\.safetensors cannot be opened"),
        ("../model.safetensors", "outside its own folder"),
        (3, "weight_map"),
        ("a\0b", r"'.*a\\x00b' cannot be the name of a file"),
        ("\ud800", r"'.*\\ud800' cannot be the name of a file"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(checkpoint: Path, out: Path, place: Any, said: str) -> None:
    places: dict[str, Any] = dict.fromkeys(tensors_of(checkpoint), "model.safetensors")
    places["model.norm.weight"] = place
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FormatError, match=said):
        convert(checkpoint, out)


def test_a_tensor_that_its_shard_does_not_hold_is_named(checkpoint: Path, out: Path) -> None:
    places = dict.fromkeys([*tensors_of(checkpoint), "model.extra"], "model.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(TensorError, match=r"does not hold tensor model\.extra"):
        convert(checkpoint, out)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_recognised(checkpoint: Path, out: Path, name: str) -> None:
    (checkpoint / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 12345\n")
    with pytest.raises(FormatError, match=rf"{name}.* Git LFS pointer"):
        convert(checkpoint, out)


def test_pytorch_pickles_are_not_opened(checkpoint: Path, out: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"only pytorch_model\.bin"):
        convert(checkpoint, out)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Path, out: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(FormatError, match=name.split(".")[1]):
        convert(checkpoint, out)


def test_a_truncated_shard_is_refused(checkpoint: Path, out: Path) -> None:
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(TensorError, match="truncated"):
        convert(checkpoint, out)


# --- every tensor is accounted for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "stored", "tied"), [(True, True, True), (True, False, True), (False, True, False), (False, False, True)]
)
def test_tied_when_the_flag_says_so_or_no_output_is_stored(
    checkpoint: Path, out: Path, flag: bool, stored: bool, tied: bool
) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=flag)
    if not stored:
        tensors = tensors_of(checkpoint)
        del tensors["lm_head.weight"]
        replace_tensors(checkpoint, tensors)
    with open_calm(convert(checkpoint, out, dtype="fp16")) as file:
        assert file.weights.is_tied == tied


def test_a_missing_tie_flag_follows_the_file(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=...)
    with open_calm(convert(checkpoint, out)) as file:
        assert not file.weights.is_tied


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "lm_head.qweight", "model.layers.2.mlp.up_proj.weight", "score"]
)
def test_an_unused_tensor_is_named(checkpoint: Path, out: Path, name: str) -> None:
    import torch

    replace_tensors(checkpoint, tensors_of(checkpoint) | {name: torch.ones(3)})
    with pytest.raises(TensorError, match=name.replace(".", r"\.")):
        convert(checkpoint, out)


def test_stored_rotary_frequencies_are_ignored(checkpoint: Path, out: Path) -> None:
    import torch

    replace_tensors(checkpoint, tensors_of(checkpoint) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    convert(checkpoint, out)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_a_missing_tensor_is_named(checkpoint: Path, out: Path, name: str) -> None:
    tensors = tensors_of(checkpoint)
    del tensors[f"model.layers.1.{name}"]
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=rf"model\.layers\.1\.{name}.*missing"):
        convert(checkpoint, out)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint: Path, out: Path) -> None:
    tensors = tensors_of(checkpoint)
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].T
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=r"down_proj\.weight has the shape \[96, 64\].* \[64, 96\]"):
        convert(checkpoint, out)


def test_attention_biases_are_carried_and_change_the_logits(tmp_path: Path) -> None:
    import torch

    model = tiny_model("llama", attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    path = convert(save(model, tmp_path / "hf"), tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


def test_a_lone_bias_leaves_the_others_zero(checkpoint: Path, out: Path) -> None:
    import torch

    replace_tensors(checkpoint, tensors_of(checkpoint) | {"model.layers.1.self_attn.v_proj.bias": torch.arange(32.0)})
    with open_calm(convert(checkpoint, out, dtype="fp16")) as file:
        assert file.weights.layers[0].qkv_bias is None
        bias = file.weights.layers[1].qkv_bias
        assert bias is not None
        np.testing.assert_array_equal(bias, np.concatenate([np.zeros(96), np.arange(32.0)]))


@pytest.mark.parametrize("name", ["self_attn.o_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"])
def test_other_biases_are_refused_by_name_unless_they_are_zero(checkpoint: Path, out: Path, name: str) -> None:
    import torch

    full = f"model.layers.1.{name}"
    tensors = tensors_of(checkpoint)
    replace_tensors(checkpoint, tensors | {full: torch.zeros(64)})
    convert(checkpoint, out)
    replace_tensors(checkpoint, tensors | {full: torch.tensor([0.0, 1.0])})
    with pytest.raises(UnsupportedError, match=full.replace(".", r"\.")):
        convert(checkpoint, out)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_bias_the_configuration_promises_must_be_there(tmp_path: Path, family: str) -> None:
    checkpoint = save(tiny_model(family, **({"attention_bias": True} if family == "llama" else {})), tmp_path / "hf")
    tensors = {name: t for name, t in tensors_of(checkpoint).items() if not name.endswith("1.self_attn.q_proj.bias")}
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        convert(checkpoint, tmp_path / "m.calm")


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_named_and_nothing_is_left(checkpoint: Path, out: Path, value: float, dtype: str) -> None:
    tensors = tensors_of(checkpoint)
    tensors["model.layers.1.mlp.gate_proj.weight"][3, 5] = value
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.gate_proj\.weight holds 1 values that are NaN or infinite"):
        convert(checkpoint, out, dtype=dtype)
    assert not list(out.parent.iterdir())


def test_nan_in_a_bias_is_named(tmp_path: Path) -> None:
    checkpoint = save(tiny_model("qwen2"), tmp_path / "hf")
    tensors = tensors_of(checkpoint)
    tensors["model.layers.0.self_attn.k_proj.bias"][0] = float("nan")
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=r"self_attn\.k_proj\.bias"):
        convert(checkpoint, tmp_path / "m.calm")


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 7e4), ("fp8", 62000.0), ("gf4", -62000.0)])
def test_a_weight_too_large_for_the_storage_type_is_named(checkpoint: Path, out: Path, dtype: str, value: float) -> None:
    tensors = tensors_of(checkpoint)
    tensors["lm_head.weight"][0, 0] = value
    replace_tensors(checkpoint, tensors)
    with pytest.raises(TensorError, match=rf"lm_head\.weight holds the value .*{dtype} cannot store"):
        convert(checkpoint, out, dtype=dtype)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_weights_quantised_already_are_named(checkpoint: Path, out: Path, kind: str) -> None:
    import torch

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tensors_of(checkpoint)
    replace_tensors(checkpoint, tensors | {name: tensors[name].to(getattr(torch, kind))})
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight is stored as"):
        convert(checkpoint, out)


def test_rows_that_gf4_cannot_group_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    checkpoint = save(tiny_model("llama", intermediate_size=100), tmp_path / "hf")
    with pytest.raises(UnsupportedError, match=r"mlp\.w2\.weight.*multiple of 8"):
        convert(checkpoint, tmp_path / "m.calm", dtype="gf4")


# --- how it is done --------------------------------------------------------------------------------------------------


def big_checkpoint(checkpoint: Path) -> int:
    """A checkpoint of many matrices, written without transformers; returns the bytes of its largest one as float32."""
    import torch

    dim, hidden, layers, vocab = 512, 4096, 4, 4096
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocab, "eos_token_id": 2,
    }  # fmt: skip
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.full((vocab, dim), 0.5) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(dim)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = torch.full((dim, dim), 0.25)
        for name, shape in (("gate", (hidden, dim)), ("up", (hidden, dim)), ("down", (dim, hidden))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = torch.full(shape, 0.125)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(dim)
    replace_tensors(checkpoint, tensors)
    return vocab * dim * 4


@pytest.mark.parametrize("dtype", ["fp16", "gf4"])
def test_memory_stays_below_two_tensors(tmp_path: Path, dtype: str) -> None:
    largest = big_checkpoint(tmp_path / "hf")
    tracemalloc.start()
    path = convert(tmp_path / "hf", tmp_path / "m.calm", dtype=dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest
    assert path.stat().st_size > {"fp16": 8, "gf4": 2}[dtype] * 4 * 512 * 4096 // 2


def test_progress_counts_bytes_up_to_the_total(checkpoint: Path, out: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    path = convert(checkpoint, out, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] < path.stat().st_size
    assert calls[0][2] == "model.embed.weight"


def test_a_full_disk_leaves_nothing_behind(checkpoint: Path, out: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CalmnbError, match=r"cannot write .*model\.calm"):
            convert(checkpoint, out, dtype="fp16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.parent.iterdir())


def test_converting_twice_gives_the_same_bytes(checkpoint: Path, out: Path) -> None:
    assert convert(checkpoint, out).read_bytes() == convert(checkpoint, out).read_bytes()


def test_weights_decode_to_the_source(checkpoint: Path, out: Path) -> None:
    source = tensors_of(checkpoint)["model.layers.1.mlp.down_proj.weight"].numpy()
    with open_calm(convert(checkpoint, out, dtype="fp16")) as file:
        np.testing.assert_array_equal(decode(file.weights.layers[1].w2, "fp16"), source)


def test_a_folder_as_output_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        convert(checkpoint, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "../hf link/tokenizer.json", "notes.txt"])
def test_a_file_of_the_source_as_output_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "hf link").symlink_to(checkpoint)
    (checkpoint / "notes.txt").write_text("mine")
    before = (checkpoint / name).read_bytes()
    with pytest.raises(ConfigError, match=r"is a file of the source .* ends in .calm"):
        convert(checkpoint, checkpoint / name)
    assert (checkpoint / name).read_bytes() == before


def test_a_calm_file_beside_the_source_is_replaced(checkpoint: Path) -> None:
    (checkpoint / "m.calm").write_text("old")
    assert open_calm(convert(checkpoint, checkpoint / "m.calm")).config.dtype == "fp8"


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"])
def test_names_that_no_file_can_have_are_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        convert(checkpoint, tmp_path / name)
    with pytest.raises(FormatError, match=r"cannot be read|does not exist"):
        convert(tmp_path / name, tmp_path / "m.calm")


def test_an_unknown_dtype_is_refused(checkpoint: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match="int4"):
        convert(checkpoint, out, dtype="int4")


def test_a_source_that_is_not_there_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(FormatError, match="nowhere does not exist"):
        convert(tmp_path / "nowhere", out)


@pytest.mark.parametrize(("name", "said"), [("m.calm", "already"), ("model.safetensors", "give the folder")])
def test_a_file_of_the_wrong_kind_says_what_to_give_instead(tmp_path: Path, out: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(FormatError, match=said):
        convert(tmp_path / name, out)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, out: Path, content: bytes) -> None:
    (tmp_path / "thing").write_bytes(content)
    with pytest.raises(FormatError, match="neither a folder nor a GGUF file"):
        convert(tmp_path / "thing", out)
