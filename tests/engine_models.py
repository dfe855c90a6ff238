"""Small models in memory for the engine tests: the specification's, random ones, and transformers' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from calmnb.config import ModelConfig, RopeScaling
from calmnb.engine.base import LayerWeights, Weights
from calmnb.quant import encode

#: SPEC_calm.md 9: config changes, tokens, argmax per step, logits after the last token, engine arguments.
SPEC: dict[str, tuple[dict[str, Any], list[int], list[int], list[float], dict[str, Any]]] = {
    "A": ({}, [3, 1, 4], [7, 6, 6],
          [1.94835, -.33444, -1.34797, 1.52061, -2.49010, -1.52231, 2.77750, -.23468, -1.24373, .54109, -.96620, -.83137], {}),
    "B": ({"dtype": "fp8"}, [3, 1, 4], [7, 6, 6],
          [1.83087, -.07269, -1.36350, 1.51593, -2.79918, -1.63568, 2.83047, -.13019, -1.33360, .58078, -.71344, -.68358], {}),
    "C": ({"dtype": "gf4"}, [3, 1, 4], [10, 9, 6],
          [1.78607, .49031, -1.43505, 1.35011, -1.92376, -1.81287, 2.17331, .60794, -1.83080, 1.25530, -.76465, -1.38941], {}),
    "D": ({"rotary_dim": 8, "qkv_clip": 0.5, "bias": True}, [3, 1, 4], [6, 1, 9],
          [1.17755, 2.73010, -4.49975, 1.17735, 1.68346, -3.87018, 2.79485, .39322, -3.74724, 3.28555, -.88163, -3.74799], {}),
    "E": ({"act_type": "gelu", "norm_type": "layernorm_par", "tied": True}, [3, 1, 4], [5, 1, 7],
          [-2.30895, 1.37799, 1.29609, -1.69693, .67914, .53716, -2.09974, 1.43185, .06832, -1.57280, -.37498, -.78138], {}),
    "F": ({"dtype": "gf4", "n_experts": 4, "n_experts_active": 2}, [3, 1, 4], [1, 3, 3],
          [.06302, .27943, -.96105, 1.26976, .96720, .11388, -.25178, .13995, -1.12196, -.57043, 1.11918, 1.23074], {}),
    "Fh": ({"n_experts": 4, "n_experts_active": 2}, [3, 1, 4], [7, 3, 3],
           [.22809, -.06835, -.66158, 1.15749, .85383, -.14570, -.31688, -.25268, -1.72756, -.48589, .59509, 1.13478], {}),
    "G": ({}, [3, 1, 4, 1, 5, 9, 2, 6], [7, 6, 6, 6, 1, 7, 1, 7],
          [-.28933, -.24007, 1.18696, -1.91314, .13130, .49187, -.95466, 1.94966, .50124, -3.72453, 1.73588, -.04240],
          {"seq_len": 4, "on_full": "roll"}),
    "H": ({"norm_type": "layernorm", "n_kv_heads": 2}, [3, 1, 4], [1, 11, 11],
          [-.40378, -1.70432, 1.74791, -.25057, -.33338, .66734, .01443, .06495, .34781, -2.00222, .21057, 1.83456], {}),
    "J": ({}, [3, 1, 4], [],
          [1.93453, -.13048, -1.47632, 1.55238, -2.45410, -1.64904, 3.06288, -.46856, -1.38551, 1.10358, -1.23075, -1.07626],
          {"kv_dtype": "fp8"}),
}  # fmt: skip

SPEC_CONFIG = ModelConfig("llama", "fp16", 32, 64, 16, 2, 2, 1, 12, max_seq_len=64, rotary_dim=16, eos_token_id=0)

Fill = Callable[..., np.ndarray]


def build(config: ModelConfig, matrix: Fill, norm: Fill, *, bias: Fill | None = None, tied: bool = False) -> Weights:
    """Weights whose matrices come from ``matrix(*shape)``, norms from ``norm(size)``, biases from ``bias(layer, size)``."""

    def stored(*shape: int) -> np.ndarray:
        return encode(matrix(*shape), config.dtype)

    c, experts = config, (config.n_experts,) if config.is_moe else ()
    embed = stored(c.vocab_size, c.dim)
    layers = []
    for index in range(c.n_layers):
        attn_norm = norm(c.dim)
        wq, wk, wv = stored(c.q_dim, c.dim), stored(c.kv_dim, c.dim), stored(c.kv_dim, c.dim)
        wo = stored(c.dim, c.q_dim)
        layers.append(
            LayerWeights(
                attn_norm,
                wq,
                wk,
                wv,
                wo,
                qkv_bias=None if bias is None else bias(index, c.q_dim + 2 * c.kv_dim),
                mlp_norm=None if c.is_parallel else norm(c.dim),
                moegate=stored(c.n_experts, c.dim) if c.is_moe else None,
                w1=stored(*experts, c.hidden_dim, c.dim),
                w2=stored(*experts, c.dim, c.hidden_dim),
                w3=stored(*experts, c.hidden_dim, c.dim),
            )
        )
    final = norm(c.dim)
    return Weights(config, embed, tuple(layers), final, embed if tied else stored(c.vocab_size, c.dim))


def spec_weights(name: str) -> Weights:
    """One whole-model vector's weights, by the seeds of SPEC_calm.md 9."""
    changes = dict(SPEC[name][0])
    has_bias, tied = changes.pop("bias", False), changes.pop("tied", False)
    seeds = itertools.count(1)

    def plane(seed: int, rows: int, cols: int) -> np.ndarray:
        i, j = np.arange(rows)[:, None], np.arange(cols)[None, :]
        return (((31 * i + 17 * j + 7 * seed) % 23 - 11) / 32).astype(np.float32)

    def matrix(*shape: int) -> np.ndarray:
        seed = next(seeds)
        if len(shape) == 3:
            return np.stack([plane(5 * seed + e, *shape[1:]) for e in range(shape[0])])
        return plane(seed, *shape)

    def norm(size: int) -> np.ndarray:
        return (1 + ((np.arange(size) + next(seeds)) % 5 - 2) / 16).astype(np.float32)

    def bias(layer: int, size: int) -> np.ndarray:
        return (((3 * np.arange(size) + layer) % 7 - 3) / 8).astype(np.float32)

    return build(SPEC_CONFIG.replace(**changes), matrix, norm, bias=bias if has_bias else None, tied=tied)


