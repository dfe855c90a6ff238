"""Hugging Face configurations: released ones are read, odd ones refused by name, random ones never crash."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.errors import CalmnbError, FormatError, UnsupportedError
from tests.hf_models import LLAMA3_ROPE, YARN_ROPE, edit_json, save, tiny_model

OPTIONAL = [
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act", "max_position_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("initializer_range", "model_type", "pretraining_tp", "dtype"),
]


@pytest.mark.parametrize("key", OPTIONAL)
def test_every_optional_key_may_be_missing(checkpoint: Path, out: Path, key: str) -> None:
    edit_json(checkpoint / "config.json", **{key: ...})
    with open_calm(convert(checkpoint, out)) as file:
        assert file.config.n_kv_heads == 2


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_required_key_is_named(checkpoint: Path, out: Path, key: str) -> None:
    edit_json(checkpoint / "config.json", **{key: ...})
    with pytest.raises(FormatError, match=key):
        convert(checkpoint, out)


def test_an_explicit_null_head_dim_means_the_default(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "config.json", head_dim=None)
    with open_calm(convert(checkpoint, out)) as file:
        assert file.config.head_dim == 16


def test_a_checkpoint_without_architectures_is_known_by_its_type(checkpoint: Path, out: Path) -> None:
    edit_json(checkpoint / "config.json", architectures=...)
    convert(checkpoint, out)


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
    checkpoint: Path, out: Path, eos: Any, generation: Any, first: int, stops: tuple[int, ...]
) -> None:
    edit_json(checkpoint / "config.json", eos_token_id=eos)
    edit_json(checkpoint / "generation_config.json", eos_token_id=generation)
    with open_calm(convert(checkpoint, out)) as file:
        assert (file.config.eos_token_id, file.config.stop_ids) == (first, stops)
        assert file.metadata["eos_token_id"] == str(first)


def test_the_tokenizers_own_end_is_a_stop_id_too(checkpoint: Path, out: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|für you|>"}}))
    with open_calm(convert(checkpoint, out)) as file:
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
def test_what_cannot_be_run_is_refused_by_name(checkpoint: Path, out: Path, changes: dict[str, Any], said: str) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(UnsupportedError, match=said):
        convert(checkpoint, out)
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
        {"rope_parameters": YARN_ROPE | {"rope_theta": 1.0}},
        {"rope_parameters": YARN_ROPE | {"beta_fast": 5e-324}},
        {"rope_parameters": YARN_ROPE | {"beta_slow": 1e308}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
        {"max_position_embeddings": 10**23},
        {"eos_token_id": "two"},
        {"vocab_size": 41},
        {"max_position_embeddings": 0},
    ],
)
def test_values_that_cannot_be_are_refused(checkpoint: Path, out: Path, changes: dict[str, Any]) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(FormatError):
        convert(checkpoint, out)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff\x00", "[" * 100_000])
def test_a_config_that_is_not_a_json_object_is_refused(checkpoint: Path, out: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        convert(checkpoint, out)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0}},
        {"rope_parameters": None, "rope_theta": 2000.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": None, "rope_theta": 2000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_rope_scaling_is_read_under_each_of_its_names(checkpoint: Path, out: Path, rope: dict[str, Any]) -> None:
    edit_json(checkpoint / "config.json", **rope)
    with open_calm(convert(checkpoint, out)) as file:
        scaling = file.config.rope_scaling
        assert scaling is not None
        assert (scaling.kind, scaling.factor, file.config.rope_theta) == ("linear", 8.0, 2000.0)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_rope_scaling_is_read_as_none(checkpoint: Path, out: Path, rope: Any) -> None:
    edit_json(checkpoint / "config.json", rope_parameters=None, rope_scaling=rope)
    with open_calm(convert(checkpoint, out)) as file:
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
def test_rotary_frequencies_equal_transformers(checkpoint: Path, out: Path, rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    edit_json(checkpoint / "config.json", rope_parameters=rope)
    theirs, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig.from_pretrained(checkpoint), "cpu")
    with open_calm(convert(checkpoint, out)) as file:
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
    checkpoint = save(tiny_model(family), tmp_path / "hf")
    edit_json(checkpoint / "config.json", **changes)
    with open_calm(convert(checkpoint, tmp_path / "m.calm")) as file:
        assert file.config.sliding_window == window


def test_windows_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    checkpoint = save(tiny_model("qwen2"), tmp_path / "hf")
    edit_json(checkpoint / "config.json", sliding_window=16, use_sliding_window=True, max_window_layers=1, layer_types=...)
    with pytest.raises(UnsupportedError, match="full_attention, sliding_attention"):
        convert(checkpoint, tmp_path / "m.calm")


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": YARN_ROPE}, {"architectures": ["MistralForCausalLM"], "sliding_window": 4}]
)
def test_a_plain_file_is_refused_where_it_would_lose_what_the_model_needs(
    checkpoint: Path, out: Path, changes: dict[str, Any]
) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(UnsupportedError, match="extras"):
        convert(checkpoint, out, extras=False)


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
def test_no_configuration_raises_anything_but_our_own_errors(
    llama_checkpoint: Path, tmp_path: Path, data: st.DataObject
) -> None:
    checkpoint = tmp_path / "checkpoint"
    if not checkpoint.exists():
        shutil.copytree(llama_checkpoint, checkpoint)
    config = json.loads((llama_checkpoint / "config.json").read_text())
    name = data.draw(st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json", "rope"]))
    if name == "rope":
        kind = data.draw(st.sampled_from(["linear", "llama3", "yarn", "default"]))
        keys = st.dictionaries(st.sampled_from(ROPE_KEYS), st.floats() | st.integers(-3, 99) | JSON, max_size=5)
        config["rope_parameters"] = {"rope_type": kind, "factor": 2.0} | data.draw(keys)
        name = "config.json"
        (checkpoint / name).write_text(json.dumps(config))
    elif name == "config.json":
        key = data.draw(st.sampled_from([*sorted(config), "rope_scaling", "layer_types", "sliding_window"]))
        config["architectures"] = [data.draw(st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM"]))]
        (checkpoint / name).write_text(json.dumps(config | {key: data.draw(JSON)}))
    else:
        keys = ["eos_token_id", "bos_token", "eos_token", "added_tokens_decoder", "chat_template", "add_bos_token"]
        values = data.draw(st.dictionaries(st.sampled_from(keys), JSON | st.dictionaries(st.just("11"), JSON), max_size=3))
        (checkpoint / name).write_text(json.dumps(values))
    with contextlib.suppress(CalmnbError):
        open_calm(convert(checkpoint, tmp_path / "fuzz.calm", dtype="fp8")).close()
    for changed in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (llama_checkpoint / changed).exists():
            shutil.copy(llama_checkpoint / changed, checkpoint / changed)
        else:
            (checkpoint / changed).unlink(missing_ok=True)
