"""Find the fastest geometries inside the real decode step: ``python -m tests.gpu.tune_engine SHAPE:DTYPE ... [--context 0]``.

`tune_matvec` looks at the chain of weight kernels with a stand-in for attention; this one swaps one kernel of an engine at a
time, with attention, sampling and the whole graph as they decode. Coordinate descent from the engine's own choice.
"""

from __future__ import annotations

import argparse
import dataclasses

from calmnb.engine.cuda import CudaEngine, open_random_engine
from calmnb.engine.cuda_graphs import StepGraphs
from calmnb.engine.cuda_matvec import Device, Geometry, MatvecPlan, fill_geometry, matrix_shapes, plan_matvec
from calmnb.kernels import compile_all
from calmnb.shapes import TIED, shape_config

KINDS = ("qkv", "out", "gateup", "down", "logits")
WORTH = 0.998  # a change must gain 0.2%


class Bench:
    """An engine whose weight kernels can be exchanged."""

    def __init__(self, engine: CudaEngine, context: int) -> None:
        self.engine, self.context = engine, context
        self.device = Device.of_arch(engine.gpu.arch, engine.gpu.sm_count)
        self.plans: dict[str, MatvecPlan] = dict(engine._plans.matvec)

    def plan(self, kind: str, geometry: Geometry) -> MatvecPlan:
        config = self.engine.config
        rows, cols = matrix_shapes(config)[kind]  # type: ignore[index]
        norm = 0 if kind in ("out", "down") else 1
        return plan_matvec(
            kind, config.dtype, rows, cols, self.device, norm=norm, kv_dtype=self.engine.kv_dtype, geometry=geometry,  # type: ignore[arg-type]
        )  # fmt: skip

    def time_us(self, changes: dict[str, MatvecPlan], steps: int = 24, repeats: int = 2) -> float:
        engine = self.engine
        plans = dataclasses.replace(engine._plans, matvec=self.plans | changes)
        kept = engine._steps
        engine._steps = StepGraphs(
            engine.gpu, plans, engine._kernels, engine._weights, engine._work, engine._cache, engine._ring_address
        )
        try:
            engine._positions.end = self.context
            engine.time_graph(self.context, 4)
            return 1e6 * min(engine.time_graph(self.context, steps) for _ in range(repeats))
        finally:
            engine._steps = kept


def options(bench: Bench, kind: str) -> list[Geometry]:
    """Splits of a row over warps, blocks of 8 and 16 warps, rings and batches of several sizes; all start as now."""
    found: dict[Geometry, None] = {}
    now = bench.plans[kind].geometry
    rows, cols = bench.plans[kind].rows, bench.plans[kind].cols
    dtype = bench.engine.config.dtype
    per_chunk = {"fp16": 4, "fp8": 8, "gf4": 16}[dtype]
    n_chunks = cols * {"fp16": 16, "fp8": 8, "gf4": 4}[dtype] // 128
    splits = {(now.warps_per_row, now.chunks, now.threads // 32 // now.warps_per_row)}
    for chunks in range(1, 16 // per_chunk + 1):
        for warps in (1, 2, 4, 7, 8, 11, 12, 14, 16):
            if 0.9 <= n_chunks / (32 * warps * chunks) <= 1:
                splits |= {(warps, chunks, max(1, target // warps)) for target in (8, 16) if warps <= target}
    for warps, chunks, groups in splits:
        for ring_kb in (64, 92):
            for stage_kb in (8, 16, 32):
                for batch in (4, 8):
                    g = fill_geometry(
                        rows, warps, chunks, groups, bench.device, ring_kb=ring_kb, stage_kb=stage_kb, batch=batch
                    )
                    found[
                        dataclasses.replace(g, pace=min(now.pace, g.stages), delay=now.delay, blocks_per_sm=now.blocks_per_sm)
                    ] = None
    return [g for g in found if g != now]


def measure(bench: Bench, kind: str, geometries: list[Geometry]) -> list[tuple[float, Geometry]]:
    """Times of a step with `kind` in each geometry, us; what spills or leaves no room for a neighbour is passed over."""
    tried = {g: bench.plan(kind, g) for g in geometries}
    tried = {g: plan for g, plan in tried.items() if plan.smem <= 94 * 1024}
    compiled = compile_all([p.spec for p in tried.values()], bench.engine.gpu.arch)
    return [(bench.time_us({kind: plan}), g) for g, plan in tried.items() if compiled[plan.spec].resources.spill_bytes == 0]


def descend(bench: Bench) -> None:
    label = f"{bench.engine.config.dtype} dim {bench.engine.config.dim} hidden {bench.engine.config.hidden_dim}"
    first = bench.time_us({})
    for kind in KINDS:
        found = sorted(measure(bench, kind, options(bench, kind)), key=lambda item: item[0])
        best = found[0][1]
        starts = [(pace, delay) for pace in (1, 2) for delay in (0, 2000, 4000) if (pace, delay) != (best.pace, best.delay)]
        others = [dataclasses.replace(best, pace=min(pace, best.stages), delay=delay) for pace, delay in starts]
        found = sorted([*found, *measure(bench, kind, others)], key=lambda item: item[0])
        base, best = bench.time_us({}, repeats=4), found[0][1]
        time = bench.time_us({kind: bench.plan(kind, best)}, repeats=4)
        kept = time < base * WORTH
        print(
            f"  {label} {kind}: now {base:.1f} {short(bench.plans[kind].geometry)}; "
            f"best of {len(found)}: {time:.1f} {short(best)}"
            f"{' KEPT' if kept else ''}; next {found[1][0]:.1f} {short(found[1][1])}",
            flush=True,
        )
        if kept:
            bench.plans[kind] = bench.plan(kind, best)
    print(f"{label}: {first:.1f} -> {bench.time_us({}, repeats=5):.1f} us", flush=True)


def short(g: Geometry) -> str:
    start = f"p{g.pace}d{g.delay}r{g.max_registers}"
    return f"T{g.threads}wk{g.warps_per_row}nc{g.chunks}rb{g.batch}rs{g.stage_rows}s{g.stages}{start}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", help="llama-3.2-1b:gf4 ...")
    parser.add_argument("--context", type=int, default=0)
    arguments = parser.parse_args()
    for model in arguments.models:
        shape, dtype = model.split(":")
        with open_random_engine(shape_config(shape, dtype), is_tied=shape in TIED, seq_len=arguments.context + 100) as engine:
            engine.pretend_cached(arguments.context)
            descend(Bench(engine, arguments.context))


if __name__ == "__main__":
    main()
