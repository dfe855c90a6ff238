"""The specification's whole-model test vectors: seeded tiny models, and what each must answer.

Every number is from SPEC_calm.md section 9: logits and arg-maxima were printed by calm itself on files like these. The
models differ in one feature each (quantisation, partial rotary and bias and clip, parallel layernorm, experts, a context
that overflows, layernorm without grouped heads, an fp8 cache).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.checkpoint import weight_layout, write_calm
from calmnb.config import ModelConfig
from calmnb.quant import encode

BASE = ModelConfig(
    arch="test",
    dtype="fp16",
    dim=32,
    hidden_dim=64,
    head_dim=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    vocab_size=12,
    max_seq_len=64,
    bos_token_id=-1,
    eos_token_id=0,
    rope_theta=1e4,
    rotary_dim=16,
    norm_eps=1e-5,
    stop_ids=(0,),
)

#: What distinguishes each model from BASE. "T" is A with end-of-text 11, for the sampling vectors.
CHANGES: dict[str, dict[str, Any]] = {
    "A": {},
    "B": {"dtype": "fp8"},
    "C": {"dtype": "gf4"},
    "D": {"rotary_dim": 8, "qkv_clip": 0.5},
    "E": {"act_type": "gelu", "norm_type": "layernorm_par"},
    "F": {"dtype": "gf4", "n_experts": 4, "n_experts_active": 2},
    "Fh": {"n_experts": 4, "n_experts_active": 2},
    "G": {"max_seq_len": 4},
    "H": {"norm_type": "layernorm", "n_kv_heads": 2},
    "J": {},
    "T": {"eos_token_id": 11, "stop_ids": (11,)},
}


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


Expected = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], dict[str, Any]]

#: name -> (tokens fed at positions 0, 1, ...; arg-max after each; logits after the last; keyword arguments of the engine)
EXPECTED: dict[str, Expected] = {
    "A": (
        (3, 1, 4),
        (7, 6, 6),
        _numbers("1.94835 -.33444 -1.34797 1.52061 -2.49010 -1.52231 2.77750 -.23468 -1.24373 .54109 -.96620 -.83137"),
        {},
    ),
    "B": (
        (3, 1, 4),
        (7, 6, 6),
        _numbers("1.83087 -.07269 -1.36350 1.51593 -2.79918 -1.63568 2.83047 -.13019 -1.33360 .58078 -.71344 -.68358"),
        {},
    ),
    "C": (
        (3, 1, 4),
        (10, 9, 6),
        _numbers("1.78607 .49031 -1.43505 1.35011 -1.92376 -1.81287 2.17331 .60794 -1.83080 1.25530 -.76465 -1.38941"),
        {},
    ),
    "D": (
        (3, 1, 4),
        (6, 1, 9),
        _numbers("1.17755 2.73010 -4.49975 1.17735 1.68346 -3.87018 2.79485 .39322 -3.74724 3.28555 -.88163 -3.74799"),
        {},
    ),
    "E": (
        (3, 1, 4),
        (5, 1, 7),
        _numbers("-2.30895 1.37799 1.29609 -1.69693 .67914 .53716 -2.09974 1.43185 .06832 -1.57280 -.37498 -.78138"),
        {},
    ),
    "F": (
        (3, 1, 4),
        (1, 3, 3),
        _numbers(".06302 .27943 -.96105 1.26976 .96720 .11388 -.25178 .13995 -1.12196 -.57043 1.11918 1.23074"),
        {},
    ),
    "Fh": (
        (3, 1, 4),
        (7, 3, 3),
        _numbers(".22809 -.06835 -.66158 1.15749 .85383 -.14570 -.31688 -.25268 -1.72756 -.48589 .59509 1.13478"),
        {},
    ),
    "G": (
        (3, 1, 4, 1, 5, 9, 2, 6),
        (7, 6, 6, 6, 1, 7, 1, 7),
        _numbers("-.28933 -.24007 1.18696 -1.91314 .13130 .49187 -.95466 1.94966 .50124 -3.72453 1.73588 -.04240"),
        {"seq_len": 4, "on_full": "roll"},
    ),
    "H": (
        (3, 1, 4),
        (1, 11, 11),
        _numbers("-.40378 -1.70432 1.74791 -.25057 -.33338 .66734 .01443 .06495 .34781 -2.00222 .21057 1.83456"),
        {},
    ),
    "J": (
        (3, 1, 4),
        (),  # the specification gives only the logits
        _numbers("1.93453 -.13048 -1.47632 1.55238 -2.45410 -1.64904 3.06288 -.46856 -1.38551 1.10358 -1.23075 -1.07626"),
        {"kv_dtype": "fp8"},
    ),
}

#: Text that model "T" prints after the prompt "d" in 24 tokens at temperature 1: (min_p, seed) -> text.
SAMPLED_TEXT: dict[tuple[float, int], str] = {
    (0.1, 1): "deggaagggdggaagggaadgdaga",
    (0.1, 2): "dhbggagdaggaaggggagheggga",
    (0.1, 42): "deggjggadagddgaagaajaagda",
    (0.5, 42): "dhhhhhaaaagaahaagaaaaagaa",
    (0.0, 42): "deggjggadagddgaagcb",  # then it stops by itself
    (1.0, 42): "dh" + 23 * "a",
}

#: Model "A", prompt "dbe", greedy, 6 tokens: what is printed, prompt included.
GREEDY_TEXT = ("dbe", "dbeggg")

#: Perplexity of "A" on this text: chunk (None for the default) -> (value, error).
PERPLEXITY_TEXT = "dbefbahc" * 3
PERPLEXITY: dict[int | None, tuple[float, float]] = {None: (26.984, 10.703), 5: (24.156, 9.210)}


def matrix(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The specification's matrix of a seed; expert e of a stack of matrices has the seed ``5 * seed + e``."""
    if len(shape) == 3:
        return np.stack([matrix(5 * seed + expert, shape[1:]) for expert in range(shape[0])])
    i, j = np.indices(shape)
    return (((31 * i + 17 * j + 7 * seed) % 23 - 11) / 32).astype(np.float32)


def weights(config: ModelConfig, *, qkv_bias: bool = False, tied: bool = False) -> dict[str, NDArray[np.float32]]:
    """Seeded float32 weights of a model of `config`, by name."""
    found: dict[str, NDArray[np.float32]] = {}
    seed = 0
    for slot in weight_layout(config, qkv_bias=qkv_bias, tied=tied):
        i = np.arange(slot.shape[0])
        if slot.name.endswith("wqkv.bias"):
            found[slot.name] = (((3 * i + int(slot.name.split(".")[2])) % 7 - 3) / 8).astype(np.float32)
            continue
        seed += 1
        if slot.quantised:
            found[slot.name] = matrix(seed, slot.shape)
        else:
            found[slot.name] = (1 + ((i + seed) % 5 - 2) / 16).astype(np.float32)
    return found


def build(name: str, path: Path) -> Path:
    """Write the `.calm` file of one of the specification's models."""
    config = BASE.replace(**CHANGES[name])
    arrays = weights(config, qkv_bias=name == "D", tied=name == "E")
    stored = {key: encode(array, config.dtype) if array.ndim > 1 else array for key, array in arrays.items()}
    tokens = [bytes([ord("a") + i]) for i in range(config.vocab_size)]
    return write_calm(path, config, stored, tokens=tokens, scores=np.zeros(config.vocab_size, np.float32))
