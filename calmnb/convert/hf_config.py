"""Hugging Face configurations in calmnb's terms: the only place that knows those names and their defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calmnb.config import ModelConfig, RopeScaling
from calmnb.errors import ConfigError, FormatError, UnsupportedError
from calmnb.metadata import check_scaling

__all__ = ["ARCHITECTURES", "architecture_of", "read_config"]

#: Class name -> family.
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}

#: What transformers assumes for keys that a config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "sliding_window": 4096},
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",  # calm computes the tanh form for it; the exact one differs by less than 5e-4
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}


def architecture_of(config: Mapping[str, Any], path: Path) -> str:
    """Family of a checkpoint: "llama", "mistral" or "qwen2".

    Raises
    ------
    UnsupportedError
        If it is another one, or the weights are quantised already.
    """
    classes = config.get("architectures")
    if isinstance(classes, list) and classes:
        name, family = classes[0], ARCHITECTURES.get(str(classes[0]))
    else:
        name = config.get("model_type")
        family = name if isinstance(name, str) and name in _DEFAULTS else None
    if family is None:
        raise UnsupportedError(f"{path}: the architecture is {name!r}; this version converts {', '.join(ARCHITECTURES)}")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UnsupportedError(
            f"{path}: the weights are quantised already (method {method}); this version converts F32, F16 and BF16 weights, "
            "so give it the original checkpoint or a GGUF file"
        )
    return family


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    *,
    more_stop_ids: Iterable[int] = (),
) -> ModelConfig:
    """Build the model's configuration.

    Parameters
    ----------
    config
        Contents of config.json.
    generation
        Contents of generation_config.json, empty when there is none.
    shapes
        Of the tensors: they tell the number of key-value heads where the configuration does not.
    path
        Of config.json, for messages.
    more_stop_ids
        Ids that end a turn by the tokenizer's account.

    Raises
    ------
    FormatError
        If a value is missing or cannot be.
    UnsupportedError
        If the configuration asks for what this version cannot run.
    """
    family = architecture_of(config, path)
    defaults = _DEFAULTS[family]

    def integer(key: str, default: Any = None) -> Any:
        value = config.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"{path}: the key {key} is missing; a {family} model needs it")
        if type(value) is not int:
            raise FormatError(f"{path}: the key {key} is {value!r}; it must be a whole number")
        return value

    dim, n_heads = integer("hidden_size"), integer("num_attention_heads")
    if n_heads < 1:
        raise FormatError(f"{path}: num_attention_heads is {n_heads}; it must be positive")
    head_dim = integer("head_dim", dim // n_heads)
    first_key = shapes.get("model.layers.0.self_attn.k_proj.weight", ())
    kv_default = first_key[0] // head_dim if first_key and head_dim > 0 else n_heads
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{path}: hidden_act is {activation!r}; accepted are {', '.join(_ACTIVATIONS)}")
    rope = _rope_parameters(config, path)
    max_seq_len = integer("max_position_embeddings", defaults["max_position_embeddings"])
    n_layers = integer("num_hidden_layers")
    eos = _ids(config.get("eos_token_id", defaults["eos_token_id"]), "eos_token_id", path)
    vocab_size = integer("vocab_size")
    stops = [*eos, *_ids(generation.get("eos_token_id"), "eos_token_id of generation_config.json", path), *more_stop_ids]
    stop_ids = tuple(index for index in dict.fromkeys(stops) if index < vocab_size)
    bos = _ids(config.get("bos_token_id", defaults["bos_token_id"]), "bos_token_id", path)
    window = _sliding_window(config, defaults, n_layers, path)
    scaling = _rope_scaling(rope, max_seq_len, path)
    if scaling is not None and scaling.kind == "yarn":
        max_seq_len = max(max_seq_len, int(scaling.original_max_seq_len * scaling.factor))
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    try:
        return ModelConfig(
            arch=family,
            dtype="fp16",
            dim=dim,
            hidden_dim=integer("intermediate_size"),
            head_dim=head_dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=integer("num_key_value_heads", kv_default),
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            bos_token_id=bos[0] if bos and family != "qwen2" else -1,
            eos_token_id=eos[0] if eos else stop_ids[0] if stop_ids else -1,
            rope_theta=_real(rope.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", path),
            rotary_dim=int(head_dim * _real(factor, "partial_rotary_factor", path)),
            norm_eps=_real(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
            act_type="gelu" if _ACTIVATIONS[activation] == "gelu" else "silu",
            rope_scaling=scaling,
            sliding_window=window if window < max_seq_len else 0,
            stop_ids=stop_ids,
        )
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error


def _real(value: Any, key: str, path: Path) -> Any:
    """Check a number and return it as it is: calm's metadata spell an int and a float differently."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"{path}: the key {key} is {value!r}; it must be a number")
    return value


