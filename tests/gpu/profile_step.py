"""Where a decode step's time goes, by stamps: ``python -m tests.gpu.profile_step SHAPE DTYPE CONTEXT ... [--kv fp8]``.

Prints, per stage, the mean end-to-end pitch: from the end of the kernel before to the end of this one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from tests.gpu.step_cases import step_parser, timed_steps


class Pitches:
    """A recorder that sums end-to-end pitches per stage."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self.steps: list[float] = []

    def add(
        self, phase: str, pos: int, kv_len: int, n: int, kernels: Any, starts: Any, ends: Any, begin: float, end: float
    ) -> None:
        pitch = np.diff(ends, prepend=begin)
        for kernel, time in zip(kernels, pitch, strict=True):
            self.times[kernel.stage + ":" + kernel.name].append(float(time))
        self.steps.append(end - begin)

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        """Not called by an engine."""


def main() -> None:
    for engine, context, line in timed_steps(step_parser().parse_args()):
        engine.pretend_cached(context)
        engine.recorder = None
        list(engine.decode_many(1, context, 4))
        engine.pretend_cached(context)
        engine.recorder = recorder = Pitches()
        list(engine.decode_many(1, context, 40))
        parts = "  ".join(
            f"{name.split(':')[0].replace('matmul_', '')} {1e6 * float(np.median(times)):.2f}"
            for name, times in recorder.times.items()
        )
        print(f"{line}, stamped {1e6 * float(np.median(recorder.steps)):.1f} | {parts}")


if __name__ == "__main__":
    main()
