"""What a `.calm` file holds, as plain facts: for `calmnb info`, for widgets, for scripts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calmnb.checkpoint import CalmFile, open_calm, weight_layout
from calmnb.config import DTYPE_BITS, KV_DTYPES, ModelConfig

__all__ = ["FileInfo", "WeightTotals", "file_info", "weight_totals"]


class WeightTotals(NamedTuple):
    """Size of a model: logical weights, stored bytes, and the bytes read to decode one token."""

    params: int
    nbytes: int
    bytes_per_token: int


def weight_totals(config: ModelConfig, *, tied: bool = False, qkv_bias: bool = False) -> WeightTotals:
    """Count a model's weights as calm counts them, from its configuration alone.

    Parameters
    ----------
    config
        Sizes and storage type.
    tied
        Whether the output matrix is the embedding.
    qkv_bias
        Whether the attention projections have biases.

    Returns
    -------
    WeightTotals
        Norms and biases are counted at 32 bits. One token reads everything but the embedding (unless it is the output
        matrix as well), and of the experts' matrices only its share.
    """
    bits = DTYPE_BITS[config.dtype]
    sizes = {
        slot.name: math.prod(slot.shape) * (bits if slot.quantised else 32) // 8
        for slot in weight_layout(config, qkv_bias=qkv_bias, tied=tied)
    }
    params = sum(math.prod(slot.shape) for slot in weight_layout(config, qkv_bias=qkv_bias, tied=tied))
    return WeightTotals(params, sum(sizes.values()), _bytes_per_token(sizes, config, tied))


def _bytes_per_token(sizes: Mapping[str, int], config: ModelConfig, tied: bool) -> int:
    total = sum(sizes.values()) - (0 if tied else sizes["model.embed.weight"])
    if config.is_moe:
        experts = sum(size for name, size in sizes.items() if ".mlp.w" in name)
        total += experts // config.n_experts * config.n_experts_active - experts
    return total


@dataclass(frozen=True)
class FileInfo:
    """Facts about a `.calm` file.

    Attributes
    ----------
    path : Path
    file_bytes : int
        Size of the whole file.
    config : ModelConfig
    params : int
        Logical number of weights.
    model_bytes : int
        Stored bytes of all weights.
    bits_per_weight : float
        Norms and biases included.
    bytes_per_token : int
        Weight bytes read to decode one token.
    kv_bytes_per_token : dict of int
        Bytes one position adds to the KV cache, by cache dtype.
    is_tied, has_bias : bool
        Whether the output matrix is the embedding; whether attention projections have biases.
    tokenizer : str
        "tokenizer.json", "tokenizer.model", "calm" (byte strings and scores) or "none".
    tokenizer_size : int
        Number of tokens that are not empty.
    stop_tokens : dict of str
        Text of each id that ends a turn.
    extras : dict of int
        Bytes of each extra, by name.
    source : dict
        Where the file was converted from, as its converter noted.
    """

    path: Path
    file_bytes: int
    config: ModelConfig
    params: int
    model_bytes: int
    bits_per_weight: float
    bytes_per_token: int
    kv_bytes_per_token: dict[str, int]
    is_tied: bool
    has_bias: bool
    tokenizer: str
    tokenizer_size: int
    stop_tokens: dict[int, str]
    extras: dict[str, int]
    source: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All facts as JSON-ready values; infinities become None."""
        values = dataclasses.asdict(self)
        values["path"] = str(self.path)
        values["config"] = {key: None if value == math.inf else value for key, value in values["config"].items()}
        values["config"]["stop_ids"] = list(self.config.stop_ids)
        values["stop_tokens"] = {str(index): text for index, text in self.stop_tokens.items()}
        return values


def file_info(path: str | os.PathLike[str]) -> FileInfo:
    """Describe a `.calm` file.

    Raises
    ------
    CalmnbError
        If the file cannot be opened as one.
    """
    with open_calm(path) as file:
        sizes = {name: tensor.nbytes for name, tensor in file.tensors.items() if name.startswith("model.")}
        source = file.settings.get("source", {})
        return FileInfo(
            path=Path(path),
            file_bytes=Path(path).stat().st_size,
            config=file.config,
            params=file.n_params,
            model_bytes=file.nbytes,
            bits_per_weight=file.bits_per_weight,
            bytes_per_token=_bytes_per_token(sizes, file.config, file.weights.is_tied),
            kv_bytes_per_token={dtype: file.config.kv_bytes_per_token(dtype) for dtype in KV_DTYPES},
            is_tied=file.weights.is_tied,
            has_bias=any(layer.qkv_bias is not None for layer in file.weights.layers),
            tokenizer=_tokenizer_kind(file),
            tokenizer_size=_tokenizer_size(file),
            stop_tokens={index: _text_of(file, index) for index in file.config.stop_ids},
            extras={name: len(data) for name, data in file.extras.items()},
            source=source if isinstance(source, dict) else {},
        )


def _tokenizer_kind(file: CalmFile) -> str:
    for name in ("tokenizer.json", "tokenizer.model"):
        if name in file.extras:
            return name
    return "calm" if file.token_bytes else "none"


def _tokenizer_size(file: CalmFile) -> int:
    return sum(1 for token in file.token_bytes if token)


def _text_of(file: CalmFile, index: int) -> str:
    """Text of a token; control characters and broken UTF-8 stay readable."""
    if index >= len(file.token_bytes):
        return ""
    return json.dumps(file.token_bytes[index].decode("utf-8", errors="replace"), ensure_ascii=False)[1:-1]
