"""The metadata of a `.calm` file and the settings beside them, to a `ModelConfig` and back.

calm stores every value as a string, as Python's ``str`` spells it, and reads it with C's ``atoi`` and ``atof``, which take
anything for a number. What its format has no key for is in the extra ``calmnb.json`` (see `checkpoint`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calmnb.config import ModelConfig, RopeScaling
from calmnb.errors import ConfigError, FormatError, UnsupportedError

__all__ = ["calm_metadata", "check_scaling", "read_config", "read_settings"]


def calm_metadata(config: ModelConfig) -> dict[str, str]:
    """The metadata of `config` in file order; every value a string, as calm expects."""
    values: dict[str, object] = {
        "arch": config.arch,
        "dtype": config.dtype,
        "dim": config.dim,
        "hidden_dim": config.hidden_dim,
        "head_dim": config.head_dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "rope_theta": config.rope_theta,
        "rotary_dim": config.rotary_dim,
    }
    if config.is_moe:
        values |= {"n_experts": config.n_experts, "n_experts_active": config.n_experts_active}
    values |= {"norm_eps": config.norm_eps, "norm_type": config.norm_type, "act_type": config.act_type}
    if math.isfinite(config.qkv_clip):
        values["qkv_clip"] = config.qkv_clip
    return {key: str(value) for key, value in values.items()}


def read_settings(extras: Mapping[str, bytes], path: Path) -> dict[str, Any]:
    """Contents of ``calmnb.json``; empty for files that calm wrote.

    Raises
    ------
    FormatError
        If it is not a JSON object.
    """
    if "calmnb.json" not in extras:
        return {}
    try:
        settings = json.loads(extras["calmnb.json"].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: extra.calmnb.json is not valid JSON ({error}); convert the model again") from error
    if not isinstance(settings, dict):
        raise FormatError(f"{path}: extra.calmnb.json is a JSON {type(settings).__name__}; it must be an object")
    return settings


def read_config(metadata: Mapping[str, str], settings: Mapping[str, Any], path: Path) -> ModelConfig:
    """Build a configuration from a file's metadata and settings.

    Parameters
    ----------
    metadata
        The file's, all strings.
    settings
        What `read_settings` returned: stop ids, rope scaling, sliding window.
    path
        For messages.

    Raises
    ------
    FormatError
        If a key is missing, or its value is not what it should be.
    UnsupportedError
        If a value asks for something this version cannot run.
    """

    def text(key: str, default: str | None = None) -> str:
        value = metadata.get(key, default)
        if value is None:
            raise FormatError(f"{path}: metadata key {key} is missing; a .calm file needs it")
        return value

    def number(key: str, default: str | None = None) -> int:
        value = text(key, default)
        try:
            return int(value)
        except ValueError:
            raise FormatError(f"{path}: metadata key {key} is {value[:40]!r}; it must be a whole number") from None

    def real(key: str, default: str | None = None) -> float:
        value = text(key, default)
        try:
            return float(value)
        except ValueError:
            raise FormatError(f"{path}: metadata key {key} is {value[:40]!r}; it must be a number") from None

    def choice(key: str, default: str, accepted: tuple[str, ...]) -> Any:
        value = text(key, default)
        if value not in accepted:
            raise UnsupportedError(f"{path}: metadata key {key} is {value[:40]!r}; accepted are {', '.join(accepted)}")
        return value

    def ids(key: str) -> tuple[int, ...]:
        """An id, or, in files calm made from newer checkpoints, Python's spelling of None or of a list of ids."""
        value = text(key)
        if value == "None":
            return ()
        try:
            found = json.loads(value)
            listed = found if isinstance(found, list) else [found]
            if not all(type(n) is int for n in listed):
                raise ValueError(value)
        except (ValueError, RecursionError):
            raise FormatError(f"{path}: metadata key {key} is {value[:40]!r}; it must be a token id, or -1 for none") from None
        return tuple(n for n in listed if n >= 0)

    eos, bos = ids("eos_token_id"), ids("bos_token_id")
    stop_ids = _integers(settings.get("stop_ids", eos), "stop_ids", path)
    n_experts = number("n_experts", "0")
    try:
        return ModelConfig(
            arch=text("arch", "unknown"),
            dtype=choice("dtype", "", ("fp16", "fp8", "gf4")),
            dim=number("dim"),
            hidden_dim=number("hidden_dim"),
            head_dim=number("head_dim"),
            n_layers=number("n_layers"),
            n_heads=number("n_heads"),
            n_kv_heads=number("n_kv_heads"),
            vocab_size=number("vocab_size"),
            max_seq_len=number("max_seq_len", "4096"),
            bos_token_id=bos[0] if bos else -1,
            eos_token_id=eos[0] if eos else -1,
            rope_theta=real("rope_theta"),
            rotary_dim=number("rotary_dim"),
            norm_eps=real("norm_eps", "1e-5"),
            norm_type=choice("norm_type", "rmsnorm", ("rmsnorm", "layernorm", "layernorm_par")),
            act_type=choice("act_type", "silu", ("silu", "gelu")),
            qkv_clip=real("qkv_clip", "inf"),
            n_experts=n_experts,
            n_experts_active=number("n_experts_active") if n_experts else 0,
            rope_scaling=_read_scaling(settings.get("rope_scaling"), path),
            sliding_window=_integers([settings.get("sliding_window") or 0], "sliding_window", path)[0],
            stop_ids=stop_ids,
        )
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error


def _integers(value: Any, key: str, path: Path) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise FormatError(f"{path}: {key} of extra.calmnb.json is {str(value)[:80]!r}; accepted are non-negative integers")
    return tuple(value)


def _read_scaling(value: Any, path: Path) -> RopeScaling | None:
    if value is None:
        return None
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    if not isinstance(value, dict) or set(value) - known or value.get("kind") not in ("linear", "llama3", "yarn"):
        raise UnsupportedError(
            f"{path}: rope scaling {str(value)[:120]!r} is unknown to this version; accepted kinds are linear, llama3 and yarn"
        )
    numbers = [number for key, number in value.items() if key != "kind" and number is not None]
    if "factor" not in value or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise FormatError(f"{path}: rope scaling {str(value)[:120]!r} needs a factor, and numbers for all its values")
    return check_scaling(RopeScaling(**value), path)


def check_scaling(scaling: RopeScaling, path: Path) -> RopeScaling:
    """Hold the numbers of a rope scaling against the formulas they go into, and return it.

    Raises
    ------
    FormatError
        If a number is not finite and positive, or llama3's band is empty.
    """
    numbers = dataclasses.asdict(scaling) | {"kind": None}
    wrong = {key: n for key, n in numbers.items() if n is not None and not 0 < n < math.inf}
    if scaling.original_max_seq_len == 0 and scaling.kind != "llama3":
        wrong.pop("original_max_seq_len")
    if wrong:
        raise FormatError(f"{path}: rope scaling {scaling.kind} has {wrong}; these must be positive numbers")
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise FormatError(
            f"{path}: rope scaling llama3 has high_freq_factor {scaling.high_freq_factor} and low_freq_factor "
            f"{scaling.low_freq_factor}; the former must be larger"
        )
    return scaling
