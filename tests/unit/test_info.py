"""Facts about files: the specification's totals, and what `calmnb info` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from calmnb.config import ModelConfig
from calmnb.errors import FormatError
from calmnb.info import file_info, weight_totals
from tests import spec_models

MISTRAL = ModelConfig(
    arch="mistral",
    dtype="fp16",
    dim=4096,
    hidden_dim=14336,
    head_dim=128,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    vocab_size=32000,
)
MIXTRAL = MISTRAL.replace(dtype="gf4", n_experts=8, n_experts_active=2)
LLAMA3 = MISTRAL.replace(dtype="fp8", vocab_size=128256)
LLAMA32 = ModelConfig(
    arch="llama", dtype="fp16", dim=2048, hidden_dim=8192, head_dim=64, n_layers=16, n_heads=32, n_kv_heads=8, vocab_size=128256
)
LLAMA2 = MISTRAL.replace(hidden_dim=11008, n_kv_heads=32)


@pytest.mark.parametrize(
    ("config", "tied", "expected"),
    [
        (MISTRAL, False, (7_241_732_096, 14_483_996_672, 14_221_852_672)),
        (MISTRAL.replace(dtype="fp8"), False, (7_241_732_096, 7_242_530_816, 7_111_458_816)),
        (MISTRAL.replace(dtype="gf4"), False, (7_241_732_096, 3_621_797_888, 3_556_261_888)),
        (MIXTRAL, False, (46_702_792_704, 23_352_328_192, 6_375_358_464)),
        (LLAMA3, False, (8_030_261_248, 8_031_059_968, 7_505_723_392)),
        (LLAMA32, True, (1_235_814_400, 2_471_763_968, 2_471_763_968)),
    ],
    ids=["mistral-fp16", "mistral-fp8", "mistral-gf4", "mixtral-gf4", "llama3-fp8", "llama3.2-fp16"],
)
def test_totals_are_the_specifications(config: ModelConfig, tied: bool, expected: tuple[int, int, int]) -> None:
    assert tuple(weight_totals(config, tied=tied)) == expected


@pytest.mark.parametrize(
    ("config", "dtype", "positions", "nbytes"),
    [
        (MISTRAL, "fp16", 1, 131_072),
        (MISTRAL, "fp16", 1000, 131_072_000),
        (MISTRAL, "fp16", 4096, 536_870_912),
        (MISTRAL, "fp8", 16384, 1_073_741_824),
        (LLAMA2, "fp16", 4096, 2_147_483_648),
    ],
)
def test_kv_bytes_are_the_specifications(config: ModelConfig, dtype: str, positions: int, nbytes: int) -> None:
    assert config.kv_bytes_per_token(dtype) * positions == nbytes


@pytest.mark.parametrize(("name", "per_token"), [("A", 38_272), ("F", 16_320)])
def test_bytes_per_token_of_a_file_are_the_specifications(spec_model: Callable[[str], Path], name: str, per_token: int) -> None:
    assert file_info(spec_model(name)).bytes_per_token == per_token


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "E", "F", "H"])
def test_totals_from_the_configuration_equal_those_of_the_file(spec_model: Callable[[str], Path], name: str) -> None:
    info = file_info(spec_model(name))
    totals = weight_totals(info.config, tied=info.is_tied, qkv_bias=info.has_bias)
    assert totals == (info.params, info.model_bytes, info.bytes_per_token)


def test_a_file_made_by_calm_is_described(spec_model: Callable[[str], Path]) -> None:
    info = file_info(spec_model("T"))
    assert (info.tokenizer, info.tokenizer_size, info.stop_tokens) == ("calm", 12, {11: "l"})
    assert info.kv_bytes_per_token == {"fp16": 128, "fp8": 64}
    assert (info.is_tied, info.has_bias, info.extras, info.source) == (False, False, {}, {})


def test_a_file_without_tokens_is_described(tmp_path: Path) -> None:
    from calmnb.checkpoint import write_calm

    arrays = {k: a.astype(np.float16) if a.ndim > 1 else a for k, a in spec_models.weights(spec_models.BASE).items()}
    info = file_info(write_calm(tmp_path / "t.calm", spec_models.BASE, arrays))
    assert (info.tokenizer, info.tokenizer_size, info.stop_tokens) == ("none", 0, {0: ""})


def test_facts_survive_json(spec_model: Callable[[str], Path]) -> None:
    info = file_info(spec_model("A"))
    again = json.loads(json.dumps(info.to_dict(), allow_nan=False))
    assert again == info.to_dict()
    assert (again["config"]["qkv_clip"], again["params"]) == (None, 19_360)


def test_a_file_that_is_not_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.calm").write_text("hello, this is not a model")
    with pytest.raises(FormatError, match=r"x\.calm"):
        file_info(tmp_path / "x.calm")


@pytest.mark.model
def test_the_demo_model_is_described(smollm2: Callable[[str], Path]) -> None:
    info = file_info(smollm2("fp8"))
    assert (info.params, info.tokenizer, info.tokenizer_size) == (134_515_008, "tokenizer.json", 49_152)
    assert info.stop_tokens[2] == "<|im_end|>"
    assert info.is_tied
    assert info.kv_bytes_per_token["fp16"] == 23_040
    assert {"tokenizer.json", "chat_template", "calmnb.json"} <= set(info.extras)
    assert info.source["format"] == "gguf"
