"""Where the time of a weight kernel goes inside the step: ``python -m tests.gpu.anatomy SHAPE DTYPES CONTEXT ... [--kv KV]``.

Prints, per stage, ns after the last block of the weight kernel before (attention lies between qkv and attn): when a block
started, had asked for its first weights, was let go on, had its activations, its products, passed the barrier, ended: medians
over blocks and layers; then the first and the last block's end. Below, how multiprocessors differ in the time of products.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from calmnb.engine.cuda import CudaEngine
from tests.gpu.step_cases import spied_step, step_parser, timed_steps

EVENTS = ("start", "filled", "waited", "x", "dots", "barrier", "end")
REPEATS = 4


def traces(engine: CudaEngine, context: int) -> tuple[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]]:
    """By stage: times [blocks, 7] after the kernel before, one array a kernel; ns of products by multiprocessor."""
    times, by_sm = defaultdict(list), defaultdict(list)
    for _ in range(REPEATS):
        before = None
        for stage, notes in spied_step(engine, context, "K_TRACE", (np.int64, 8), only=("matvec",)):
            if not len(notes):
                continue
            if before is not None:
                times[stage].append(notes[:, :7] - before)
                ns = np.full(engine.gpu.sm_count, np.nan)
                ns[notes[:, 7]] = notes[:, 4] - notes[:, 2]
                by_sm[stage].append(ns)
            before = notes[:, 6].max()
    return times, by_sm


def show(engine: CudaEngine, context: int) -> None:
    times, by_sm = traces(engine, context)
    for stage, kernels in times.items():
        middle = np.median([np.median(k, 0) for k in kernels], 0).astype(int)
        first, last = (int(np.median([f(k[:, 6]) for k in kernels])) for f in (np.min, np.max))
        events = " ".join(f"{name} {t}" for name, t in zip(EVENTS, middle, strict=True))
        print(f"  {stage:16s}{events} | ends {first}..{last}", flush=True)
    for stage in ("matmul_ffn_up", "matmul_ffn_down"):
        each = np.array(by_sm[stage])
        mean = np.nanmean(each, 0)
        halves = np.corrcoef(np.nanmean(each[::2], 0), np.nanmean(each[1::2], 0))[0, 1]
        fast = np.flatnonzero(mean < 0.96 * np.nanmedian(mean))
        print(
            f"  {stage}: multiprocessors take {np.nanmin(mean):.0f}..{np.nanmax(mean):.0f} ns, halves of the kernels correlate "
            f"by {halves:.3f}; {len(fast)} are 4% faster than the middle: {fast.tolist()}",
            flush=True,
        )


def main() -> None:
    for engine, context, line in timed_steps(step_parser().parse_args()):
        print(line, flush=True)
        show(engine, context)


if __name__ == "__main__":
    main()
