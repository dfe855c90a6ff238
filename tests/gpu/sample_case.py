"""One call of the sampling kernels with its exact answer: shared by the tests and the timing script.

`exact_draw` follows calmnb/sampler.py in whole numbers: weights are float32, their sums multiples of 2**-43, as the kernel adds
them up. The sampler itself adds float32 weights one after another, so where the coin falls within the rounding of that sum,
its token may be a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calmnb.engine.cuda_ops import (
    SAMPLE_SCRATCH_BYTES,
    HostToken,
    SampleArgs,
    SampleParams,
    SamplePlan,
    history_row,
    plan_sampling,
    sample_params,
    sample_specs,
    state_words,
)
from calmnb.errors import CalmnbError
from calmnb.kernels import KernelSpec
from calmnb.sampler import Sampler, Sampling

Floats = NDArray[np.float32]
Exp = Callable[[Floats], Floats]
FIXED = 2.0**43
HOST_CAP = 4


def _exp(x: Floats) -> Floats:
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(x)


@dataclass(frozen=True)
class Draw:
    """What may be drawn, and what the coin draws.

    Attributes
    ----------
    ids : int (kept,)
        Ids kept, rising.
    running : uint64 (kept,)
        Running sum of their weights.
    at : int
        Where the coin falls, below the last running sum.
    token : int
    """

    ids: NDArray[np.int64]
    running: NDArray[np.uint64]
    at: int
    token: int

    def distance(self, token: int) -> float:
        """How far the coin lies from `token`'s interval, as a share of the sum; 1 if it is not kept."""
        i = int(np.searchsorted(self.ids, token))
        if i == len(self.ids) or self.ids[i] != token:
            return 1.0
        low, high = int(self.running[i - 1]) if i else 0, int(self.running[i])
        return max(low - self.at, self.at - high, 0) / int(self.running[-1])

    def rounding(self) -> float:
        """How far a float32 running sum, as calmnb/sampler.py's, strays from the exact one, as a share of the sum."""
        weights = np.diff(self.running, prepend=np.uint64(0)).astype(np.float64)
        strays = weights.cumsum(dtype=np.float64) - weights.astype(np.float32).cumsum(dtype=np.float32)
        return float(np.abs(strays).max() / weights.sum())


def penalised(sampling: Sampling, logits: Floats, history: Sequence[int]) -> Floats:
    """Logits after the repetition penalty."""
    return Sampler(sampling)._penalised(logits, history) if sampling.repetition_penalty != 1.0 else logits


def exact_draw(sampling: Sampling, l: Floats, coin: float, exp: Exp = _exp) -> Draw:  # noqa: E741
    """Draw from penalised logits, sums exact."""
    top, t = l.max(), np.float32(sampling.temperature)
    with np.errstate(over="ignore"):
        w = exp((l - top) / t)
    fixed = np.rint(w.astype(np.float64) * FIXED).astype(np.uint64)
    keep = np.ones(len(l), bool)
    if 0 < sampling.top_k < len(l):
        keep &= l >= np.partition(l, len(l) - sampling.top_k)[len(l) - sampling.top_k]
    if sampling.top_p < 1:
        kept = np.flatnonzero(keep)
        heaviest = kept[np.argsort(-w[kept], kind="stable")]
        sums = fixed[heaviest].cumsum()
        reach = max(int(np.ceil(sampling.top_p * float(int(sums[-1])))), 1)
        keep &= w >= w[heaviest[int(np.searchsorted(sums, np.uint64(min(reach, int(sums[-1])))))]]
    offset = sample_params(sampling, 1, len(l)).min_p_offset
    keep &= l >= min(top + np.float32(offset), top)
    ids = np.flatnonzero(keep)
    running = fixed[ids].cumsum()
    at = int(coin * (1 << 24)) * int(running[-1]) >> 24
    return Draw(ids, running, at, int(ids[int(np.searchsorted(running, np.uint64(at), side="right"))]))


