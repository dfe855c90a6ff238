"""Converted transformers models on the GPU: logits as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.checkpoint import open_calm
from calmnb.convert import convert
from calmnb.engine import open_engine

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from tests.hf_models import LLAMA3_ROPE, TOKENS, YARN_ROPE, logits, save, tiny_model

pytestmark = pytest.mark.gpu
#: Twice what the engine's arithmetic (half activations, sums of four products in half) makes of these models in NumPy.
TOLERANCE = 1e-2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
        ("llama", {"head_dim": 24, "rope_parameters": YARN_ROPE}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    with torch.no_grad():
        # Scores of 20 and more make softmax a switch: half's rounding of one of two equal positions was 1.4% of the logits.
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(0.5)
    expected = logits(model)
    path = convert(save(model, tmp_path / "hf"), tmp_path / "m.calm", dtype="fp16")
    with open_calm(path) as file:
        engine = open_engine(file.weights, device="cuda", seq_len=64)
        try:
            stepped = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(TOKENS)])
            fed = engine.prefill(TOKENS, 0)
        finally:
            engine.close()
    for found, row in zip(stepped, expected, strict=True):
        assert np.linalg.norm(found - row) < TOLERANCE * np.linalg.norm(row)
    assert np.linalg.norm(fed - expected[-1]) < TOLERANCE * np.linalg.norm(expected[-1])
