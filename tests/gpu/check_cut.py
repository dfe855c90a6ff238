"""Greedy tokens of a SmolLM2 cut to fewer layers (64 MiB may travel to the GPU machine) against the CPU engine's.

``python -m tests.gpu.check_cut FOLDER`` with smol20.npz (the tensors) and smol20.json (prompt, tokens, gaps between the
two largest logits), as written on the machine that has the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from calmnb.config import ModelConfig
from calmnb.engine.base import LayerWeights, Weights
from calmnb.engine.cuda import open_cuda_engine


def main(folder: str) -> None:
    truth = json.loads((Path(folder) / "smol20.json").read_text())
    arrays = np.load(Path(folder) / "smol20.npz")
    fields: dict[str, Any] = truth["config"]
    fields["stop_ids"] = tuple(fields["stop_ids"])
    config = ModelConfig(**fields)

    def layer(i: int) -> LayerWeights:
        names = ("attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w1", "w2", "w3")
        found = {name: arrays[f"{i}.{name}"] for name in names}
        return LayerWeights(**found, qkv_bias=None, moegate=None)

    embed = arrays["embed"]
    weights = Weights(config, embed, tuple(layer(i) for i in range(config.n_layers)), arrays["final"], embed)
    with open_cuda_engine(weights, seq_len=512) as engine:
        logits = engine.prefill(truth["ids"])
        tokens = [int(logits.argmax())]
        tokens += [d.token for d in engine.decode_many(tokens[0], len(truth["ids"]), len(truth["tokens"]) - 1)]
    first = next((i for i, (a, b) in enumerate(zip(tokens, truth["tokens"], strict=True)) if a != b), None)
    if first is None:
        print(f"SmolLM2 gf4, {config.n_layers} layers: {len(tokens)} greedy tokens equal the CPU engine's")
    else:
        print(f"SmolLM2 gf4: first difference at token {first}; the CPU's best two are {truth['gaps'][first - 1]:.4f} apart")


if __name__ == "__main__":
    main(sys.argv[1])