def check_spec_vectors(open_engine: Callable[..., Any], name: str) -> None:
    """A GPU engine's steps of a model of SPEC section 9 against its vectors."""
    _, tokens, argmaxes, expected, options = SPEC[name]
    options = {"seq_len": 64, **options}
    with open_engine(spec_weights(name), **options) as engine:
        logits = [engine.step(token, pos).copy() for pos, token in enumerate(tokens)]
    if argmaxes:
        assert [int(row.argmax()) for row in logits] == argmaxes
    np.testing.assert_allclose(logits[-1], expected, atol=2e-2)


def random_weights(config: ModelConfig, seed: int = 0, *, bias: bool = False, tied: bool = False) -> Weights:
    """Random weights, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    return build(
        config,
        lambda *shape: rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1])),
        lambda size: rng.uniform(0.5, 1.5, size).astype(np.float32),
        bias=(lambda _, size: rng.standard_normal(size, dtype=np.float32)) if bias else None,
        tied=tied,
    )


def scaled_weights(config: ModelConfig, up: float, down: float, *, gate: float = 1.0) -> Weights:
    """Random weights with the FFN's matrices multiplied."""
    factors = {"w1": gate, "w3": up, "w2": down}
    weights = random_weights(config)
    layers = [
        replace(layer, **{name: (getattr(layer, name) * np.float16(by)).astype(np.float16) for name, by in factors.items()})
        for layer in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permutation P: half-split rotary order to neighbouring pairs."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(split, 1, 2)).reshape(rows.shape)


def from_transformers(model: Any, dtype: str = "fp16") -> Weights:
    """Weights of a tiny Llama, Mistral or Qwen2 of transformers, whose parameters must be exact in `dtype`."""
    hf, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rope = dict(hf.rope_parameters)
    scaling = None
    if rope["rope_type"] != "default":
        scaling = RopeScaling(
            rope["rope_type"],
            rope["factor"],
            original_max_seq_len=rope.get("original_max_position_embeddings", 0),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
            attention_factor=rope.get("attention_factor"),
        )
    config = ModelConfig(
        hf.model_type, dtype, hf.hidden_size, hf.intermediate_size, head_dim, hf.num_hidden_layers, hf.num_attention_heads,
        hf.num_key_value_heads, hf.vocab_size, max_seq_len=hf.max_position_embeddings, rope_theta=rope["rope_theta"],
        rotary_dim=head_dim, norm_eps=hf.rms_norm_eps, rope_scaling=scaling,
        sliding_window=(getattr(hf, "sliding_window", None) or 0) if hf.model_type == "mistral" else 0,
    )  # fmt: skip

    def layer(index: int) -> LayerWeights:
        def get(name: str) -> np.ndarray:
            return state[f"model.layers.{index}.{name}"]

        def stored(name: str, heads: int = 0) -> np.ndarray:
            return encode(_interleaved(get(name), heads) if heads else get(name), dtype)

        heads, kv = config.n_heads, config.n_kv_heads
        bias = None
        if f"model.layers.{index}.self_attn.q_proj.bias" in state:
            q, k, v = (get(f"self_attn.{p}_proj.bias") for p in "qkv")
            bias = np.concatenate([_interleaved(q, heads), _interleaved(k, kv), v])
        return LayerWeights(
            get("input_layernorm.weight"),
            stored("self_attn.q_proj.weight", heads), stored("self_attn.k_proj.weight", kv), stored("self_attn.v_proj.weight"),
            stored("self_attn.o_proj.weight"), bias, get("post_attention_layernorm.weight"), None,
            stored("mlp.gate_proj.weight"), stored("mlp.down_proj.weight"), stored("mlp.up_proj.weight"),
        )  # fmt: skip

    embed = encode(state["model.embed_tokens.weight"], dtype)
    output = embed if hf.tie_word_embeddings else encode(state["lm_head.weight"], dtype)
    return Weights(config, embed, tuple(layer(i) for i in range(config.n_layers)), state["model.norm.weight"], output)
