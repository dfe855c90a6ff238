"""What a Llama-like model is made of: sizes, norms, rotary embedding, stop ids.

`ModelConfig` is the one description that every part of calmnb shares. It knows nothing of files: `checkpoint.py`
builds it from `.calm` metadata, `convert/` from Hugging Face or GGUF keys.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calmnb.errors import ConfigError, UnsupportedError

__all__ = ["DTYPE_BITS", "KV_DTYPES", "WEIGHT_DTYPES", "KvDtype", "ModelConfig", "RopeScaling", "WeightDtype"]

WeightDtype = Literal["fp16", "fp8", "gf4"]
KvDtype = Literal["fp16", "fp8"]
NormType = Literal["rmsnorm", "layernorm", "layernorm_par"]
ActType = Literal["silu", "gelu"]

WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("fp16", "fp8", "gf4")
KV_DTYPES: tuple[KvDtype, ...] = ("fp16", "fp8")
DTYPE_BITS: dict[str, int] = {"fp16": 16, "fp8": 8, "gf4": 4}
_LARGEST = sys.float_info.max  # an int may be beyond any float


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a long-context model differ from ``theta ** (-2 i / rotary_dim)``.

    Attributes
    ----------
    kind : {"linear", "llama3", "yarn"}
        The rule. An unknown rule is refused when a checkpoint is read, never ignored.
    factor : float
        Context extension, > 0.
    original_max_seq_len : int
        Context the model was trained on before extension (llama3 and yarn).
    low_freq_factor, high_freq_factor : float
        Bounds of llama3's blended band, in wavelengths per original context.
    beta_fast, beta_slow : float
        Bounds of yarn's ramp, in rotations per original context.
    attention_factor : float or None
        Multiplies cos and sin (yarn); None means ``0.1 ln(factor) + 1``.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and rules of one model.

    Attributes
    ----------
    arch : str
        Family label ("llama", "mistral", "qwen2"); engines never read it.
    dtype : {"fp16", "fp8", "gf4"}
        Storage of every matrix, embedding included. Norms and biases are float32.
    dim, hidden_dim, head_dim, n_layers, n_heads, n_kv_heads, vocab_size : int
        Widths of the residual stream, the FFN and one head; counts. ``n_heads * head_dim`` may differ from `dim`.
    max_seq_len : int
        Context the model was made for.
    bos_token_id, eos_token_id : int
        -1 means none.
    rope_theta : float
        Rotary base.
    rotary_dim : int
        Leading channels of each head that rotate, even, ``<= head_dim``.
    norm_eps : float
    norm_type : {"rmsnorm", "layernorm", "layernorm_par"}
        "layernorm_par" also means that attention and FFN read the same normalised input.
    act_type : {"silu", "gelu"}
    qkv_clip : float
        q, k and v are clamped to +-qkv_clip; infinity means no clamp.
    n_experts, n_experts_active : int
        0 experts means a dense FFN.
    rope_scaling : RopeScaling or None
    sliding_window : int
        A token sees itself and the ``sliding_window - 1`` tokens before it; 0 means the whole context.
    stop_ids : tuple of int
        Every id that ends a turn, `eos_token_id` included when there is one.
    """

    arch: str
    dtype: WeightDtype
    dim: int
    hidden_dim: int
    head_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int = 4096
    bos_token_id: int = -1
    eos_token_id: int = -1
    rope_theta: float = 10000.0
    rotary_dim: int = 0
    norm_eps: float = 1e-5
    norm_type: NormType = "rmsnorm"
    act_type: ActType = "silu"
    qkv_clip: float = math.inf
    n_experts: int = 0
    n_experts_active: int = 0
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0
    stop_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "head_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        _require(self.dtype in WEIGHT_DTYPES, f"dtype is {self.dtype!r}; accepted are {', '.join(WEIGHT_DTYPES)}")
        _require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}",
        )
        _require(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"rotary_dim is {self.rotary_dim}; it must be even and at most head_dim {self.head_dim}",
        )
        _require(
            0 < self.rope_theta <= _LARGEST,
            f"rope_theta is {str(self.rope_theta)[:40]}; it must be positive and finite",
        )
        _require(0 <= self.norm_eps <= _LARGEST, f"norm_eps is {str(self.norm_eps)[:40]}; it must be finite and >= 0")
        _require(not self.qkv_clip <= 0, f"qkv_clip is {self.qkv_clip}; it must be positive")
        _require(
            0 <= self.n_experts_active <= self.n_experts and (self.n_experts == 0 or self.n_experts_active >= 1),
            f"n_experts_active is {self.n_experts_active} of n_experts {self.n_experts}; it must be between 1 and n_experts",
        )
        for name in ("max_seq_len", "sliding_window"):  # kernels count positions in 32 bits
            _require(getattr(self, name) < 1 << 31, f"{name} is {str(getattr(self, name))[:40]}; it must be below 2**31")
        _require(self.sliding_window >= 0, f"sliding_window is {self.sliding_window}; it must be 0 (none) or positive")
        self._check_rope()

    def _check_rope(self) -> None:
        """Compute the first and the last rotary frequency: numbers that are fine one by one may overflow together."""
        half = self.rotary_dim // 2
        scaling = self.rope_scaling
        _require(
            scaling is None or scaling.kind != "yarn" or self.rope_theta > 1,
            f"rope_theta is {self.rope_theta}; with yarn scaling it must be above 1",
        )
        try:
            with np.errstate(all="ignore"):
                # Angles are float64 up to the last position; cos and sin times the factor are float32.
                freqs, factor = self._frequencies(np.array([0, half - 1], np.float64)[:half])
                ends = np.append(freqs * 2.0**31, np.float32(factor))
        except (ArithmeticError, ValueError) as error:
            found: object = error
        else:
            if np.isfinite(ends).all():
                return
            found = "not finite"
        raise ConfigError(
            f"model configuration: rope_theta {self.rope_theta} with {str(scaling)[:200]} makes no rotary frequencies "
            f"({found}); these numbers must be of a usual size"
        )

    @property
    def q_dim(self) -> int:
        """Width of all query heads together, ``n_heads * head_dim``."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together, ``n_kv_heads * head_dim``."""
        return self.n_kv_heads * self.head_dim

    @property
    def is_moe(self) -> bool:
        """Whether the FFN is a mixture of experts."""
        return self.n_experts > 0

    @property
    def is_parallel(self) -> bool:
        """Whether attention and FFN share one norm and read the same input."""
        return self.norm_type == "layernorm_par"

    def kv_bytes_per_token(self, kv_dtype: str = "fp16") -> int:
        """Bytes one position adds to the KV cache: ``2 * n_layers * kv_dim * itemsize``."""
        return 2 * self.n_layers * self.kv_dim * DTYPE_BITS[kv_dtype] // 8

    def rope_frequencies(self) -> tuple[NDArray[np.float64], float]:
        """Angular step per position of each rotated pair, and the factor on cos and sin.

        Returns
        -------
        frequencies : float64 array, shape (rotary_dim // 2,)
            Radians per position for the pair of channels (2 i, 2 i + 1).
        attention_factor : float
            Multiplies cos and sin; 1 except for yarn.

        Notes
        -----
        llama3: wavelengths shorter than ``original / high`` are kept, longer than ``original / low`` are slowed by
        `factor`, and the band between is blended linearly in ``original / wavelength``. yarn (Peng et al., 2023,
        arXiv 2309.00071, section 3.2): a linear ramp over the channel index between the channels that make
        `beta_fast` and `beta_slow` rotations in the original context.
        """
        return self._frequencies(np.arange(self.rotary_dim // 2, dtype=np.float64))

    def _frequencies(self, pairs: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """As `rope_frequencies`, of the pairs of channels numbered `pairs`."""
        freqs: NDArray[np.float64] = self.rope_theta ** (-2.0 * pairs / max(self.rotary_dim, 1))
        scaling = self.rope_scaling
        if scaling is None:
            return freqs, 1.0
        if scaling.kind == "linear":
            return freqs / scaling.factor, 1.0
        original = scaling.original_max_seq_len or self.max_seq_len
        if scaling.kind == "llama3":
            wavelength = 2 * math.pi / freqs
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            keep = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
            return freqs * (keep + (1.0 - keep) / scaling.factor), 1.0
        if scaling.kind == "yarn":

            def channel(rotations: float) -> float:
                return self.rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.rope_theta))

            first = max(math.floor(channel(scaling.beta_fast)), 0)
            last = min(math.ceil(channel(scaling.beta_slow)), self.rotary_dim - 1)
            ramp = np.clip((pairs - first) / max(last - first, 1e-3), 0.0, 1.0)
            attention = scaling.attention_factor
            if attention is None:
                attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
            return freqs * (1.0 - ramp) + freqs / scaling.factor * ramp, attention
        raise UnsupportedError(f"rope scaling {scaling.kind!r} is not known; accepted are linear, llama3 and yarn")

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed, checked again."""
        return replace(self, **changes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"model configuration: {message}")
