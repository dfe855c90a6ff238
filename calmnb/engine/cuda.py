"""The CUDA engine: one graph a step, replayed; the chosen token never leaves the GPU before it is used.

`CudaEngine` owns the memory and the graphs. What a step consists of is in `cuda_program`, sizes are in `cuda_memory` and
the plans, and everything that touches the GPU goes through `cuda_device`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine.base import EngineInfo, FullPolicy, Kernel, Phase, Recorder, Weights
from calmnb.engine.cuda_device import CudaDevice, Gpu
from calmnb.engine.cuda_graphs import KernelSet, StepGraphs, step_specs
from calmnb.engine.cuda_memory import MemoryPlan
from calmnb.engine.cuda_ops import HOST_RING, STATE_WORDS, HostToken, embed_grid, history_row, sample_params, state_words
from calmnb.engine.cuda_prefill import CHUNK, PrefillArgs, can_prefill, prefill_layout, run_logits, run_prefill, run_resume
from calmnb.engine.cuda_program import (
    HOST_RING_BYTES,
    Ending,
    activation_layout,
    cache_bytes,
    make_plans,
)
from calmnb.engine.cuda_runner import StepRunner
from calmnb.engine.cuda_trials import CudaTrials
from calmnb.engine.cuda_weights import (
    Layout,
    Region,
    UploadProgress,
    fill_regions,
    find_wide,
    random_regions,
    upload,
    weight_regions,
)
from calmnb.engine.positions import Positions, check_kv_dtype, check_tokens
from calmnb.errors import CalmnbError, ConfigError, DeviceError, UnsupportedError
from calmnb.sampler import Sampling

__all__ = ["CudaEngine", "Decoded", "open_cuda_engine"]

#: Steps queued beyond the token the caller has: enough to hide the host, few enough to stop within a moment.
_AHEAD = 8
_PROMPT_STATES = 256
#: Prompts shorter than this go step by step: a step reads the weights once, a batch decodes them too.
_FEW = 4


class Decoded(NamedTuple):
    """A token chosen on the device: its id, its position and its log-probability under the model's own distribution."""

    token: int
    pos: int
    logprob: float


