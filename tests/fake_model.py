"""A model that says what a script tells it to, at a set pace, and reports steps like an engine: for widget tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calmnb.config import ModelConfig
from calmnb.engine.base import EngineInfo, Kernel
from calmnb.engine.stages import stage_cost
from calmnb.errors import BusyError, ContextError

CONFIG = ModelConfig(
    arch="llama", dtype="fp8", dim=576, hidden_dim=1536, head_dim=64, n_layers=30, n_heads=9, n_kv_heads=3, vocab_size=49152,
    max_seq_len=8192, rotary_dim=64,
)  # fmt: skip


@dataclass(frozen=True)
class FakeToken:
    id: int
    text: str
    pos: int
    logprob: float
    time_s: float


class FakeEngine:
    """Pretends to be a CPU engine reading at `gb_per_s`."""

    def __init__(self, config: ModelConfig = CONFIG, seq_len: int = 4096, gb_per_s: float = 8.0) -> None:
        self.info = EngineInfo(engine="cpu", device="Fake CPU", threads=2, time_source="cpu")
        self.config, self.seq_len, self.kv_dtype, self.on_full = config, seq_len, "fp16", "stop"
        self.recorder: Any = None
        self.gb_per_s = gb_per_s
        per_layer = [
            ("matmul_qkv", "matvec_fp8"), ("attention", "attention_fp16"), ("matmul_attn", "matvec_fp8"),
            ("matmul_ffn_up", "matvec_fp8"), ("matmul_ffn_down", "matvec_fp8"),
        ]  # fmt: skip
        self.kernels = (
            Kernel("embed", -1, "embed_fp8"),
            *(Kernel(stage, layer, name) for layer in range(config.n_layers) for stage, name in per_layer),  # type: ignore[arg-type]
            Kernel("output", -1, "matvec_fp8"),
        )
        self._rng = np.random.default_rng(7)

    def durations(self, kv_len: int) -> np.ndarray:
        """Seconds of each kernel: its bytes at the pretended bandwidth, a fixed cost, and noise."""
        cost = np.array([stage_cost(self.config, k.stage, kv_len).bytes_min for k in self.kernels], float)
        return (cost / self.gb_per_s / 1e9 + 4e-6) * self._rng.normal(1, 0.04, len(cost)).clip(0.8, 1.3)

    def record(self, recorder: Any, phase: str, pos: int, kv_len: int, n_tokens: int, start: float) -> float:
        """Report one step that began at `start`; return its end."""
        ends = start + np.cumsum(self.durations(kv_len) * (1 if phase == "decode" else 3))
        starts = np.concatenate(([start], ends[:-1]))
        if recorder is not None:
            recorder.add(phase, pos, kv_len, n_tokens, self.kernels, starts, ends, start, float(ends[-1]) + 2e-5)
        return float(ends[-1]) + 2e-5


class FakeGeneration:
    """Iterates over a scripted answer."""

    def __init__(self, model: FakeModel, prompt_ids: list[int], pieces: Sequence[str], max_tokens: int, recorder: Any) -> None:
        self.model, self.prompt_ids, self.recorder = model, prompt_ids, recorder
        self.text, self.token_ids, self.stop_reason = "", [], None
        self.prefill_s = self.decode_s = self.tok_per_s = 0.0
        self._cancel = threading.Event()
        self._tokens = self._run(pieces, max_tokens)

    def __iter__(self) -> Iterator[FakeToken]:
        return self

    def __next__(self) -> FakeToken:
        return next(self._tokens)

    def _run(self, pieces: Sequence[str], max_tokens: int) -> Iterator[FakeToken]:
        model, engine = self.model, self.model.engine
        if not model.lock.acquire(blocking=False):
            raise BusyError("the model is generating already")
        try:
            n = len(self.prompt_ids)
            end = engine.record(self.recorder, "prefill", 0, n, n, time.perf_counter())
            if model.prompt_s and self._cancel.wait(model.prompt_s):
                self.stop_reason = "cancelled"
                return
            for i, piece in enumerate(pieces):
                if self._cancel.is_set():
                    self.stop_reason = "cancelled"
                    return
                if i >= max_tokens:
                    self.stop_reason = "length"
                    return
                if n + i >= engine.seq_len:
                    self.stop_reason = "context"
                    return
                if model.fail_at == i:
                    raise RuntimeError("the fake engine broke")
                if i:
                    end = engine.record(self.recorder, "decode", n + i - 1, n + i, 1, time.perf_counter())
                time.sleep(max(end - time.perf_counter(), 0) if model.token_s is None else model.token_s)
                if self.recorder is not None:
                    self.recorder.sampled(n + i, 100 + i, end, end + 1e-5)
                self.text += piece
                self.token_ids.append(100 + i)
                yield FakeToken(100 + i, piece, n + i, -0.5, time.perf_counter())
            self.stop_reason = "eos"
        finally:
            model.lock.release()

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        self._tokens.close()

    def __enter__(self) -> FakeGeneration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeModel:
    """Like `calmnb.model.Model`, as far as widgets care.

    `answers` are said in turn, the last one for ever; `token_s` is the pace (None: what the reported steps take),
    `prompt_s` the time to read the prompt.
    """

    def __init__(
        self, *answers: str | Sequence[str], token_s: float | None = 0.0, prompt_s: float = 0.0, seq_len: int = 4096
    ) -> None:
        self.path = "smollm2-fake.calm"
        self.engine = FakeEngine(seq_len=seq_len)
        self.config = self.engine.config
        self.answers = [self.cut(a) if isinstance(a, str) else list(a) for a in answers or ("Hello there.",)]
        self.token_s, self.prompt_s = token_s, prompt_s
        self.fail_at = -1
        self.lock = threading.Lock()
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []

    @staticmethod
    def cut(text: str) -> list[str]:
        return [text[i : i + 5] for i in range(0, len(text), 5)]

    @property
    def is_busy(self) -> bool:
        return self.lock.locked()

    def generate(self, prompt: Any, *, max_tokens: int = 256, recorder: Any = None, **options: Any) -> FakeGeneration:
        ids = list(range(sum(len(m["content"].split()) + 4 for m in prompt)))
        if len(ids) >= self.engine.seq_len:
            raise ContextError(f"the prompt has {len(ids)} tokens; the context holds {self.engine.seq_len}; shorten it")
        self.prompts.append(prompt)
        self.options.append({"max_tokens": max_tokens} | options)
        pieces = self.answers[min(len(self.prompts), len(self.answers)) - 1]
        return FakeGeneration(self, ids, pieces, max_tokens, recorder)

    def close(self) -> None:
        pass
