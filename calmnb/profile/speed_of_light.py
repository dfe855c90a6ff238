"""What physics allows: tokens a second from sizes, storage and a device's bandwidth, before anything is run.

Decoding one token reads every active weight once and the whole KV cache once; each read takes bytes over bandwidth, or
its arithmetic takes FLOPs over throughput, whichever is longer.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calmnb.config import DTYPE_BITS, KV_DTYPES, ModelConfig
from calmnb.engine.base import Stage
from calmnb.engine.stages import kv_bytes, stage_cost
from calmnb.errors import ConfigError
from calmnb.profile.device import Device, get_device

if TYPE_CHECKING:
    import pandas as pd

    from calmnb.profile.bandwidth import Bandwidth
    from calmnb.profile.session import Peak

__all__ = ["RESERVE_BYTES", "SpeedOfLight", "StageLimit", "active_params", "speed_of_light", "total_params"]

_STAGES: tuple[Stage, ...] = ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output")
#: Memory beside weights and KV cache: activations, workspace, the driver's own; calm's allowance.
RESERVE_BYTES = 500 << 20


def active_params(config: ModelConfig) -> int:
    """Weights that one token's forward pass multiplies with: the layers' matrices and the output matrix."""
    return config.n_layers * _layer_params(config, max(config.n_experts_active, 1)) + config.vocab_size * config.dim


def total_params(config: ModelConfig, *, is_tied: bool = False) -> int:
    """Weights of all matrices, all experts and the embedding included; norms, biases and routers left out."""
    matrices = 1 if is_tied else 2
    return config.n_layers * _layer_params(config, max(config.n_experts, 1)) + matrices * config.vocab_size * config.dim


def _layer_params(c: ModelConfig, experts: int) -> int:
    return c.dim * (2 * c.q_dim + 2 * c.kv_dim + 3 * c.hidden_dim * experts)


@dataclass(frozen=True)
class StageLimit:
    """Least time of one stage over all layers and sequences: seconds, and whether "memory" or "compute" sets it."""

    stage: Stage
    nbytes: int
    flops: int
    seconds: float
    bound: str


@dataclass(frozen=True, repr=False)
class SpeedOfLight:
    """Result of `speed_of_light`.

    Attributes
    ----------
    device : str
    gb_per_s : float
        Bandwidth used, 1e9 bytes a second.
    peak_kind : {"datasheet", "measured", "user"}
        Where it comes from.
    tflops : float
        Arithmetic used, 1e12 FLOP/s; infinite if unknown.
    dtype, kv_dtype : str
    kv_len : int
        Positions in the cache, the new token's included.
    batch : int
        Sequences decoded together.
    stages : tuple of StageLimit
        Where the time goes. The embedding row (under 0.01%) is left out.
    active_params : int
    memory_bytes : int
        Weights, KV cache and 500 MiB for everything else.
    """

    device: str
    gb_per_s: float
    peak_kind: str
    tflops: float
    dtype: str
    kv_dtype: str
    kv_len: int
    batch: int
    stages: tuple[StageLimit, ...]
    active_params: int
    memory_bytes: int

    @property
    def latency_s(self) -> float:
        """Seconds a step (one token of every sequence) takes at least."""
        return math.fsum(stage.seconds for stage in self.stages)

    @property
    def tok_per_s(self) -> float:
        """Tokens a second at most, all sequences together."""
        return self.batch / self.latency_s

    @property
    def nbytes(self) -> int:
        """Bytes a step must read."""
        return sum(stage.nbytes for stage in self.stages)

    def table(self) -> pd.DataFrame:
        """One row a stage.

        Returns
        -------
        DataFrame
            ``stage``; ``time_us`` least time, microseconds; ``share_percent`` of the step; ``bytes_min``; ``flops``;
            ``flop_per_byte``; ``bound`` "memory" or "compute".
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "stage": [s.stage for s in self.stages],
                "time_us": [s.seconds * 1e6 for s in self.stages],
                "share_percent": [100.0 * s.seconds / self.latency_s for s in self.stages],
                "bytes_min": [s.nbytes for s in self.stages],
                "flops": [s.flops for s in self.stages],
                "flop_per_byte": [s.flops / s.nbytes for s in self.stages],
                "bound": [s.bound for s in self.stages],
            }
        )

    def __repr__(self) -> str:
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        return (
            f"at most {self.tok_per_s:.4g} tok/s ({self.latency_s * 1e3:.4g} ms) on {self.device}: "
            f"{self.nbytes / 1e9:.4g} GB a step at {self.gb_per_s:.4g} GB/s ({self.peak_kind}), "
            f"{self.dtype}, KV {self.kv_dtype}, context {self.kv_len}{batch}"
        )

    def _repr_html_(self) -> str:
        from calmnb.profile.report import html_table, stage_bar

        rows = [
            (s.stage, f"{s.seconds * 1e6:,.1f}", f"{100 * s.seconds / self.latency_s:.1f}", f"{s.nbytes / 1e6:,.1f}", s.bound)
            for s in self.stages
        ]
        table = html_table(["stage", "µs", "%", "MB", "bound by"], rows)
        return f"<div><p>{html.escape(str(self))}</p>{stage_bar((s.stage, s.seconds) for s in self.stages)}{table}</div>"