def block_maxima(logits: Floats, blocks: int) -> Floats:
    """What the logits kernel leaves: for each block the maximum, its index as int bits, the sum of exp(l - maximum), 0."""
    out = np.zeros((blocks, 4), np.float32)
    start = 0
    for row, part in zip(out, np.array_split(logits, blocks), strict=True):
        values = np.where(np.isnan(part), -np.inf, part)
        at = int(values.argmax())
        row[0] = values[at]
        row[1:2].view(np.int32)[0] = start + at
        with np.errstate(invalid="ignore"):
            row[2] = np.where(part == -np.inf, 0.0, np.exp(part.astype(np.float64) - float(row[0]))).sum()
        start += len(part)
    return out


def random_logits(rng: np.random.Generator, vocab: int) -> Floats:
    """Logits of all the shapes that make a sampler stumble."""
    kind = rng.integers(0, 10)
    scale = float(rng.choice([0.01, 0.3, 1.0, 3.0, 10.0, 300.0]))
    x = (rng.standard_normal(vocab) * scale + rng.choice([0.0, -20.0, 20.0, 1e4], p=[0.7, 0.1, 0.15, 0.05])).astype(np.float32)
    if kind == 0:
        x = np.round(x)  # many ties
    elif kind == 1:
        x[:] = rng.choice([0.0, -0.0, 1.5, -7.25])  # all equal
    elif kind == 2:
        x[rng.random(vocab) < 0.5] = -np.inf
    elif kind == 3:
        x[rng.integers(0, vocab, max(1, vocab // 3))] = x[rng.integers(0, vocab)]  # one large tie
    elif kind == 4:
        x = -np.abs(rng.exponential(scale, vocab)).astype(np.float32)  # heavy at the top
    elif kind == 5:
        x = np.where(rng.random(vocab) < 0.5, 0.0, -0.0).astype(np.float32) + np.float32(0)
        x[rng.integers(0, vocab)] = -0.0
    elif kind == 6:
        x = x.astype(np.float16).astype(np.float32)
    if rng.random() < 0.05:
        x[rng.integers(0, vocab, 2)] = rng.choice([np.nan, np.inf, -np.inf], 2)
    if rng.random() < 0.01:
        x[:] = -np.inf
    return x


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    """Settings at and between their ends."""
    return Sampling(
        temperature=float(rng.choice([0.0, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.0, 1.3, 5.0, 1e3, 1e6])),
        top_k=int(rng.choice([0, 0, 1, 2, 40, rng.integers(1, vocab + 1), vocab, vocab + 9])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5, 1e-9, 0.999999, 1 - 1e-12, rng.uniform(0.01, 1)])),
        min_p=float(rng.choice([0.0, 0.0, 0.1, 0.02, 1e-6, 0.999, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.7, 2.0])),
        repetition_range=int(rng.choice([-1, 0, 1, 16, 256])),
    )


def sampler_choice(sampling: Sampling, logits: Floats, history: Sequence[int], seed: int, n_ids: int) -> tuple[int | str, int]:
    """What calmnb/sampler.py says: a token or an error, and the generator's state afterwards."""
    sampler = Sampler(sampling, n_ids=n_ids)
    sampler.rng.state = seed
    try:
        return sampler.sample(logits, history), sampler.rng.state
    except CalmnbError as error:
        return str(error), sampler.rng.state


class SampleCase:
    """Buffers for one vocabulary, and `run` with any settings.

    Parameters
    ----------
    gpu : tests.gpu.launcher.Launcher or the emulator's
    logits : float32 (vocab,)
    best_blocks : int
        Blocks of the logits kernel; 0: its maxima are not there.
    blocks : int
        Change the number of blocks.
    """

    def __init__(
        self,
        gpu: Any,
        logits: Floats,
        *,
        best_blocks: int = 0,
        history_cap: int = 64,
        blocks: int = 0,
        rehearse: bool = True,
        defines: dict[str, int] | None = None,
    ) -> None:
        cp = gpu.cupy
        self.gpu, self.logits, self.history_cap = gpu, logits, history_cap
        vocab = len(logits)
        plan = plan_sampling(vocab, blocks or gpu.device.sm_count, rehearse=rehearse)
        self.plan: SamplePlan = plan
        self.specs: tuple[KernelSpec, ...] = tuple(s.with_defines(**defines) if defines else s for s in sample_specs())
        padded = np.full(-(-vocab // 64) * 64, np.nan, np.float32)  # what lies behind must not be looked at
        padded[:vocab] = logits
        maxima = block_maxima(logits, min(best_blocks, vocab)) if best_blocks else np.zeros((0, 4), np.float32)
        self.arrays = {
            "logits": cp.asarray(padded),
            "best": cp.asarray(np.concatenate([maxima, np.full((1, 4), np.nan, np.float32)])),
            "adjusted": cp.asarray(np.full_like(padded, -1.0)),
            "candidates": cp.asarray(np.full_like(padded, -1.0)),
            "scratch": cp.asarray(np.zeros(SAMPLE_SCRATCH_BYTES, np.uint8)),
            "params": cp.asarray(np.zeros(64, np.uint8)),
            "state": cp.asarray(np.zeros(16, np.int32)),
            "history": cp.asarray(np.zeros(history_cap, np.int32)),
            "host_ring": cp.asarray(np.zeros((HOST_CAP, 4), np.int32)),
            "stamp": cp.asarray(np.zeros(2, np.uint64)),
        }
        self.args = SampleArgs(
            **{name: array.data.ptr for name, array in self.arrays.items()},
            vocab=vocab, n_best=len(maxima), history_cap=history_cap, host_cap=HOST_CAP, rehearse=int(plan.rehearse),
        )  # fmt: skip

    def set(self, sampling: Sampling, rng_state: int, history: Sequence[int], *, n_ids: int = 0, step: int = 0) -> None:
        """Put the settings where the kernels read them; the sequence is `history`."""
        cp = self.gpu.cupy
        self.sampling, self.step = sampling, step
        self.pos = max(len(history) - 1, 0)
        params = np.frombuffer(bytes(sample_params(sampling, rng_state, n_ids or len(self.logits))), np.uint8)
        self.arrays["params"][: len(params)] = cp.asarray(params)
        self.arrays["state"][:] = cp.asarray(np.array(state_words(1, self.pos, self.history_cap, step=step), np.int32))
        self.arrays["history"][:] = cp.asarray(history_row(history, self.pos, self.history_cap))

    def launch(self, stream: Any = None, *, pdl: bool = True, order: int = 0) -> None:
        """Queue the kernel that the settings ask for."""
        greedy = self.sampling.is_greedy
        spec = self.specs[0 if greedy else 1]
        shared = self.plan.max_shared if greedy else self.plan.draw_shared
        threads = dict(spec.defines).get("SAMPLE_THREADS", self.plan.block) if not greedy else self.plan.block
        if hasattr(self.gpu, "launch_grid"):
            self.gpu.launch_grid(spec, self.args, self.plan.blocks, int(threads), shared, together=not greedy, order=order)
        else:
            self.gpu.launch_raw(self.gpu.function(spec), self.plan.blocks, int(threads), shared, self.args, stream, pdl=pdl)

    def run(self, **options: Any) -> tuple[HostToken, int]:
        """Launch; return what the host gets and the generator's state afterwards. Checks what else a step leaves."""
        cp = self.gpu.cupy
        self.launch(**options)
        cp.cuda.Device().synchronize()
        entry = HostToken(*(int(v) for v in cp.asnumpy(self.arrays["host_ring"])[self.step % HOST_CAP]))
        entry.logprob = float(cp.asnumpy(self.arrays["host_ring"])[self.step % HOST_CAP, 1:2].view(np.float32)[0])
        state = cp.asnumpy(self.arrays["state"]).tolist()
        pos = self.pos + 1
        assert (entry.pos, entry.step) == (pos, self.step + 1), "what the host was told"
        assert state == state_words(max(entry.token, 0), pos, self.history_cap, step=self.step + 1), "the state"
        assert int(cp.asnumpy(self.arrays["history"])[pos % self.history_cap]) == entry.token, "the history"
        scratch = cp.asnumpy(self.arrays["scratch"])
        assert not scratch[: 2048 * 8].any(), "the histogram was not cleared"
        counter, arrivals = scratch[-16:-8].view(np.uint32).tolist()
        assert counter == 0
        assert arrivals % self.plan.blocks == 0
        params = SampleParams.from_buffer_copy(cp.asnumpy(self.arrays["params"]).tobytes())
        return entry, int(params.rng)