def _ids(value: Any, key: str, path: Path) -> list[int]:
    """Token ids from an id, a list of ids, or null; negative ones mean none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int for index in listed):
        raise FormatError(f"{path}: {key} is {value!r}; it must be a token id, a list of them, or null")
    return [index for index in listed if index >= 0]


def _sliding_window(config: Mapping[str, Any], defaults: Mapping[str, Any], n_layers: int, path: Path) -> int:
    """Width of the attention window that all layers share; 0 for none."""
    window = config.get("sliding_window", defaults["sliding_window"])
    family = architecture_of(config, path)
    listed = config.get("layer_types")
    kinds = set(map(str, listed)) if isinstance(listed, list) else {"sliding_attention"}
    if window is None or family == "llama":
        return 0
    if family == "qwen2":
        if not config.get("use_sliding_window", False):
            return 0
        if not isinstance(listed, list):
            full = _real(config.get("max_window_layers", 28), "max_window_layers", path)
            kinds = {"full_attention"} if full >= n_layers else {"sliding_attention"}
            kinds |= {"full_attention"} if full > 0 else set()
    if type(window) is not int or window < 1:
        raise FormatError(f"{path}: sliding_window is {window!r}; it must be a positive whole number or null")
    if kinds == {"full_attention"}:
        return 0
    if kinds != {"sliding_attention"}:
        raise UnsupportedError(
            f"{path}: the layers differ in attention ({', '.join(sorted(kinds))}); "
            "this version runs models whose layers all have the same window, or none"
        )
    return window


def _rope_parameters(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """``rope_parameters`` of newer files or ``rope_scaling`` of older ones; empty when there is neither."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedError(f"{path}: rope scaling is {found!r}; an object with a rope_type is accepted")
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedError(f"{path}: rope_parameters differ from layer to layer; this version needs them to be the same")
    return found


def _rope_scaling(rope: Mapping[str, Any], max_seq_len: int, path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        if "factor" in rope:
            raise UnsupportedError(f"{path}: rope scaling {dict(rope)} has a factor but names no rule; accepted: {_ACCEPTED}")
        return None

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"{path}: rope scaling {kind!r} needs the key {key}")
        return float(_real(value, key, path))

    if kind == "linear":
        scaling = RopeScaling("linear", factor=number("factor"))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=number("factor"),
            original_max_seq_len=int(number("original_max_position_embeddings")),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    elif kind == "yarn":
        if rope.get("truncate") is False:
            raise UnsupportedError(f"{path}: yarn rope scaling without truncation is not known to this version")
        scaling = _read_yarn(number, rope, max_seq_len)
    else:
        raise UnsupportedError(f"{path}: rope scaling {kind!r} is not known to this version; accepted: {_ACCEPTED}")
    return check_scaling(scaling, path)


_ACCEPTED = "default, linear, llama3 and yarn"


def _read_yarn(number: Any, rope: Mapping[str, Any], max_seq_len: int) -> RopeScaling:
    original = int(number("original_max_position_embeddings", max_seq_len))
    factor = number("factor", max_seq_len / original)
    attention = rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim") and factor > 1:
        # DeepSeek's rule: a ratio of two attention scales.
        attention = (0.1 * number("mscale") * math.log(factor) + 1) / (0.1 * number("mscale_all_dim") * math.log(factor) + 1)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_seq_len=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if attention is None else float(attention),
    )
