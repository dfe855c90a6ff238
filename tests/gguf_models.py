"""Small GGUF files, written with the gguf package from transformers models or from nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """The order llama.cpp's converter puts rows of q and k into."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def arrays_of(model: Any, architecture: str) -> dict[str, NDArray[np.float32]]:
    """Tensors of a transformers model under their GGUF names, rows reordered as GGUF has them."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = interleave(array, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        if not (stem == "lm_head" and config.tie_word_embeddings):
            found[f"{layer}{_NAMES[stem]}.{kind}"] = array
    return found


def tokens_of_bytes(n: int = 40) -> Callable[[gguf.GGUFWriter], None]:
    """A GPT-2-like vocabulary of `n` tokens: letters, two merges, and the control token ``<|im_end|>`` as the last."""

    def add(writer: gguf.GGUFWriter) -> None:
        tokens = ["<s>", *"abcdefghijklmnop0123456789", "Ġ", "Ċ", "'", "ab", "abc"]
        tokens += [f"[PAD{i}]" for i in range(n - 1 - len(tokens))] + ["<|im_end|>"]
        types = [3 if t.startswith("<") else 5 if t.startswith("[PAD") else 1 for t in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(["a b", "ab c"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(n - 1)

    return add


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    kind: str = "F32",
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    edit: Callable[[dict[str, NDArray[Any]]], None] | None = None,
) -> Path:
    """Write a transformers model as GGUF, matrices stored as `kind`, vectors as F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    (tokenizer or tokens_of_bytes(config.vocab_size))(writer)
    if extra is not None:
        extra(writer)
    arrays = arrays_of(model, architecture)
    if edit is not None:
        edit(arrays)
    for name, array in arrays.items():
        stored = "F32" if array.ndim == 1 else kind
        if stored == "F32":
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        elif stored == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            which = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), which), raw_dtype=which)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantised(path: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a GGUF file by the gguf package's own reader."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        for tensor in reader.tensors
    }
