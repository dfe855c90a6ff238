"""GGUF checkpoints: their keys and tensor names, in calmnb's terms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calmnb.config import ModelConfig, RopeScaling
from calmnb.convert.gguf_file import GgufFile
from calmnb.convert.gguf_tokenizer import bos_and_eos, import_tokenizer, stop_ids, tokenizer_settings
from calmnb.convert.source import Source, plan_llama
from calmnb.errors import CalmnbError, ConfigError, FormatError, TensorError, UnsupportedError
from calmnb.metadata import check_scaling

__all__ = ["read_gguf"]

_ARCHITECTURES = ("llama", "mistral", "qwen2")
_TOP = {
    "model.embed.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.output.weight": "output.weight",
}
_IN_LAYER = {
    "attn.norm": "attn_norm",
    "attn.wq": "attn_q",
    "attn.wk": "attn_k",
    "attn.wv": "attn_v",
    "attn.wo": "attn_output",
    "mlp.norm": "ffn_norm",
    "mlp.w1": "ffn_gate",
    "mlp.w2": "ffn_down",
    "mlp.w3": "ffn_up",
}
_ROPE_FREQS = "rope_freqs.weight"


def read_gguf(path: Path) -> Source:
    """Open a GGUF checkpoint of the Llama, Mistral or Qwen2 family.

    Raises
    ------
    FormatError, TensorError
        If the file is damaged or incomplete.
    UnsupportedError
        If the architecture, the rope scaling or the tokenizer is not known.
    """
    file = GgufFile(path)
    try:
        return _read(file, path)
    except BaseException as error:
        file.close()
        if isinstance(error, TypeError | ValueError | AttributeError | ArithmeticError) and not isinstance(error, CalmnbError):
            # A value of another type than its key promises: a list of strings for numbers, a string for a number.
            raise FormatError(f"{path}: the metadata hold a value of the wrong type ({error}); the file is damaged") from error
        raise


def _read(file: GgufFile, path: Path) -> Source:
    metadata = file.metadata
    config = _read_config(file, path)
    recipes = plan_llama(
        config,
        file,
        _source_name,
        path=path,
        tied=None,
        # llama.cpp's converter reorders q and k of Llama and Mistral into interleaved pairs already; of Qwen2 it does not.
        half_split=config.arch == "qwen2",
        needs_bias=config.arch == "qwen2",
        is_ignored=lambda name: name == _ROPE_FREQS or name.endswith(("attn_rot_embd.weight", "rope_freqs.weight")),
    )
    vocabulary = import_tokenizer(metadata, config.vocab_size, path)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        vocabulary.extras["chat_template"] = template.encode("utf-8")
    settings = tokenizer_settings(metadata)
    settings["source"] = {"format": "gguf", "file": path.name}
    for key in ("name", "license", "file_type"):
        value = metadata.get(f"general.{key}")
        if isinstance(value, str | int):
            settings["source"][key] = value
    return Source(path, config, file, recipes, vocabulary, settings)


def _source_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"


def _read_config(file: GgufFile, path: Path) -> ModelConfig:
    metadata = file.metadata
    family = metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        raise UnsupportedError(f"{path}: the architecture is {family!r}; this version converts {', '.join(_ARCHITECTURES)}")
    if isinstance(metadata.get("split.count"), int) and metadata["split.count"] > 1:
        raise UnsupportedError(
            f"{path} is one of {metadata['split.count']} parts; join them first: "
            f"llama-gguf-split --merge {path.name} model.gguf"
        )

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise FormatError(f"{path}: metadata key {family}.{key} is missing; a {family} model needs it")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedError(f"{path}: metadata key {family}.{key} is {str(value)[:60]}; a single number is accepted")
        return value

    if number("expert_count", 0):
        raise UnsupportedError(f"{path} is a mixture of {number('expert_count')} experts; this version converts dense models")
    dim, n_heads = number("embedding_length"), number("attention.head_count")
    if not isinstance(n_heads, int) or n_heads < 1:
        raise FormatError(f"{path}: {family}.attention.head_count is {n_heads}; it must be a positive integer")
    head_dim = number("attention.key_length", dim // n_heads)
    if number("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            f"{path}: keys have {head_dim} channels and values another number; this version needs them equal"
        )
    embedding = file.shapes.get("token_embd.weight")
    if embedding is None:
        raise TensorError(f"{path}: tensor token_embd.weight is missing; a {family} model needs it")
    bos, eos = bos_and_eos(metadata)
    max_seq_len = number("context_length", 4096)
    window = number("attention.sliding_window", 0)
    rotary_dim = number("rope.dimension_count", head_dim)
    stops = stop_ids(metadata)
    theta, eps = number("rope.freq_base", 10000.0), number("attention.layer_norm_rms_epsilon")
    try:
        config = ModelConfig(
            arch=str(family),
            dtype="fp16",
            dim=dim,
            hidden_dim=number("feed_forward_length"),
            head_dim=head_dim,
            n_layers=number("block_count"),
            n_heads=n_heads,
            n_kv_heads=number("attention.head_count_kv", n_heads),
            vocab_size=embedding[0],
            max_seq_len=max_seq_len,
            bos_token_id=-1 if family == "qwen2" else bos,
            eos_token_id=eos if eos >= 0 or not stops else stops[0],
            rope_theta=_shortest(theta),
            rotary_dim=rotary_dim,
            norm_eps=_shortest(eps),
            sliding_window=window if window < max_seq_len else 0,
            stop_ids=stops,
        )
    except (ConfigError, TypeError) as error:
        raise FormatError(f"{path}: {error}") from error
    scaling = _read_scaling(metadata, str(family), config, file, path)
    try:
        return config if scaling is None else config.replace(rope_scaling=check_scaling(scaling, path))
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error


def _shortest(value: float) -> float:
    """The float64 that a float32 was written for: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _read_scaling(
    metadata: Mapping[str, Any], family: str, config: ModelConfig, file: GgufFile, path: Path
) -> RopeScaling | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = metadata.get(f"{family}.rope.scaling.factor", metadata.get(f"{family}.rope.scale_linear", 1.0))
    original = metadata.get(f"{family}.rope.scaling.original_context_length", 0)
    if f"{family}.rope.scale_linear" in metadata and kind == "none" and factor not in (0.0, 1.0):
        kind = "linear"
    if kind == "linear":
        return RopeScaling("linear", factor=_shortest(factor)) if factor not in (0.0, 1.0) else None
    if kind == "yarn":
        if not factor > 0:
            raise FormatError(f"{path}: yarn rope scaling has the factor {factor}; it must be positive")
        if (
            metadata.get(f"{family}.rope.scaling.yarn_log_mul")
            or metadata.get(f"{family}.rope.scaling.yarn_ext_factor", 1.0) != 1.0
        ):
            raise UnsupportedError(f"{path}: this variant of yarn rope scaling (yarn_log_mul, yarn_ext_factor) is not known")
        # llama.cpp multiplies cos and sin by attn_factor * (0.1 ln(factor) + 1).
        attention = metadata.get(f"{family}.rope.scaling.attn_factor", 1.0)
        return RopeScaling(
            "yarn",
            factor=_shortest(factor),
            original_max_seq_len=int(original) or config.max_seq_len,
            beta_fast=float(metadata.get(f"{family}.rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(metadata.get(f"{family}.rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=None if attention == 1.0 else float(attention * (0.1 * np.log(factor) + 1.0)),
        )
    if kind != "none":
        raise UnsupportedError(f"{path}: rope scaling {kind!r} is not known; accepted are none, linear, yarn and Llama 3's")
    return _recognise_llama3(config, file, path)


def _recognise_llama3(config: ModelConfig, file: GgufFile, path: Path) -> RopeScaling | None:
    """Llama 3's scaling, which GGUF stores as one divisor per rotary frequency, back as the rule it was computed by."""
    if _ROPE_FREQS not in file.shapes:
        return None
    divisors = np.concatenate([block.reshape(-1) for block in file.rows(_ROPE_FREQS, 1)]).astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    for original in (8192, 16384, 4096, 32768) if len(divisors) == config.rotary_dim // 2 and divisors.min() > 0 else ():
        plain, _ = config.rope_frequencies()
        scaling = RopeScaling("llama3", factor=_shortest(divisors.max()), original_max_seq_len=original)
        scaled, _ = config.replace(rope_scaling=scaling).rope_frequencies()
        if np.allclose(plain / divisors, scaled, rtol=1e-4):
            return scaling
    raise UnsupportedError(
        f"{path}: tensor {_ROPE_FREQS} scales the rotary frequencies by a rule that this version does not recognise; "
        "Llama 3's, with an original context of 4096 to 32768, is accepted"
    )
