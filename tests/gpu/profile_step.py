"""Where a decode step's time goes, by stamps: ``python -m tests.gpu.profile_step SHAPE DTYPE CONTEXT ... [--kv fp8]``.

Prints, per stage, the mean end-to-end pitch: from the end of the kernel before to the end of this one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import numpy as np

from calmnb.engine.cuda import open_random_engine
from calmnb.shapes import TIED, shape_config


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
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("dtypes")
    parser.add_argument("contexts", nargs="+", type=int)
    parser.add_argument("--kv", default="fp16")
    parser.add_argument("--attention", default="", help="overrides for plan_attention: threads=256,unroll=4;... several")
    arguments = parser.parse_args()
    variants = [
        {k: float(v) if "." in v else int(v) for k, v in (item.split("=") for item in text.split(",") if item)}
        for text in arguments.attention.split(";")
    ]
    for dtype in arguments.dtypes.split(","):
        for variant in variants:
            config = shape_config(arguments.shape, dtype)
            with open_random_engine(
                config,
                is_tied=arguments.shape in TIED,
                seq_len=max(arguments.contexts) + 80,
                kv_dtype=arguments.kv,
                attention=variant,
            ) as engine:
                for context in arguments.contexts:
                    engine.pretend_cached(context)
                    plain = min(engine.time_graph(context, 50) for _ in range(3))
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
                    print(
                        f"{arguments.shape} {dtype} {arguments.kv} ctx {context} {variant}: graph {1e6 * plain:.1f} us, "
                        f"stamped {1e6 * float(np.median(recorder.steps)):.1f} | {parts}"
                    )


if __name__ == "__main__":
    main()