def speed_of_light(
    config: ModelConfig,
    device: str | Device | Bandwidth | Peak | float | None = None,
    *,
    bandwidth: float | None = None,
    tflops: float | None = None,
    kv_len: int = 1,
    kv_dtype: str = "fp16",
    dtype: str | None = None,
    batch: int = 1,
    tensor_cores: bool = False,
    is_tied: bool = False,
) -> SpeedOfLight:
    """Least time of a decode step, and where it goes.

    Parameters
    ----------
    config
        The model.
    device
        A name of `calmnb.profile.device.DEVICES`, a `Device`, what `measure_bandwidth` returned, a `Peak`, or GB/s.
    bandwidth
        GB/s (1e9 bytes) in place of the device's.
    tflops
        Arithmetic throughput, 1e12 FLOP/s, in place of the device's; unknown means without limit.
    kv_len
        Positions in the cache, the new token's included, >= 0.
    kv_dtype : {"fp16", "fp8"}
    dtype : {"fp16", "fp8", "gf4"} or None
        Weight storage; None for the model's.
    batch
        Sequences decoded together, >= 1: weights are read once for all, caches once each.
    tensor_cores
        Count the matrix units' throughput; a batch is then padded to a multiple of 16.
    is_tied
        Whether output matrix and embedding are one, for ``memory_bytes``.

    Returns
    -------
    SpeedOfLight

    Raises
    ------
    ConfigError
        If the device is not known or a number is out of range.

    Notes
    -----
    The model of zeux's "LLM inference speed of light" (2024, zeux.io) with calm's memory allowance, extended to mixtures
    of experts (a batch reads at most ``batch * n_experts_active`` experts) and sliding windows.

    Examples
    --------
    >>> from calmnb.config import ModelConfig
    >>> mistral = ModelConfig("mistral", "fp16", 4096, 14336, 128, 32, 32, 8, 32000)
    >>> round(speed_of_light(mistral, "RTX 4090").latency_s * 1e3, 5)
    14.10805
    """
    for name, value, least in (("kv_len", kv_len, 0), ("batch", batch, 1)):
        if value < least:
            raise ConfigError(f"speed_of_light: {name} is {value}; it must be at least {least}")
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"speed_of_light: kv_dtype is {kv_dtype!r}; accepted are {', '.join(KV_DTYPES)}")
    model = config if dtype is None else config.replace(dtype=dtype)
    label, rate, kind, arithmetic = _limits(device, tensor_cores)
    if bandwidth is not None:
        rate, kind, label = float(bandwidth), "user", label or "your device"
    if tflops is not None:
        arithmetic = float(tflops)
    for name, limit in (("bandwidth", rate), ("tflops", arithmetic)):
        if not limit > 0:
            raise ConfigError(f"speed_of_light: {name} is {limit}; give a device of the table or a positive number")
    padded = -(-batch // 16) * 16 if tensor_cores else batch
    stages = tuple(_stage_limit(model, stage, kv_len, kv_dtype, batch, padded, rate, arithmetic) for stage in _STAGES)
    weights = total_params(model, is_tied=is_tied) * DTYPE_BITS[model.dtype] // 8
    return SpeedOfLight(
        device=label,
        gb_per_s=rate,
        peak_kind=kind,
        tflops=arithmetic,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        kv_len=kv_len,
        batch=batch,
        stages=tuple(s for s in stages if s.nbytes),
        active_params=active_params(model),
        memory_bytes=weights + batch * kv_bytes(model, kv_len, kv_dtype=kv_dtype) + RESERVE_BYTES,
    )


def _limits(device: Any, tensor_cores: bool) -> tuple[str, float, str, float]:
    """Label, GB/s, kind of peak and TFLOP/s of whatever was given as a device."""
    if device is None:
        return "", math.nan, "user", math.inf
    if isinstance(device, int | float):
        return f"{device:.4g} GB/s", float(device), "user", math.inf
    if isinstance(device, str):
        device = get_device(device)
    if isinstance(device, Device):
        if tensor_cores and device.tensor_tflops is None:
            raise ConfigError(f"speed_of_light: no tensor throughput is known for {device.name}; pass tflops=")
        flops = device.tensor_tflops if tensor_cores and device.tensor_tflops else device.fp32_tflops
        return device.name, float(device.gb_per_s), "datasheet", float(flops)
    kind = getattr(device, "kind", "measured")
    return str(getattr(device, "device", "this machine")), float(device.gb_per_s), kind, math.inf


def _stage_limit(
    config: ModelConfig, stage: Stage, kv_len: int, kv_dtype: str, batch: int, padded: int, gb_per_s: float, tflops: float
) -> StageLimit:
    """Bytes, FLOPs and least time of `stage`; sequences of a batch share weights but not caches."""
    times = 1 if stage == "output" else config.n_layers
    one = stage_cost(config, stage, kv_len, kv_dtype=kv_dtype)
    if stage == "attention":
        nbytes, flops = one.bytes_min * batch * times, one.flops * batch * times
    else:
        nbytes = stage_cost(config, stage, max(kv_len, batch), kv_dtype=kv_dtype, n_tokens=batch).bytes_min * times
        flops = one.flops * padded * times
    by_memory, by_compute = nbytes / gb_per_s / 1e9, flops / tflops / 1e12
    return StageLimit(stage, nbytes, flops, max(by_memory, by_compute), "memory" if by_memory >= by_compute else "compute")
