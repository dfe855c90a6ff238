"""A real model on the GPU: SmolLM2-135M answers as it does on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calmnb
from calmnb.perplexity import perplexity

pytestmark = [pytest.mark.gpu, pytest.mark.model]

PROMPT = "The history of bread begins"
# Two engines round differently: a token may differ only where the best two logits are this close together.
NEAR_TIE = 0.05


def greedy(path: Path, device: Any) -> list[int]:
    with calmnb.load(path, device=device) as model, model.generate(PROMPT, max_tokens=256, stop_ids=()) as answer:
        return [token.id for token in answer]


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_greedy_answer_is_the_cpu_engines(smollm2: Callable[[str], Path], dtype: str) -> None:
    path = smollm2(dtype)
    on_gpu, on_cpu = greedy(path, "cuda"), greedy(path, "cpu")
    first = next((i for i, (a, b) in enumerate(zip(on_gpu, on_cpu, strict=True)) if a != b), None)
    if first is None:
        return
    with calmnb.load(path, device="cpu") as model:
        ids = model.encode_prompt(PROMPT) + on_cpu[:first]
        logits = np.sort(model.engine.prefill(ids))
    assert logits[-1] - logits[-2] < NEAR_TIE, f"token {first} differs without a near-tie"


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_perplexity_is_the_cpu_engines(smollm2: Callable[[str], Path], dtype: str) -> None:
    text = Path(__file__).read_text()[:2000]
    found = []
    for device in ("cuda", "cpu"):
        with calmnb.load(smollm2(dtype), device=device) as model:  # type: ignore[arg-type]
            found.append(perplexity(model, text).value)
    assert math.log(found[0] / found[1]) == pytest.approx(0, abs=1e-3)


def test_drawn_answer_has_the_same_seed_on_both_devices(smollm2: Callable[[str], Path]) -> None:
    answers = []
    for device in ("cuda", "cpu"):
        with calmnb.load(smollm2("fp16"), device=device) as model:  # type: ignore[arg-type]
            answers.append([t.id for t in model.generate(PROMPT, max_tokens=32, temperature=0.8, min_p=0.1, seed=5)])
    agreed = sum(a == b for a, b in zip(*answers, strict=False))
    assert agreed >= 8, "the draws part at once: not the same coins"