class CudaEngine(CudaTrials):
    """Compute logits, and choose tokens, on one NVIDIA GPU.

    Parameters
    ----------
    config
        The model.
    regions
        Its weights (`weight_regions`), or sizes alone (`random_regions`): the GPU then fills them with random numbers.
    seq_len
        KV-cache rows.
    kv_dtype
        "fp16" or "fp8" (E5M2).
    on_full
        "stop" or "roll".
    gpu
        Device; default: the first one.
    progress
        Called with a line of text while kernels compile and weights travel.
    attention
        Overrides for the geometry of the attention kernel, for experiments.

    Attributes
    ----------
    info, config, seq_len, kv_dtype, on_full, recorder
        As in `calmnb.engine.Engine`.
    memory_plan : MemoryPlan

    Raises
    ------
    DeviceError
        If the memory does not suffice, before any is taken.
    CompileError
        If a kernel does not compile.
    """

    def __init__(
        self,
        config: ModelConfig,
        regions: Sequence[Region],
        *,
        seq_len: int,
        kv_dtype: KvDtype = "fp16",
        on_full: FullPolicy = "stop",
        gpu: Gpu | None = None,
        progress: Callable[[str], None] | None = None,
        upload_progress: UploadProgress | None = None,
        attention: Mapping[str, Any] | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype)
        self._positions = Positions(config, seq_len, on_full)
        self.config = config
        self.seq_len = seq_len
        self.kv_dtype: KvDtype = kv_dtype
        self.on_full: FullPolicy = on_full
        self.recorder: Recorder | None = None
        self._gpu: Gpu = gpu if gpu is not None else CudaDevice()
        self._closed = False
        self._is_massive = False  # whether a prompt's activations went beyond a half
        self.info = EngineInfo("cuda", self._gpu.name, 0, "stamps")
        self._kernels = KernelSet(self._gpu.arch)
        self._attention = dict(attention or {})
        try:
            self._open(regions, progress, upload_progress)
        except BaseException:
            self.close()
            raise

    def _open(
        self, regions: Sequence[Region], progress: Callable[[str], None] | None, upload_progress: UploadProgress | None
    ) -> None:
        gpu, config = self._gpu, self.config
        gpu.use()
        self._plans = self._make_plans(frozenset())
        weights_layout = Layout((r.name, r.nbytes) for r in regions)
        work_layout = activation_layout(self._plans)
        self._chunk = min(CHUNK, self.seq_len)
        scratch_layout = prefill_layout(config, self._chunk) if can_prefill(config) else Layout([])
        self.memory_plan = MemoryPlan(
            weights=weights_layout.nbytes,
            cache=cache_bytes(config, self.kv_dtype, self.seq_len),
            work=work_layout.nbytes,
            prefill=scratch_layout.nbytes,
        )
        free, total = gpu.memory()
        self.memory_plan.check(
            free,
            total,
            gpu.name,
            seq_len=self.seq_len,
            kv_dtype=self.kv_dtype,
            bytes_per_token=config.kv_bytes_per_token(self.kv_dtype),
        )
        specs = step_specs(self._plans)
        if progress is not None:
            progress(f"compiling {len(specs)} CUDA kernels for {gpu.arch} (kept for the next time)")
        self._kernels.add(specs)
        self._weights = weights_layout.at(gpu.allocate(weights_layout.nbytes))
        self._cache = gpu.allocate(self.memory_plan.cache)
        self._states = gpu.pinned(_PROMPT_STATES * STATE_WORDS * 4).view(np.int32).reshape(_PROMPT_STATES, STATE_WORDS)
        self._small = gpu.pinned(max(1 << 16, 4 * self.seq_len))
        self._logits = gpu.pinned(-(-config.vocab_size // 64) * 256)
        ring = gpu.pinned(HOST_RING_BYTES)
        self._ring_address = ring.ctypes.data
        self._ring = (HostToken * HOST_RING).from_address(self._ring_address)
        if regions and regions[0].arrays:
            upload(gpu, regions, self._weights, progress=upload_progress)
        else:
            fill_regions(gpu, self._kernels, regions, self._weights, config.dim)
        wide = find_wide(gpu, self._kernels, regions, self._weights)
        if wide:
            self._plans = self._make_plans(wide)
            work_layout = activation_layout(self._plans)
        self._work = work_layout.at(gpu.allocate(work_layout.nbytes))
        self._scratch = scratch_layout.at(gpu.allocate(scratch_layout.nbytes)) if scratch_layout.nbytes else {}
        self._steps = StepGraphs(gpu, self._plans, self._kernels, self._weights, self._work, self._cache, self._ring_address)
        self._runner = StepRunner(gpu, self._steps, self._kernels, config, self.kv_dtype, self._positions.length)
        if self._scratch:
            self._put(self._scratch["overflow"], np.zeros(4, np.uint8))
        frequencies = np.ascontiguousarray(config.rope_frequencies()[0], dtype=np.float64)
        if frequencies.size:
            self._put(self._work["frequencies"], frequencies.view(np.uint8))
        gpu.wait()

    def _make_plans(self, wide: frozenset[str]) -> Any:
        gpu = self._gpu
        return make_plans(
            self.config, self.kv_dtype, self.seq_len, self.on_full, gpu.arch, gpu.sm_count, wide=wide, attention=self._attention
        )

    # -- the protocol -------------------------------------------------------------------------------------------------

    def step(self, token: int, pos: int) -> NDArray[np.float32]:
        """Decode one token; see `calmnb.engine.Engine.step`."""
        check_tokens(self.config, [token])
        self._enter(pos, 1)
        self._run_tokens([token], pos, "decode", last="logits")
        return self._read_logits()

    def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> NDArray[np.float32]:
        """Feed several tokens; see `calmnb.engine.Engine.prefill`."""
        ids = [int(t) for t in check_tokens(self.config, tokens)]
        self._enter(pos, len(ids))
        rows = np.empty((len(ids) if all_logits else 0, self.config.vocab_size), np.float32)
        # What fits in the cache goes in batches; once it rolls, every token changes what the next one sees.
        n_batched = min(len(ids), self.seq_len - pos) if self._scratch and len(ids) >= _FEW else 0
        for at in range(0, n_batched, self._chunk):
            n = min(self._chunk, n_batched - at)
            self._run_batch(ids[at : at + n], pos + at, rows[at : at + n] if all_logits else None, last=at + n == len(ids))
        for i in range(max(n_batched, 0), len(ids)):
            wanted = all_logits or i == len(ids) - 1
            self._run_tokens([ids[i]], pos + i, "prefill", last="logits" if wanted else "none")
            if all_logits:
                rows[i] = self._read_logits()
        return rows if all_logits else self._read_logits()

    def reset(self) -> None:
        """Forget the sequence, so that the next position is 0."""
        self._positions.end = 0

    def close(self) -> None:
        """Free all device and page-locked memory, graphs and modules. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for name in ("_runner", "_steps", "_states", "_small", "_logits", "_ring"):
            self.__dict__.pop(name, None)
        self._gpu.close()

    def __enter__(self) -> CudaEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- tokens chosen on the device ----------------------------------------------------------------------------------

    def chooses(self, sampling: Sampling) -> bool:
        """Whether `decode_many` can choose by `sampling`: a draw needs shared memory for the vocabulary.

        It has room for 26,000 ids a block and up to 64 blocks on an H200, for 9,800 ids a block on an RTX 4090.
        """
        return sampling.is_greedy or self._plans.sampling.can_draw

    def decode_many(
        self,
        token: int,
        pos: int,
        n: int,
        *,
        sampling: Sampling | None = None,
        rng_state: int = 1,
        history: Sequence[int] = (),
        n_ids: int | None = None,
        ahead: int = _AHEAD,
    ) -> Iterator[Decoded]:
        """Decode up to `n` tokens without waiting for the host between them.

        Parameters
        ----------
        token, pos
            The last token of the sequence, not yet computed, and its position.
        n
            Tokens to choose; the sequence must fit (or roll).
        sampling
            How to choose; None means greedy without a repetition penalty.
        rng_state
            State of the xorshift64* generator (`calmnb.sampler.XorShift64.state`), nonzero.
        history
            The sequence up to and including `token`; only the repetition penalty reads it.
        n_ids
            Only ids below this are chosen.
        ahead
            Steps to queue beyond the token handed out, 0 to 254; beyond, it is brought there.

        Yields
        ------
        Decoded
            In order. The caller may stop at any of them (close the generator): steps that ran ahead wrote only to
            positions that are written again when the sequence goes on.

        Raises
        ------
        ContextError
            If `pos` does not fit.
        UnsupportedError
            If the GPU cannot choose by `sampling` (`chooses`).
        CalmnbError
            If the logits hold no finite maximum.
        """
        check_tokens(self.config, [token])
        self._enter(pos, 1)
        if self.on_full == "stop":
            n = min(n, self.seq_len - pos)
        ids = min(n_ids or self.config.vocab_size, self.config.vocab_size)
        s = sampling if sampling is not None else Sampling(min_p=0.0)
        if not self.chooses(s):
            raise UnsupportedError(
                f"{self._gpu.name} has no room to draw from {self.config.vocab_size} ids: a draw wants "
                f"{self._plans.sampling.draw_shared} bytes of shared memory a block; take the logits of step() instead, "
                "or Sampling(temperature=0)"
            )
        ending: Ending = "greedy" if s.is_greedy else "draw"
        recorder, runner = self.recorder, self._runner
        ahead = runner.ahead(recorder, min(max(ahead, 0), HOST_RING - 2))  # beyond, unread tokens would be written over
        for at in (pos, pos + max(n, 1) - 1):  # captured before the clock runs
            runner.prepare(ending, at, recorder)
        self._put(self._work["params"], np.frombuffer(bytes(sample_params(s, rng_state, ids)), np.uint8))
        if s.repetition_penalty != 1.0 and s.repetition_range != 0:
            self._put(self._work["history"], history_row(history, pos, self.seq_len).view(np.uint8))
        self._put(self._work["state"], np.array(state_words(token, pos, self.seq_len), np.int32).view(np.uint8))
        for entry in self._ring:
            entry.step = 0
        launched = 0
        last_event = None
        try:
            for i in range(n):
                if self._closed:
                    raise ConfigError("this engine was closed while it decoded; open the model again")
                self._gpu.use()  # the caller may have moved to another thread
                # Once the cache rolls, a step cannot be undone: then nothing runs ahead of the caller.
                reach = i + 1 if pos + launched >= self.seq_len else min(n, i + 1 + ahead)
                if launched < reach:
                    while launched < reach and (launched <= i or pos + launched < self.seq_len):
                        runner.run(ending, "decode", pos + launched, recorder)
                        launched += 1
                    last_event = self._gpu.mark()
                entry = self._await(i, last_event)
                self._positions.end = pos + i + 1
                if recorder is not None:
                    runner.forward(recorder, "decode", pos + i)
                if entry.token < 0:
                    raise CalmnbError(
                        f"the logit of token {-1 - entry.token} is {entry.logprob}: the model's numbers have overflowed or its "
                        "weights are damaged. Check the file with `calmnb info`; fp16 weights and an fp16 cache have more range"
                    )
                yield Decoded(entry.token, pos + i + 1, entry.logprob)
        finally:
            if not self._closed:
                self._gpu.use()
                self._gpu.wait()
                runner.discard()

    def _await(self, index: int, event: Any) -> HostToken:
        """Wait for token `index` of this run: spin briefly, then doze; the GPU has more steps queued meanwhile."""
        entry = self._ring[index % HOST_RING]
        wanted = index + 1
        began = time.perf_counter()
        while entry.step != wanted:
            waited = time.perf_counter() - began
            if waited > 30e-6:
                time.sleep(20e-6)
            if waited > 0.2 and self._gpu.reached(event) and entry.step != wanted:
                raise DeviceError(f"{self._gpu.name}: step {index} ended without a token; this is a bug in calmnb")
        return HostToken.from_buffer_copy(entry)

    # -- running steps ------------------------------------------------------------------------------------------------

    def _enter(self, pos: int, n: int) -> None:
        if self._closed:
            raise ConfigError("this engine was closed; open the model again")
        self._positions.check(pos, n)
        self._gpu.use()

    def _run_tokens(self, ids: Sequence[int], pos: int, phase: Phase, *, last: Ending) -> None:
        """Run a step for each token; only the last one ends in `last`."""
        recorder = self.recorder
        for i, token in enumerate(ids):
            slot = i % _PROMPT_STATES
            if i and slot == 0:
                self._gpu.wait()  # the page-locked states are about to be written again
            self._states[slot] = state_words(token, pos + i, self.seq_len)
            self._gpu.to_device(self._work["state"], self._states[slot].view(np.uint8))
            try:
                self._runner.run(last if i == len(ids) - 1 else "none", phase, pos + i, recorder)
                if recorder is not None:
                    self._gpu.wait()
                    self._runner.forward(recorder, phase, pos + i)
            except BaseException:  # its times would be taken for the next step's
                self._gpu.wait()
                self._runner.discard()
                raise
        if last == "logits":
            self._gpu.to_host(self._logits[: 4 * self.config.vocab_size], self._work["logits"])
        self._gpu.wait()
        self._positions.end = pos + len(ids)

    def _run_batch(self, ids: list[int], pos: int, rows: NDArray[np.float32] | None, *, last: bool) -> None:
        """Compute a batch of prompt tokens; logits of all of them into `rows`, or of the last one where `last`."""
        self._put(self._scratch["tokens"], np.array(ids, np.int32).view(np.uint8))
        if not self._is_massive and self._try_batch(len(ids), pos, rows, last=last, scaled=False):
            # Activations beyond a half. Later batches of this model are scaled from the start.
            self._is_massive = True
        if self._is_massive:
            self._try_batch(len(ids), pos, rows, last=last, scaled=True)
        self._positions.end = pos + len(ids)

    def _try_batch(self, n: int, pos: int, rows: NDArray[np.float32] | None, *, last: bool, scaled: bool) -> bool:
        """Run and record the batch whose tokens are on the device; return whether it overflowed, and is worthless."""
        gpu, recorder = self._gpu, self.recorder
        a = PrefillArgs(
            self.config, self.kv_dtype, self.seq_len, self._weights, self._work, self._scratch, self._cache,
            self.memory_plan.cache // (2 * self.config.n_layers),
        )  # fmt: skip
        kernels: list[Kernel] = []
        events = [gpu.mark()]
        ranges = None if recorder is None else self._runner.ranges("prefill", pos, self._positions.length(pos + n - 1), n)

        def done(kernel: Kernel) -> None:
            if ranges is not None:
                kernels.append(kernel)
                events.append(gpu.mark())
                ranges.follow(kernel)

        started = time.perf_counter()
        with nullcontext() if ranges is None else ranges:
            if ranges is not None:
                ranges.enter(Kernel("embed", -1, ""))
            run_prefill(gpu, self._kernels, a, n, pos, done, scaled=scaled)
            if rows is not None:
                run_logits(gpu, self._kernels, a, rows)
            elif last:
                blocks = embed_grid(self.config) - 1
                run_resume(gpu, self._kernels, a, n - 1, blocks)
                logits = self.program("logits").launches[-1]
                args = type(logits.args[0]).from_buffer_copy(logits.args[0])
                args.n_part = blocks
                gpu.launch([replace(logits, args=(args,), dependent=False)])
                done(Kernel("output", -1, logits.kernel.name))
                gpu.to_host(self._logits[: 4 * self.config.vocab_size], self._work["logits"])
        overflow = self._small[:4]
        gpu.to_host(overflow, self._scratch["overflow"])
        gpu.wait()
        if overflow.any() and not scaled:
            return True
        if recorder is not None and kernels:
            marks = np.array([gpu.between(events[0], e) for e in events]) + started
            kv_len = self._positions.length(pos + n - 1)
            recorder.add("prefill", pos, kv_len, n, tuple(kernels), marks[:-1], marks[1:], started, float(marks[-1]))
        return False

    def _read_logits(self) -> NDArray[np.float32]:
        return self._logits.view(np.float32)[: self.config.vocab_size]

    # -- memory -------------------------------------------------------------------------------------------------------

    def _put(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy a few bytes to the device and wait."""
        staged = self._small[: data.nbytes]
        staged[:] = data.reshape(-1)
        self._gpu.to_device(address, staged)
        self._gpu.wait()


def open_cuda_engine(
    weights: Weights,
    *,
    seq_len: int,
    kv_dtype: KvDtype = "fp16",
    on_full: FullPolicy = "stop",
    progress: Callable[[str], None] | None = None,
    gpu: Gpu | None = None,
    pdl: bool | None = None,
    upload_progress: UploadProgress | None = None,
) -> CudaEngine:
    """Open a model on the GPU.

    Parameters
    ----------
    weights
        Views into the mapped file; copied tensor by tensor.
    seq_len, kv_dtype, on_full, progress
        See `CudaEngine`.
    gpu
        Device; default: the first one.
    pdl
        Programmatic dependent launch; default: on where the GPU has it, unless ``CALMNB_PDL=0``.
    upload_progress
        Called with bytes done, bytes in all, tensor name.
    """
    if gpu is None:
        gpu = CudaDevice() if pdl is None else CudaDevice(pdl=pdl)
    return CudaEngine(
        weights.config,
        weight_regions(weights),
        seq_len=seq_len,
        kv_dtype=kv_dtype,
        on_full=on_full,
        gpu=gpu,
        progress=progress,
        upload_progress=upload_progress,
    )


def open_random_engine(
    config: ModelConfig, *, is_tied: bool, seq_len: int, kv_dtype: KvDtype = "fp16", **options: Any
) -> CudaEngine:
    """Open a model of random weights made on the GPU, for benchmarks: no file, any size."""
    return CudaEngine(config, random_regions(config, is_tied=is_tied), seq_len=seq_len, kv_dtype=kv_dtype, **options)
