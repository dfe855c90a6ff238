"""The seam between models and whatever computes them: `Engine`, `Weights`, `Recorder`.

An engine computes logits and, while recording, says when each of its kernels began and ended. It knows no table,
plot or widget; those read what the recorder kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from calmnb.config import KvDtype, ModelConfig

__all__ = [
    "STAGES",
    "Engine",
    "EngineInfo",
    "FullPolicy",
    "Kernel",
    "LayerWeights",
    "Phase",
    "PromptStopped",
    "Recorder",
    "Stage",
    "TimeSource",
    "Weights",
]

Stage = Literal[
    "embed", "matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output", "sample", "other", "gap"
]
Phase = Literal["prefill", "decode"]
FullPolicy = Literal["stop", "roll"]
#: How kernels are timed: stamps of starts and ends or of ends alone, CUDA events around single launches, CUPTI's records, a
#: report of Nsight Systems, or the CPU's clock.
TimeSource = Literal["stamps", "stamps-light", "events", "cupti", "nsys", "cpu"]

#: Stages of a step in execution order. ``other`` is work of no known stage (another program's kernels in an nsys report);
#: ``gap`` is what is left of a step's time when its stages are subtracted.
STAGES: tuple[Stage, ...] = (
    "embed",
    "matmul_qkv",
    "attention",
    "matmul_attn",
    "matmul_ffn_up",
    "matmul_ffn_down",
    "output",
    "sample",
    "other",
    "gap",
)


class Kernel(NamedTuple):
    """One timed interval of a step.

    `layer` is -1 outside the layer stack. `name` is the engine's own name of the code that ran
    (``"matvec_fp8"``); several kernels may belong to one stage.
    """

    stage: Stage
    layer: int
    name: str


@dataclass(frozen=True)
class LayerWeights:
    """Views into one layer's tensors, as stored. Shapes are logical; gf4 arrays hold 8 weights a word.

    Attributes
    ----------
    attn_norm : float32 (dim,)
    wq, wk, wv : (q_dim, dim), (kv_dim, dim), (kv_dim, dim)
    wo : (dim, q_dim)
    qkv_bias : float32 (q_dim + 2 * kv_dim,) in the order q, k, v, or None
    mlp_norm : float32 (dim,), or None for a parallel block
    w1, w2, w3 : gate (hidden_dim, dim), down (dim, hidden_dim), up (hidden_dim, dim), with a leading n_experts for MoE
    moegate : (n_experts, dim), or None for a dense FFN

    Storage dtypes: float16 for fp16, uint8 (E5M2 bytes) for fp8, uint32 with the last dimension divided by 8 for gf4.
    q and k rows are in interleaved-pair rotary order (channels 2 i and 2 i + 1 of a head rotate together).
    """

    attn_norm: NDArray[np.float32]
    wq: NDArray[np.generic]
    wk: NDArray[np.generic]
    wv: NDArray[np.generic]
    wo: NDArray[np.generic]
    qkv_bias: NDArray[np.float32] | None
    mlp_norm: NDArray[np.float32] | None
    moegate: NDArray[np.generic] | None
    w1: NDArray[np.generic]
    w2: NDArray[np.generic]
    w3: NDArray[np.generic]


@dataclass(frozen=True)
class Weights:
    """Views into a mapped model file: nothing is copied or expanded.

    ``output`` is `embed` itself (the same object) when the output matrix is tied.
    """

    config: ModelConfig
    embed: NDArray[np.generic]
    layers: tuple[LayerWeights, ...]
    final_norm: NDArray[np.float32]
    output: NDArray[np.generic]

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.output is self.embed


@dataclass(frozen=True)
class EngineInfo:
    """What an engine runs on, for tables and plot captions.

    `device` is the marketing name (``"NVIDIA H200"``, ``"AMD EPYC ..."``), `threads` counts CPU worker threads
    (0 on a GPU), `time_source` says how kernels are timed while recording.
    """

    engine: Literal["reference", "cpu", "cuda"]
    device: str
    threads: int
    time_source: TimeSource


class Recorder(Protocol):
    """Receives the times of one step. The engine calls it after the step, off the timed path."""

    def add(
        self,
        phase: Phase,
        pos: int,
        kv_len: int,
        n_tokens: int,
        kernels: Sequence[Kernel],
        starts: NDArray[np.float64],
        ends: NDArray[np.float64],
        step_start: float,
        step_end: float,
    ) -> None:
        """Keep one step.

        Parameters
        ----------
        phase
            "prefill" for a batch of prompt tokens, "decode" for one token.
        pos
            Position of the step's first token.
        kv_len
            Positions attended to by the step's last token.
        n_tokens
            Tokens computed together; 1 when decoding.
        kernels
            One entry a row, in execution order. The same tuple object every step, where it does not change.
        starts, ends : float64 (len(kernels),)
            Seconds on the ``time.perf_counter`` clock (CPU) or seconds after `step_start` mapped onto it (GPU).
            May be a reused buffer: copy to keep.
        step_start, step_end
            The whole step, on the same clock.
        """
        ...

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        """Keep the time it took to choose `token`, which will stand at position `pos`. Called by the token loop."""
        ...


class PromptStopped(Exception):
    """An engine gave up a batch of prompt tokens because its `should_stop` said so; none of them counts as cached."""


@runtime_checkable
class Engine(Protocol):
    """Computes logits for one sequence, and owns its KV cache.

    Positions are absolute and grow from 0. The caller may go back to an earlier position (to edit a prompt or retry an
    answer) by passing a smaller `pos`: whatever was cached at and after it is overwritten. Going back is impossible
    once the cache has rolled (``pos > seq_len``); engines raise `ContextError` then.

    An engine that can leave `prefill` halfway has an attribute ``should_stop: Callable[[], bool] | None``, looked at every few
    milliseconds, and raises `PromptStopped` when it says so. Others are given short batches.
    """

    info: EngineInfo
    config: ModelConfig
    seq_len: int
    kv_dtype: KvDtype
    on_full: FullPolicy
    recorder: Recorder | None

    def step(self, token: int, pos: int) -> NDArray[np.float32]:
        """Decode one token.

        Parameters
        ----------
        token
            Id of the token fed in, below ``config.vocab_size``.
        pos
            Its position, from 0; keys and values of earlier positions must be cached.

        Returns
        -------
        float32 array, shape (vocab_size,)
            Logits of the next token; valid until the next call.

        Raises
        ------
        ContextError
            If ``pos >= seq_len`` and ``on_full == "stop"``.
        """
        ...

    def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> NDArray[np.float32]:
        """Feed several tokens at once, starting at `pos`.

        Parameters
        ----------
        tokens
            Ids, at least one.
        pos
            Position of the first.
        all_logits
            Whether to return the logits after every token, and not after the last alone.

        Returns
        -------
        float32 array, shape (vocab_size,), or (len(tokens), vocab_size) with `all_logits`
            Valid until the next call.

        Raises
        ------
        ContextError
            If the tokens do not fit in the context and ``on_full == "stop"``.
        PromptStopped
            If `should_stop` said so meanwhile.
        """
        ...

    def close(self) -> None:
        """Free the KV cache, threads and device memory; the engine cannot be used afterwards. Idempotent."""
        ...
