"""Recordings made without an engine or a clock: steps whose every time is chosen, so that tables are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calmnb.config import ModelConfig
from calmnb.engine.base import Kernel
from calmnb.engine.stages import stage_cost
from calmnb.profile.describe import config_to_dict
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session

SMOL = ModelConfig(
    arch="llama", dtype="fp8", dim=576, hidden_dim=1536, head_dim=64, n_layers=30, n_heads=9, n_kv_heads=3,
    vocab_size=49152, max_seq_len=8192, rotary_dim=64,
)  # fmt: skip
LLAMA_1B = ModelConfig(
    arch="llama", dtype="fp16", dim=2048, hidden_dim=8192, head_dim=64, n_layers=16, n_heads=32, n_kv_heads=8,
    vocab_size=128256, max_seq_len=8192, rotary_dim=64,
)  # fmt: skip


def kernels_of(config: ModelConfig) -> tuple[Kernel, ...]:
    """The rows that the CPU engine reports."""
    rows = [Kernel("embed", -1, "embed")]
    for layer in range(config.n_layers):
        rows += [
            Kernel("matmul_qkv", layer, f"matvec_{config.dtype}"),
            Kernel("attention", layer, "attention_fp16"),
            Kernel("matmul_attn", layer, f"matvec_{config.dtype}"),
            Kernel("matmul_ffn_up", layer, f"matvec_{config.dtype}"),
            Kernel("matmul_ffn_down", layer, f"matvec_{config.dtype}"),
        ]
    return (*rows, Kernel("output", -1, f"matvec_{config.dtype}"))


def meta_of(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """Metadata of a session on a 2-thread CPU."""
    return {
        "model": "fake-model",
        "engine": "cpu",
        "device": "Fake CPU",
        "threads": 2,
        "time_source": "cpu",
        "dtype": config.dtype,
        "kv_dtype": "fp16",
        "seq_len": 4096,
        "config": config_to_dict(config),
        "has_bias": False,
        "peaks": {"measured": {"gb_per_s": 34.2, "source": "fake"}},
        "settings": {"warmup": 1},
        "versions": {"calmnb": "0.1.0", "numba": "0.65.0", "numpy": "2.2.0"},
        "date": "2026-11-29T19:00:00+00:00",
        "git_revision": "abc1234",
        **more,
    }


def noisy_recorder(
    config: ModelConfig, *, tokens: int = 200, prompt: int = 24, first: int = 0, stride: int = 1,
    gb_per_s: dict[str, float] | None = None, fixed_s: float = 4e-6, seed: int = 0, **meta: Any,
) -> SessionRecorder:  # fmt: skip
    """A recording that looks real: each row takes its bytes over its stage's rate, plus a fixed time, plus noise."""
    rates = {"matmul_qkv": 21, "attention": 9, "matmul_attn": 18, "matmul_ffn_up": 24, "matmul_ffn_down": 20, "output": 27}
    rates |= gb_per_s or {}
    random = np.random.default_rng(seed)
    recorder = SessionRecorder(meta_of(config, **meta))
    kernels = kernels_of(config)
    now = 1000.0

    def run(phase: Any, pos: int, kv_len: int, n: int, slow: float) -> float:
        costs = {s: stage_cost(config, s, kv_len, n_tokens=n) for s in {k.stage for k in kernels}}
        times = np.array([costs[k.stage].bytes_min / rates.get(k.stage, 1.0) / 1e9 + fixed_s for k in kernels]) * slow
        if n > 1:
            times += np.array([costs[k.stage].flops for k in kernels]) / 120e9
        times *= random.lognormal(0.0, 0.08, len(times))
        pauses = random.exponential(fixed_s / 8, len(times))
        ends = now + np.cumsum(times + pauses)
        recorder.add(phase, pos, kv_len, n, kernels, ends - times, ends, now, float(ends[-1]) + fixed_s)
        return float(ends[-1]) + fixed_s

    now = run("prefill", 0, prompt, prompt, 1.0)
    recorder.sampled(prompt, 5, now, now + 6e-5)
    now += 2e-4
    for i in range(tokens):
        pos = max(first, prompt) + i * stride
        now = run("decode", pos, pos + 1, 1, 1.6 if i == 0 else random.choice([1.0, 1.9], p=[0.985, 0.015])) + 3e-5
        if stride == 1:
            recorder.sampled(pos + 1, int(random.integers(config.vocab_size)), now, now + 6e-5)
        now += 2e-4
        if stride != 1:
            recorder._next_pos = pos + stride
    return recorder


def exact_session(
    contexts: Sequence[int], *, attention_us: Callable[[int], float], rest_us: float, tokens: int = 4, rounds: int = 1,
    stage_us: Callable[[str], float] | None = None, config: ModelConfig = SMOL, gap_us: float = 0.0, **meta: Any,
) -> Session:  # fmt: skip
    """Runs of `tokens` steps at each of `contexts` without any noise: all layers' attention takes `attention_us(kv_len)`.

    The other kernels share `rest_us`, or take `stage_us(stage)` each; a pause of `gap_us` ends each step.
    """
    recorder = SessionRecorder(meta_of(config, **meta))
    kernels = kernels_of(config)
    others = sum(k.stage != "attention" for k in kernels)
    now = 0.0
    for _ in range(rounds):
        for context in contexts:
            recorder.new_run()
            for pos in range(context, context + tokens):
                part = attention_us(pos + 1) / config.n_layers
                each = stage_us or (lambda stage: rest_us / others)
                ends = now + np.cumsum([part if k.stage == "attention" else each(k.stage) for k in kernels]) * 1e-6
                starts = np.concatenate([[now], ends[:-1]])
                recorder.add("decode", pos, pos + 1, 1, kernels, starts, ends, now, float(ends[-1]) + 1e-6 * gap_us)
                now = float(ends[-1]) + 1e-6 * gap_us + 1e-5
    return recorder.session()
