"""Where the blocks of a decode step land: ``python -m tests.gpu.placement SHAPE DTYPES CONTEXT ... [--attention ...]``.

Counts, with %smid, the blocks of every weight kernel and of attention on each multiprocessor, in the graph that decodes.
Prints, per kind, blocks on the fullest multiprocessor and idle multiprocessors (means over the layers), and the time of a
step of the graph without counting, for several engines one after another: placement may differ between them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from calmnb.engine.cuda import CudaEngine
from tests.gpu.step_cases import open_case, spied_step, step_cases, step_parser


def placement(engine: CudaEngine, context: int) -> dict[str, tuple[float, float]]:
    """Blocks on the fullest multiprocessor and idle multiprocessors, by stage."""
    found = defaultdict(list)
    for stage, sms in spied_step(engine, context, "K_SMID", np.int32, only=("matvec", "attention")):
        if len(sms):
            counts = np.bincount(sms, minlength=engine.gpu.sm_count)
            found[stage].append((counts.max(), (counts == 0).sum()))
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
