"""Tiny random transformers models, saved as checkpoints: the oracle of conversions."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS = (3, 17, 5, 29, 8, 8, 0, 23, 11, 2)

#: Rope scalings that change something within the few positions of a test.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(family: str, **changes: Any) -> Any:
    """A random float32 model of `family` ("llama", "mistral", "qwen2") whose weights are exact in fp16."""
    import torch
    import transformers

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    config = getattr(transformers, names[family] + "Config")(**(_SIZES | {"attn_implementation": "eager"} | changes))
    torch.manual_seed(7)
    model = getattr(transformers, names[family] + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # transformers starts biases at 0 and norms at 1, which would hide what is lost or misplaced.
            noise = torch.randn_like(parameter) * 0.3
            parameter.copy_((1 + noise if parameter.ndim == 1 and parameter.mean() == 1 else noise).half().float())
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save `model` as a checkpoint; returns `folder`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint in one file, as torch tensors."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def replace_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Put other tensors into a checkpoint of one file."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def tiny_tokenizer() -> dict[str, Any]:
    """A byte-level BPE tokenizer.json of 12 tokens, one of them an added control token with a space and an umlaut."""
    vocab = {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "Ċ": 5, "abc": 6, "Ã": 7, "©": 8, "Ã©": 9, "Ġa": 10}
    added = {"id": 11, "content": "<|für you|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added | {"special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": ["a b", "ab c", "Ã ©", "Ġ a"],
        },
    }


def logits(model: Any, tokens: tuple[int, ...] = TOKENS) -> NDArray[np.float32]:
    """Logits after every token: float32 (len(tokens), vocab_size). Keys and values are rounded to fp16, as in our cache."""
    import torch
    from transformers import DynamicCache

    class HalfCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        output = model(torch.tensor([tokens]), use_cache=True, **{name: HalfCache()})
        result: NDArray[np.float32] = output.logits[0].float().numpy()
    return result


def calm_logits(path: Path, tokens: tuple[int, ...] = TOKENS) -> NDArray[np.float32]:
    """The same from a `.calm` file, by the reference engine."""
    from calmnb.checkpoint import open_calm
    from calmnb.engine import open_engine

    with open_calm(path) as file:
        engine = open_engine(file.weights, device="reference")
        return np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; a value of ``...`` deletes the key."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))
