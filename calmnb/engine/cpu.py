"""The CPU engine: reads fp16, fp8 and gf4 weights where they lie, with all cores, at the speed of memory.

Decoding one token is a single call into compiled code (`cpu_kernels`). Prompts run in batches through BLAS
(`cpu_prefill`).
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine import cpu_kernels as k
from calmnb.engine.base import EngineInfo, FullPolicy, Kernel, Phase, Recorder, Stage, Weights
from calmnb.engine.cpu_compile import kernel_entry
from calmnb.engine.cpu_prefill import prefill_batch
from calmnb.engine.cpu_state import CpuState, address_of, default_threads
from calmnb.engine.positions import Positions, check_kv_dtype, check_tokens
from calmnb.errors import BusyError, ConfigError

__all__ = ["BATCH", "CpuEngine", "cpu_name"]

#: Prompt tokens computed together: enough to amortise decoding the weights, few enough to stay in a few MB.
BATCH = 512
#: Shorter prompts go token by token: decoding all weights to float32 would take longer.
_MIN_BATCH = 6


def cpu_name() -> str:
    """Marketing name of this CPU, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class CpuEngine:
    """Compute logits on the CPU.

    Parameters
    ----------
    weights
        A model, as stored. Read in place, so it must outlive the engine.
    seq_len
        KV-cache slots; default ``min(config.max_seq_len, 4096)``.
    kv_dtype
        "fp16" or "fp8" (E5M2). Stores round to nearest even and saturate at the largest finite value.
    on_full
        "stop" or "roll".
    threads
        Threads that share a step; default: the physical cores this process may use. Results do not depend on it.
    progress
        Called with a line of text while kernels compile for the first time.

    Attributes
    ----------
    info, config, seq_len, kv_dtype, on_full, recorder
        As in `calmnb.engine.Engine`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        seq_len: int | None = None,
        kv_dtype: KvDtype = "fp16",
        on_full: FullPolicy = "stop",
        threads: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype)
        config = weights.config
        threads = default_threads() if threads is None else threads
        if not 1 <= threads <= 1024:
            raise ConfigError(f"threads is {threads}; accepted are 1 to 1024 (default: the {default_threads()} cores here)")
        self.config: ModelConfig = config
        self.seq_len = min(config.max_seq_len, 4096) if seq_len is None else seq_len
        self.kv_dtype: KvDtype = kv_dtype
        self.on_full: FullPolicy = on_full
        self.recorder: Recorder | None = None
        self.should_stop: Callable[[], bool] | None = None
        self.info = EngineInfo("cpu", cpu_name(), threads, "cpu")
        self._positions = Positions(config, self.seq_len, on_full)
        self._weights = weights
        self._state: CpuState | None = CpuState(weights, self.seq_len, kv_dtype, threads, kernel_entry(progress))
        self._lock = threading.Lock()
        self._stamps = np.zeros(5 * config.n_layers + 3, dtype=np.float64)
        self._kernels = _kernel_rows(config, f"matvec_{config.dtype}", f"attention_{kv_dtype}", f"embed_{config.dtype}")
        self._batch_kernels = _kernel_rows(
            config, f"matmul_{config.dtype}", f"attention_batch_{kv_dtype}", f"embed_{config.dtype}"
        )

    def step(self, token: int, pos: int) -> NDArray[np.float32]:
        """Decode one token; see `calmnb.engine.Engine.step`. The logits are overwritten by the next call."""
        (token,) = check_tokens(self.config, [token])
        with self._running() as state:
            self._positions.check(pos, 1)
            self._step(state, int(token), pos, "decode", True)
            return state.logits

    def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> NDArray[np.float32]:
        """Feed several tokens; see `calmnb.engine.Engine.prefill`."""
        ids = check_tokens(self.config, tokens)
        with self._running() as state:
            self._positions.check(pos, len(ids))
            rows = len(ids) if all_logits else 1
            logits = np.empty((rows, self.config.vocab_size), dtype=np.float32)
            done = 0
            while done < len(ids):
                # Once the cache rolls, every token changes what the next one can see: those go one by one.
                room = min(len(ids) - done, BATCH, self.seq_len - pos)
                is_last = done + max(room, 1) == len(ids)
                if room >= _MIN_BATCH:
                    wanted = room if all_logits else int(is_last)
                    target = logits[done : done + room] if all_logits else logits[:wanted]
                    self._batch(state, ids[done : done + room], pos, target)
                else:
                    room = 1
                    is_last = done + 1 == len(ids)
                    self._step(state, int(ids[done]), pos, "prefill", all_logits or is_last)
                    if all_logits or is_last:
                        logits[done if all_logits else 0] = state.logits
                done, pos = done + room, pos + room
            return logits if all_logits else logits[0]

    def reset(self) -> None:
        """Forget the sequence, so that the next position is 0."""
        self._positions.end = 0

    def close(self) -> None:
        """Stop the threads and free the cache. Idempotent; waits for a step that another thread is running."""
        with self._lock:
            state, self._state = self._state, None
            if state is not None:
                state.close()

    @contextmanager
    def _running(self) -> Iterator[CpuState]:
        if not self._lock.acquire(blocking=False):
            raise BusyError("this engine is computing for another thread; wait for it, or open the model a second time")
        try:
            if self._state is None:
                raise ConfigError("this engine was closed; open the model again")
            yield self._state
        finally:
            self._lock.release()

    def _step(self, state: CpuState, token: int, pos: int, phase: Phase, wants_logits: bool) -> None:
        positions, recorder, stamps = self._positions, self.recorder, self._stamps
        # Until the step has ended, what stands at `pos` and after is not to be relied on.
        positions.end = min(positions.end, pos)
        state.context[k.STAMPS] = 0 if recorder is None else address_of(stamps)
        length = positions.length(pos)
        state.run(k.J_STEP, token, pos, positions.slot(pos), length, int(positions.rolls(pos)), int(wants_logits))
        positions.end = pos + 1
        if recorder is not None:
            recorder.add(phase, pos, length, 1, self._kernels, stamps[:-1], stamps[1:], stamps[0], stamps[-1])

    def _batch(self, state: CpuState, ids: NDArray[np.int64], pos: int, logits: NDArray[np.float32]) -> None:
        n, positions = len(ids), self._positions
        positions.end = min(positions.end, pos)
        marks = prefill_batch(state, self._weights, ids, pos, logits, self.should_stop)
        positions.end = pos + n
        if self.recorder is not None:
            length = positions.length(pos + n - 1)
            times = np.array(marks)
            self.recorder.add("prefill", pos, length, n, self._batch_kernels, times[:-1], times[1:], marks[0], marks[-1])


def _kernel_rows(config: ModelConfig, product: str, attention: str, embed: str) -> tuple[Kernel, ...]:
    """Rows of a step in the order in which the stamps delimit them."""
    stages: tuple[tuple[Stage, str], ...] = (
        ("matmul_qkv", product),
        ("attention", attention),
        ("matmul_attn", product),
        ("matmul_ffn_up", product),
        ("matmul_ffn_down", product),
    )
    rows = [Kernel(stage, layer, name) for layer in range(config.n_layers) for stage, name in stages]
    return (Kernel("embed", -1, embed), *rows, Kernel("output", -1, product))
