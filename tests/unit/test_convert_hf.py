"""Hugging Face folders: converted exactly, streamed, and refused by name when something is off."""

from __future__ import annotations

import contextlib
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.convert.source import rotary_order
from calmnb.errors import CalmnbError, ConfigError, FormatError, TensorError, UnsupportedError
from calmnb.quant import decode
from tests.hf_models import calm_logits, edit_json, logits, replace_tensors, save, tensors_of, tiny_model, tiny_tokenizer
from tests.oracles import container_bytes, gf4_words, rotary_rows

#: Keys and values lie in an fp16 cache on both sides; where the two engines' float32 values straddle a rounding border, one
#: of them moves by 2**-11 of itself. Anything misplaced changes logits by more than 0.1.
TOLERANCE = 2e-3


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint with a tokenizer; copy it to change it."""
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("llama") / "tiny")
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint."""
    return Path(shutil.copytree(llama, tmp_path / "checkpoint"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.calm"


# --- the numbers are right -------------------------------------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


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


def expected_file(folder: Path, arch: str, dtype: str, *, tied: bool) -> bytes:
    """What calm's converter writes for a checkpoint, put together from the specification with other code than ours."""
    config = json.loads((folder / "config.json").read_text())
    source = {name: tensor.float().numpy() for name, tensor in tensors_of(folder).items()}
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
    folder = save(model, tmp_path / "hf")
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=theta)
    path = convert(folder, tmp_path / "m.calm", dtype=dtype, extras=False)
    assert path.read_bytes() == expected_file(folder, family, dtype, tied=tied)


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_source_dtypes_do_not_matter(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Values exact in bf16 give the same file from F32, F16, BF16, F64 and a mixture."""
    import torch

    exact = {name: tensor.bfloat16().float() for name, tensor in tensors_of(folder).items()}
    files = []
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, None):
        choice = {name: kind or (torch.float32 if "norm" in name or "embed" in name else torch.bfloat16) for name in exact}
        replace_tensors(folder, {name: tensor.to(choice[name]) for name, tensor in exact.items()})
        files.append(convert(folder, tmp_path / "m.calm", dtype=dtype).read_bytes())
    assert all(file == files[0] for file in files)


# --- files and the index ---------------------------------------------------------------------------------------------


def test_shards_are_joined_and_stray_files_beside_the_index_ignored(tmp_path: Path) -> None:
    model = tiny_model("llama")
    whole = convert(save(model, tmp_path / "whole"), tmp_path / "whole.calm", dtype="fp16")
    folder = save(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    wrong = {name: tensor * 0 for name, tensor in tensors_of(tmp_path / "whole").items()}
    replace_tensors(tmp_path / "whole", wrong)
    shutil.copy(tmp_path / "whole" / "model.safetensors", folder / "consolidated.safetensors")
    sharded = convert(folder, tmp_path / "sharded.calm", dtype="fp16")
    with open_calm(whole) as one, open_calm(sharded) as other:
        for name, tensor in one.tensors.items():
            if name.startswith("model."):
                np.testing.assert_array_equal(other.tensors[name], tensor, err_msg=name)


def test_the_single_file_wins_over_other_copies(folder: Path, out: Path) -> None:
    before = convert(folder, out, dtype="fp16").read_bytes()
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert convert(folder, out, dtype="fp16").read_bytes() == before


def test_a_tensor_in_two_files_without_an_index_is_named(folder: Path, out: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(TensorError, match=r"a\.safetensors and in b\.safetensors"):
        convert(folder, out)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("gone.safetensors", r"gone\.safetensors cannot be opened"),
        ("../model.safetensors", "outside its own folder"),
        (3, "weight_map"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(folder: Path, out: Path, place: Any, said: str) -> None:
    places: dict[str, Any] = dict.fromkeys(tensors_of(folder), "model.safetensors")
    places["model.norm.weight"] = place
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FormatError, match=said):
        convert(folder, out)


def test_a_tensor_that_its_shard_does_not_hold_is_named(folder: Path, out: Path) -> None:
    places = dict.fromkeys([*tensors_of(folder), "model.extra"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(TensorError, match=r"does not hold tensor model\.extra"):
        convert(folder, out)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_recognised(folder: Path, out: Path, name: str) -> None:
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 12345\n")
    with pytest.raises(FormatError, match=rf"{name}.* Git LFS pointer"):
        convert(folder, out)


def test_pytorch_pickles_are_not_opened(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"only pytorch_model\.bin"):
        convert(folder, out)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, out: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FormatError, match=name.split(".")[1]):
        convert(folder, out)


def test_a_truncated_shard_is_refused(folder: Path, out: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(TensorError, match="truncated"):
        convert(folder, out)


# --- every tensor is accounted for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "stored", "tied"), [(True, True, True), (True, False, True), (False, True, False), (False, False, True)]
)
def test_tied_when_the_flag_says_so_or_no_output_is_stored(
    folder: Path, out: Path, flag: bool, stored: bool, tied: bool
) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=flag)
    if not stored:
        tensors = tensors_of(folder)
        del tensors["lm_head.weight"]
        replace_tensors(folder, tensors)
    with open_calm(convert(folder, out, dtype="fp16")) as file:
        assert file.weights.is_tied == tied


def test_a_missing_tie_flag_follows_the_file(folder: Path, out: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=...)
    with open_calm(convert(folder, out)) as file:
        assert not file.weights.is_tied


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "lm_head.qweight", "model.layers.2.mlp.up_proj.weight", "score"]
)
def test_an_unused_tensor_is_named(folder: Path, out: Path, name: str) -> None:
    import torch

    replace_tensors(folder, tensors_of(folder) | {name: torch.ones(3)})
    with pytest.raises(TensorError, match=name.replace(".", r"\.")):
        convert(folder, out)


def test_stored_rotary_frequencies_are_ignored(folder: Path, out: Path) -> None:
    import torch

    replace_tensors(folder, tensors_of(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    convert(folder, out)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_a_missing_tensor_is_named(folder: Path, out: Path, name: str) -> None:
    tensors = tensors_of(folder)
    del tensors[f"model.layers.1.{name}"]
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=rf"model\.layers\.1\.{name}.*missing"):
        convert(folder, out)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path, out: Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].T
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=r"down_proj\.weight has the shape \[96, 64\].* \[64, 96\]"):
        convert(folder, out)


def test_attention_biases_are_carried_and_change_the_logits(tmp_path: Path) -> None:
    import torch

    model = tiny_model("llama", attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    path = convert(save(model, tmp_path / "hf"), tmp_path / "m.calm", dtype="fp16")
    np.testing.assert_allclose(calm_logits(path), logits(model), atol=TOLERANCE)


def test_a_lone_bias_leaves_the_others_zero(folder: Path, out: Path) -> None:
    import torch

    replace_tensors(folder, tensors_of(folder) | {"model.layers.1.self_attn.v_proj.bias": torch.arange(32.0)})
    with open_calm(convert(folder, out, dtype="fp16")) as file:
        assert file.weights.layers[0].qkv_bias is None
        bias = file.weights.layers[1].qkv_bias
        assert bias is not None
        np.testing.assert_array_equal(bias, np.concatenate([np.zeros(96), np.arange(32.0)]))


@pytest.mark.parametrize("name", ["self_attn.o_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"])
def test_other_biases_are_refused_by_name_unless_they_are_zero(folder: Path, out: Path, name: str) -> None:
    import torch

    full = f"model.layers.1.{name}"
    tensors = tensors_of(folder)
    replace_tensors(folder, tensors | {full: torch.zeros(64)})
    convert(folder, out)
    replace_tensors(folder, tensors | {full: torch.tensor([0.0, 1.0])})
    with pytest.raises(UnsupportedError, match=full.replace(".", r"\.")):
        convert(folder, out)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_bias_the_configuration_promises_must_be_there(tmp_path: Path, family: str) -> None:
    folder = save(tiny_model(family, **({"attention_bias": True} if family == "llama" else {})), tmp_path / "hf")
    tensors = {name: t for name, t in tensors_of(folder).items() if not name.endswith("1.self_attn.q_proj.bias")}
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        convert(folder, tmp_path / "m.calm")


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_named_and_nothing_is_left(folder: Path, out: Path, value: float, dtype: str) -> None:
    tensors = tensors_of(folder)
    tensors["model.layers.1.mlp.gate_proj.weight"][3, 5] = value
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.gate_proj\.weight holds 1 values that are NaN or infinite"):
        convert(folder, out, dtype=dtype)
    assert not list(out.parent.iterdir())


def test_nan_in_a_bias_is_named(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path / "hf")
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.k_proj.bias"][0] = float("nan")
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=r"self_attn\.k_proj\.bias"):
        convert(folder, tmp_path / "m.calm")


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 7e4), ("fp8", 62000.0), ("gf4", -62000.0)])
def test_a_weight_too_large_for_the_storage_type_is_named(folder: Path, out: Path, dtype: str, value: float) -> None:
    tensors = tensors_of(folder)
    tensors["lm_head.weight"][0, 0] = value
    replace_tensors(folder, tensors)
    with pytest.raises(TensorError, match=rf"lm_head\.weight holds the value .*{dtype} cannot store"):
        convert(folder, out, dtype=dtype)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_weights_quantised_already_are_named(folder: Path, out: Path, kind: str) -> None:
    import torch

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tensors_of(folder)
    replace_tensors(folder, tensors | {name: tensors[name].to(getattr(torch, kind))})
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight is stored as"):
        convert(folder, out)


def test_rows_that_gf4_cannot_group_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    folder = save(tiny_model("llama", intermediate_size=100), tmp_path / "hf")
    with pytest.raises(UnsupportedError, match=r"mlp\.w2\.weight.*multiple of 8"):
        convert(folder, tmp_path / "m.calm", dtype="gf4")


# --- configurations --------------------------------------------------------------------------------------------------

OPTIONAL = [
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act", "max_position_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("initializer_range", "model_type", "pretraining_tp", "dtype"),
]


@pytest.mark.parametrize("key", OPTIONAL)
def test_every_optional_key_may_be_missing(folder: Path, out: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: ...})
    with open_calm(convert(folder, out)) as file:
        assert file.config.n_kv_heads == 2


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_required_key_is_named(folder: Path, out: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: ...})
    with pytest.raises(FormatError, match=key):
        convert(folder, out)


def test_an_explicit_null_head_dim_means_the_default(folder: Path, out: Path) -> None:
    edit_json(folder / "config.json", head_dim=None)
    with open_calm(convert(folder, out)) as file:
        assert file.config.head_dim == 16


def test_a_checkpoint_without_architectures_is_known_by_its_type(folder: Path, out: Path) -> None:
    edit_json(folder / "config.json", architectures=...)
    convert(folder, out)


@pytest.mark.parametrize(
    ("eos", "generation", "first", "stops"),
    [
        (2, None, 2, (2,)),
        ([6, 7], None, 6, (6, 7)),
        (6, [6, 7, 9], 6, (6, 7, 9)),
        (None, [8, 9], 8, (8, 9)),
        (None, None, -1, ()),
        ([2, 999], None, 2, (2,)),
        (-1, None, -1, ()),
    ],
)
def test_every_declared_end_is_a_stop_id_and_the_first_is_eos(
    folder: Path, out: Path, eos: Any, generation: Any, first: int, stops: tuple[int, ...]
) -> None:
    edit_json(folder / "config.json", eos_token_id=eos)
    edit_json(folder / "generation_config.json", eos_token_id=generation)
    with open_calm(convert(folder, out)) as file:
        assert (file.config.eos_token_id, file.config.stop_ids) == (first, stops)
        assert file.metadata["eos_token_id"] == str(first)


def test_the_tokenizers_own_end_is_a_stop_id_too(folder: Path, out: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|für you|>"}}))
    with open_calm(convert(folder, out)) as file:
        assert file.config.stop_ids == (2, 11)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
            "longrope",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "su"),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_parameters": None, "rope_scaling": {"factor": 2.0}}, "names no rule"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"rope_parameters": YARN_ROPE | {"truncate": False}}, "truncation"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(folder: Path, out: Path, changes: dict[str, Any], said: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedError, match=said):
        convert(folder, out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "small"},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        {"eos_token_id": "two"},
        {"vocab_size": 41},
        {"max_position_embeddings": 0},
    ],
)
def test_values_that_cannot_be_are_refused(folder: Path, out: Path, changes: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(FormatError):
        convert(folder, out)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff\x00", "[" * 100_000])
def test_a_config_that_is_not_a_json_object_is_refused(folder: Path, out: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        convert(folder, out)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0}},
        {"rope_parameters": None, "rope_theta": 2000.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": None, "rope_theta": 2000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_rope_scaling_is_read_under_each_of_its_names(folder: Path, out: Path, rope: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **rope)
    with open_calm(convert(folder, out)) as file:
        scaling = file.config.rope_scaling
        assert scaling is not None
        assert (scaling.kind, scaling.factor, file.config.rope_theta) == ("linear", 8.0, 2000.0)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_rope_scaling_is_read_as_none(folder: Path, out: Path, rope: Any) -> None:
    edit_json(folder / "config.json", rope_parameters=None, rope_scaling=rope)
    with open_calm(convert(folder, out)) as file:
        assert file.config.rope_scaling is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        LLAMA3_ROPE,
        LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 64},
        YARN_ROPE,
        YARN_ROPE | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
        YARN_ROPE | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    ],
)
def test_rotary_frequencies_equal_transformers(folder: Path, out: Path, rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    edit_json(folder / "config.json", rope_parameters=rope)
    theirs, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig.from_pretrained(folder), "cpu")
    with open_calm(convert(folder, out)) as file:
        ours, factor = file.config.rope_frequencies()
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5)
    assert factor == pytest.approx(attention)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": ...}, 0),  # the default, 4096, is beyond this model's context
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 32768}, 4096),
        ("llama", {"sliding_window": 16}, 0),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 0),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ...}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2, "layer_types": ...}, 0),
    ],
)
def test_sliding_windows_are_those_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any], window: int) -> None:
    folder = save(tiny_model(family), tmp_path / "hf")
    edit_json(folder / "config.json", **changes)
    with open_calm(convert(folder, tmp_path / "m.calm")) as file:
        assert file.config.sliding_window == window


def test_windows_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2"), tmp_path / "hf")
    edit_json(folder / "config.json", sliding_window=16, use_sliding_window=True, max_window_layers=1, layer_types=...)
    with pytest.raises(UnsupportedError, match="full_attention, sliding_attention"):
        convert(folder, tmp_path / "m.calm")


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": YARN_ROPE}, {"architectures": ["MistralForCausalLM"], "sliding_window": 4}]
)
def test_a_plain_file_is_refused_where_it_would_lose_what_the_model_needs(
    folder: Path, out: Path, changes: dict[str, Any]
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedError, match="extras"):
        convert(folder, out, extras=False)


#: Values from the config.json and generation_config.json of released models: (config, generation's eos, what must come out).
KNOWN = {
    "Llama-3.2-1B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "head_dim": 64,
            "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        [128001, 128008, 128009],
        {"arch": "llama", "eos_token_id": 128001, "stop_ids": (128001, 128008, 128009), "head_dim": 64, "n_kv_heads": 8},
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "vocab_size": 32000,
        },
        2,
        {"arch": "mistral", "sliding_window": 4096, "max_seq_len": 32768, "rope_scaling": None},
    ),
    "Mistral-Nemo-Instruct-2407": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 14336, "max_position_embeddings": 1024000,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
        },
        2,
        {"head_dim": 128, "q_dim": 4096, "dim": 5120, "sliding_window": 0},
    ),
    "Qwen2.5-7B-Instruct": (
        {
            "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064,
        },
        [151645, 151643],
        {"bos_token_id": -1, "stop_ids": (151645, 151643), "sliding_window": 0, "head_dim": 128},
    ),
    "Qwen2.5-7B-Instruct with yarn": (
        {
            "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
            "max_position_embeddings": 32768, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rope_theta": 1000000.0, "vocab_size": 152064,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        None,
        {"max_seq_len": 131072},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_released_configurations_are_read(name: str) -> None:
    from calmnb.convert.hf_config import read_config

    config, eos, expected = KNOWN[name]
    found = read_config(config, {"eos_token_id": eos}, {}, Path("config.json"))
    assert {key: getattr(found, key) for key in expected} == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
ROPE_KEYS = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "mscale",
    "beta_fast",
]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_configuration_raises_anything_but_our_own_errors(llama: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "checkpoint"
    if not folder.exists():
        shutil.copytree(llama, folder)
    config = json.loads((llama / "config.json").read_text())
    name = data.draw(st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json", "rope"]))
    if name == "rope":
        kind = data.draw(st.sampled_from(["linear", "llama3", "yarn", "default"]))
        keys = st.dictionaries(st.sampled_from(ROPE_KEYS), st.floats() | st.integers(-3, 99) | JSON, max_size=5)
        config["rope_parameters"] = {"rope_type": kind, "factor": 2.0} | data.draw(keys)
        name = "config.json"
        (folder / name).write_text(json.dumps(config))
    elif name == "config.json":
        key = data.draw(st.sampled_from([*sorted(config), "rope_scaling", "layer_types", "sliding_window"]))
        config["architectures"] = [data.draw(st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM"]))]
        (folder / name).write_text(json.dumps(config | {key: data.draw(JSON)}))
    else:
        keys = ["eos_token_id", "bos_token", "eos_token", "added_tokens_decoder", "chat_template", "add_bos_token"]
        values = data.draw(st.dictionaries(st.sampled_from(keys), JSON | st.dictionaries(st.just("11"), JSON), max_size=3))
        (folder / name).write_text(json.dumps(values))
    with contextlib.suppress(CalmnbError):
        open_calm(convert(folder, tmp_path / "fuzz.calm", dtype="fp8")).close()
    for changed in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (llama / changed).exists():
            shutil.copy(llama / changed, folder / changed)
        else:
            (folder / changed).unlink(missing_ok=True)


# --- tokenizers and templates ----------------------------------------------------------------------------------------


def test_the_tokenizers_own_bytes_are_kept(folder: Path, out: Path) -> None:
    with open_calm(convert(folder, out)) as file:
        assert file.extras["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


def test_merges_may_be_pairs(folder: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"]["merges"] = [merge.split(" ") for merge in spec["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with open_calm(convert(folder, out)) as file:
        assert file.token_scores[[4, 6, 9, 10]].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_added_token_flags_of_tokenizer_config_override_the_file(folder: Path, out: Path) -> None:
    flags = {
        "content": "<|für you|>",
        "rstrip": True,
        "lstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={"11": flags, "12": {"content": "<new>", "special": True}})
    with open_calm(convert(folder, out)) as file:
        added = json.loads(file.extras["tokenizer.json"])["added_tokens"]
        assert [(entry["id"], entry["content"], entry["rstrip"]) for entry in added] == [
            (11, "<|für you|>", True),
            (12, "<new>", False),
        ]
        assert file.token_bytes[12] == b"<new>"


def test_added_tokens_beyond_the_rows_are_taken_out(folder: Path, out: Path) -> None:
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={"40": {"content": "[PAD]", "special": True}})
    with open_calm(convert(folder, out)) as file:
        assert b"[PAD]" not in file.extras["tokenizer.json"]


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"]["vocab"]["d"] = 40
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(FormatError, match=r"id 40.*40 rows"):
        convert(folder, out)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"model": {"type": "Unigram", "vocab": []}}', '{"model": {"type": "BPE", "vocab": {"a": -1}}}', "\x00"],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path, out: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CalmnbError, match=r"tokenizer\.json"):
        convert(folder, out)


def test_byte_fallback_pieces_become_text_and_spaces(folder: Path, out: Path) -> None:
    spec = tiny_tokenizer()
    spec["model"] |= {"byte_fallback": True, "vocab": {"<0x0A>": 0, "▁a": 1, "é": 2}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with open_calm(convert(folder, out)) as file:
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


def test_a_sentencepiece_model_is_imported_with_its_added_tokens(folder: Path, out: Path, sentencepiece: bytes) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece)
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 31, "[PAD]": 40}))
    with open_calm(convert(folder, out)) as file:
        assert file.extras["tokenizer.model"] == sentencepiece
        assert file.token_bytes[:3] == [b"<unk>", b"<s>", b"</s>"]
        assert file.token_bytes[31] == b"<|im_start|>"
        assert b" " in file.token_bytes  # the piece that marks the start of a word


def test_a_damaged_sentencepiece_model_is_refused(folder: Path, out: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\xff\xff not a model")
    with pytest.raises(FormatError, match=r"tokenizer\.model"):
        convert(folder, out)


def test_a_sentencepiece_model_larger_than_the_model_is_refused(tmp_path: Path, sentencepiece: bytes) -> None:
    folder = save(tiny_model("llama", vocab_size=24), tmp_path / "hf")
    (folder / "tokenizer.model").write_bytes(sentencepiece)
    with pytest.raises(FormatError, match=r"30 pieces.*24 rows"):
        convert(folder, tmp_path / "m.calm")


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json"])
def test_a_tokenizer_in_another_format_is_named(folder: Path, out: Path, name: str) -> None:
    (folder / "tokenizer.json").rename(folder / name)
    with pytest.raises(UnsupportedError, match=name):
        convert(folder, out)


def test_a_checkpoint_without_a_tokenizer_converts(folder: Path, out: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with open_calm(convert(folder, out)) as file:
        assert file.token_bytes == []


def test_the_template_is_taken_from_the_tokenizers_configuration(folder: Path, out: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="{{ 'é' }}")
    with open_calm(convert(folder, out)) as file:
        assert file.extras["chat_template"].decode() == "{{ 'é' }}"


def test_of_several_templates_the_default_is_the_template(folder: Path, out: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    edit_json(folder / "tokenizer_config.json", chat_template=listed)
    with open_calm(convert(folder, out)) as file:
        assert (file.extras["chat_template"], file.settings["chat_templates"]) == (b"D", {"tool_use": "T"})


def test_template_files_override_the_configuration(folder: Path, out: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    with open_calm(convert(folder, out)) as file:
        assert (file.extras["chat_template"], file.settings["chat_templates"]) == (b"new", {"rag": "R"})


def test_text_that_is_not_unicode_is_kept_or_refused(folder: Path, out: Path) -> None:
    edit_json(folder / "config.json", _name_or_path="\ud800")
    edit_json(folder / "tokenizer_config.json", bos_token="\ud800")
    with open_calm(convert(folder, out)) as file:
        assert file.settings["special_tokens"] == {"bos_token": "\ud800"}
    edit_json(folder / "tokenizer_config.json", chat_template="\ud800")
    with pytest.raises(FormatError):
        convert(folder, out)


def test_special_tokens_and_bos_rules_are_kept(folder: Path, out: Path) -> None:
    edit_json(folder / "tokenizer_config.json", bos_token="a", eos_token={"content": "b", "lstrip": True}, add_bos_token=True)
    with open_calm(convert(folder, out)) as file:
        assert file.settings["special_tokens"] == {"bos_token": "a", "eos_token": "b"}
        assert file.settings["add_bos_token"] is True


# --- how it is done --------------------------------------------------------------------------------------------------


def big_checkpoint(folder: Path) -> int:
    """A checkpoint of many matrices, written without transformers; returns the bytes of its largest one as float32."""
    import torch

    dim, hidden, layers, vocab = 512, 4096, 4, 4096
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocab, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
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
    replace_tensors(folder, tensors)
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


def test_progress_counts_bytes_up_to_the_total(folder: Path, out: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    path = convert(folder, out, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] < path.stat().st_size
    assert calls[0][2] == "model.embed.weight"


def test_a_full_disk_leaves_nothing_behind(folder: Path, out: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CalmnbError, match=r"cannot write .*model\.calm"):
            convert(folder, out, dtype="fp16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.parent.iterdir())


def test_converting_twice_gives_the_same_bytes(folder: Path, out: Path) -> None:
    assert convert(folder, out).read_bytes() == convert(folder, out).read_bytes()


def test_weights_decode_to_the_source(folder: Path, out: Path) -> None:
    source = tensors_of(folder)["model.layers.1.mlp.down_proj.weight"].numpy()
    with open_calm(convert(folder, out, dtype="fp16")) as file:
        np.testing.assert_array_equal(decode(file.weights.layers[1].w2, "fp16"), source)


def test_a_folder_as_output_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        convert(folder, tmp_path)


def test_an_unknown_dtype_is_refused(folder: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match="int4"):
        convert(folder, out, dtype="int4")


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
