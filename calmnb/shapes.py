"""Sizes of well-known models, for predictions and for benchmarks with random weights: no checkpoint needed."""

from __future__ import annotations

from typing import Any

from calmnb.config import ModelConfig, WeightDtype
from calmnb.errors import ConfigError

__all__ = ["SHAPES", "shape_config"]

#: Sizes as published in each model's configuration.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "dim": 576, "hidden_dim": 1536, "head_dim": 64, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3,
        "vocab_size": 49152, "max_seq_len": 8192, "rope_theta": 100000.0,
    },
    "llama-3.2-1b": {
        "dim": 2048, "hidden_dim": 8192, "head_dim": 64, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8,
        "vocab_size": 128256, "max_seq_len": 131072, "rope_theta": 500000.0,
    },
    "llama-3-8b": {
        "dim": 4096, "hidden_dim": 14336, "head_dim": 128, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8,
        "vocab_size": 128256, "max_seq_len": 8192, "rope_theta": 500000.0,
    },
    "mistral-7b": {
        "dim": 4096, "hidden_dim": 14336, "head_dim": 128, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8,
        "vocab_size": 32000, "max_seq_len": 32768, "rope_theta": 1000000.0,
    },
    "llama-2-7b": {
        "dim": 4096, "hidden_dim": 11008, "head_dim": 128, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
        "vocab_size": 32000, "max_seq_len": 4096,
    },
    "mixtral-8x7b": {
        "dim": 4096, "hidden_dim": 14336, "head_dim": 128, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8,
        "vocab_size": 32000, "max_seq_len": 32768, "rope_theta": 1000000.0, "n_experts": 8, "n_experts_active": 2,
    },
}  # fmt: skip

#: Shapes whose output matrix is the embedding.
TIED = frozenset({"smollm2-135m", "llama-3.2-1b"})


def shape_config(name: str, dtype: WeightDtype = "fp16") -> ModelConfig:
    """Configuration of the shape `name` with weights stored as `dtype`.

    Parameters
    ----------
    name
        A key of `SHAPES`, such as "mistral-7b".
    dtype : {"fp16", "fp8", "gf4"}
        Storage of the matrices.

    Raises
    ------
    ConfigError
        For a name that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; known are {', '.join(SHAPES)}")
    sizes = SHAPES[name]
    return ModelConfig(arch="llama", dtype=dtype, rotary_dim=sizes["head_dim"], **sizes)
