"""Where the blocks of a decode step land: ``python -m tests.gpu.placement SHAPE DTYPES CONTEXT ... [--attention ...]``.

Counts, with %smid, the blocks of every weight kernel and of attention on each multiprocessor, in the graph that decodes.
Prints, per kind, blocks on the fullest multiprocessor and idle multiprocessors (means over the layers), and the time of a
step of the graph without counting, for several engines one after another: placement may differ between them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np

from calmnb.engine.cuda import CudaEngine
from calmnb.engine.cuda_ops import sample_params, state_words
from calmnb.sampler import Sampling
from tests.gpu.step_cases import open_case, step_cases, step_parser

_MOST_BLOCKS = 1024


def placement(engine: CudaEngine, context: int) -> dict[str, tuple[float, float]]:
    """Blocks on the fullest multiprocessor and idle multiprocessors, by stage."""
    gpu: Any = engine.gpu
    program = engine.program_at("greedy", context)
    table = gpu.allocate(len(program.launches) * _MOST_BLOCKS * 4)
    spied, rows = [], []
    for i, launch in enumerate(program.launches):
        args = launch.args[0]
        if launch.kernel.name.startswith("matvec") or launch.kernel.name == "attention":
            kernel = engine._kernels(launch.kernel.spec.with_defines(K_SMID=1))
            args = type(args).from_buffer_copy(args)
            args.stamp = table + 4 * _MOST_BLOCKS * i
            launch = dataclasses.replace(launch, kernel=kernel, args=(args,))
            rows.append((i, program.kernels[i].stage, launch.grid[0]))
        spied.append(launch)
    run = gpu.capture(spied)
    engine._put(engine._work["params"], np.frombuffer(bytes(sample_params(Sampling(), 1, engine.config.vocab_size)), np.uint8))
    engine._put(engine._work["state"], np.array(state_words(1, context, engine.seq_len), np.int32).view(np.uint8))
    for _ in range(3):
        run()
    gpu.wait()
    host = gpu.pinned(len(program.launches) * _MOST_BLOCKS * 4)
    gpu.to_host(host, table)
    gpu.wait()
    found = defaultdict(list)
    where = host.view(np.int32).reshape(-1, _MOST_BLOCKS)
    for i, stage, grid in rows:
        counts = np.bincount(where[i, :grid], minlength=gpu.sm_count)
        found[stage].append((counts.max(), (counts == 0).sum()))
    gpu.release(table)
    return {stage: tuple(np.mean(values, axis=0)) for stage, values in found.items()}  # type: ignore[misc]


def main() -> None:
    parser = step_parser()
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    for dtype, variant in step_cases(arguments):
        times = defaultdict(list)
        counts = {}
        for again in range(arguments.repeat):
            with open_case(arguments, dtype, variant) as engine:
                for context in arguments.contexts:
                    engine.pretend_cached(context)
                    times[context].append(1e6 * min(engine.time_graph(context, 40) for _ in range(2)))
                    if again == arguments.repeat - 1:
                        counts[context] = placement(engine, context)
        for context in arguments.contexts:
            spread = " ".join(f"{t:.1f}" for t in times[context])
            where = " ".join(f"{s.removeprefix('matmul_')} {m:.2f}/{i:.1f}" for s, (m, i) in counts[context].items())
            print(f"{arguments.shape} {dtype} kv {arguments.kv} ctx {context} {variant}: {spread} us | {where}", flush=True)


if __name__ == "__main__":
    main()
