"""Find the fastest geometries of the weight kernels on this GPU, in the chain of a whole decode step.

The chain is a step without attention and sampling (a copy stands in for attention), captured in one graph with
dependent launch, over distinct weights for every layer. Coordinate descent: one kind of kernel at a time, the others
fixed. Run: python -m tests.gpu.tune_matvec [--shapes 1b,mistral] [--dtypes fp16,fp8,gf4] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from calmnb.config import DTYPE_BITS
from calmnb.engine.cuda_matvec import Geometry, MatvecArgs, MatvecPlan, default_geometry, fill_geometry, plan_matvec
from calmnb.kernels import compile_all
from tests.gpu.launcher import Launcher, check

SHAPES = {  # dim, hidden, q_dim, kv_dim, head_dim, layers, vocab
    "1b": (2048, 8192, 2048, 512, 64, 16, 128256),
    "mistral": (4096, 14336, 4096, 1024, 128, 32, 32000),
    "llama2": (4096, 11008, 4096, 4096, 128, 32, 32000),
}
KINDS = ("qkv", "out", "gateup", "down", "logits")
STAND_INS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void attention(const float* q, __half* o, int n) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float v; asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(q + i) : "memory"); o[i] = __float2half_rn(v);
  }
}
extern "C" __global__ void embed(const float* x, float* x32, const __half* h, __half* x16, int n) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x32[i] = x[i], x16[i] = h[i];
}
"""


class Chain:
    """Buffers of one shape and dtype, and timing of a step for any choice of plans."""

    def __init__(self, gpu: Launcher, shape: str, dtype: str, arena: Any) -> None:
        cp = gpu.cupy
        self.gpu, self.shape, self.dtype = gpu, shape, dtype
        self.dim, self.hidden, self.q_dim, self.kv_dim, self.head_dim, self.layers, self.vocab = SHAPES[shape]
        dim = self.dim
        self.size = {
            "qkv": (self.q_dim + 2 * self.kv_dim, dim),
            "out": (dim, self.q_dim),
            "gateup": (2 * self.hidden, dim),
            "down": (dim, self.hidden),
            "logits": (self.vocab, dim),
        }
        self.bytes = {k: r * c * DTYPE_BITS[dtype] // 8 for k, (r, c) in self.size.items()}
        at = arena.data.ptr
        self.weights: dict[tuple[str, int], int] = {}
        for layer in range(self.layers):
            for kind in KINDS[:4]:
                self.weights[kind, layer] = at
                at += (self.bytes[kind] + 255) // 256 * 256
        self.weights["logits", 0] = at
        at += self.bytes["logits"]
        assert at - arena.data.ptr <= arena.nbytes, (at - arena.data.ptr, arena.nbytes)
        self.total = at - arena.data.ptr
        rng = np.random.default_rng(0)
        x = rng.standard_normal(dim).astype(np.float32)
        self.g = cp.ones(max(dim, 64), cp.float32)
        self.x0, self.h0 = cp.asarray(x), cp.asarray((8 * x).astype(np.float16))
        self.x32, self.x16 = cp.zeros(dim, cp.float32), cp.zeros(dim, cp.float16)
        self.part0 = cp.asarray(np.array([[x.sum(), (x * x).sum()]], np.float32))
        self.parts = [cp.zeros((1024, 2), cp.float32) for _ in range(2)]
        self.q32, self.o16 = cp.zeros(self.q_dim, cp.float32), cp.zeros(self.q_dim, cp.float16)
        self.h32, self.h16 = cp.zeros(self.hidden, cp.float32), cp.zeros(self.hidden, cp.float16)
        self.logits, self.best = cp.zeros(self.vocab, cp.float32), cp.zeros((2048, 2), cp.float32)
        self.cache = cp.zeros(2 * self.kv_dim * 8, cp.float16)
        self.rope = cp.zeros((self.head_dim, 2), cp.float32)
        self.state = cp.asarray(np.array([1, 2, 3, 4] + [0] * 12, np.int32))
        self.stamps = cp.zeros(2, cp.uint64)
        self.smid: Any = None
        module = cp.RawModule(code=STAND_INS, options=("-std=c++17",))
        self.attention = gpu.driver.CUfunction(module.get_function("attention").kernel.ptr)
        self.embed = gpu.driver.CUfunction(module.get_function("embed").kernel.ptr)
        self.module = module
        carveout = gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        for function in (self.attention, self.embed):
            check(gpu.driver.cuFuncSetAttribute(function, carveout, 100))
        most = gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(gpu.driver.cuFuncSetAttribute(self.embed, most, gpu.max_shared))
        self.spread = False  # the first kernel takes more than half of every multiprocessor: one block on each
        self.stream = cp.cuda.Stream(non_blocking=True)

    def plan(self, kind: str, geometry: Geometry | None) -> MatvecPlan:
        rows, cols = self.size[kind]
        norm = int(kind not in ("out", "down"))
        return plan_matvec(kind, self.dtype, rows, cols, self.gpu.device, norm=norm, geometry=geometry)  # type: ignore[arg-type]

    def args(self, kind: str, layer: int, plans: dict[str, MatvecPlan]) -> MatvecArgs:
        rows, cols = self.size[kind]
        p = lambda a: a.data.ptr  # noqa: E731
        a = MatvecArgs(rows=rows, cols=cols, eps=1e-5, clip=np.inf, q_scale=1.0, in_scale=8.0, w0=self.weights[kind, layer])
        a.delay = plans[kind].geometry.delay
        a.stamp = next(self.smid) if self.smid is not None else p(self.stamps)
        if kind in ("qkv", "gateup", "logits"):
            a.x16, a.x32, a.g = p(self.x16), p(self.x32), p(self.g)
            if kind == "gateup":
                a.part, a.n_part = p(self.parts[1]), plans["out"].grid
            elif layer or kind == "logits":
                a.part, a.n_part = p(self.parts[0]), plans["down"].grid
            else:
                a.part, a.n_part = p(self.part0), 1
        if kind == "qkv":
            a.y32, a.kcache, a.vcache = p(self.q32), p(self.cache), p(self.cache) + 2 * 8 * self.kv_dim
            a.rope, a.state, a.seq_len = p(self.rope), p(self.state), 8
            a.q_dim, a.kv_dim, a.head_dim, a.rotary_dim = self.q_dim, self.kv_dim, self.head_dim, self.head_dim
        elif kind == "out":
            a.x16, a.in_scale = p(self.o16), 1.0
            a.res = a.y32 = p(self.x32)
            a.y16, a.g_next, a.part_next = p(self.x16), p(self.g), p(self.parts[1])
        elif kind == "gateup":
            a.w1 = self.weights[kind, layer] + self.bytes[kind] // 2
            a.y32, a.y16 = p(self.h32), p(self.h16)
        elif kind == "down":
            a.x16, a.x32 = p(self.h16), p(self.h32)
            a.res = a.y32 = p(self.x32)
            a.y16, a.g_next, a.part_next = p(self.x16), p(self.g), p(self.parts[0])
        else:
            a.y32, a.best = p(self.logits), p(self.best)
        return a

    def _launch(self, function: Any, grid: int, block: int, values: list[Any], pdl: bool, smem: int = 0) -> None:
        import ctypes

        # Scalar parameters: an array of pointers to each.
        d = self.gpu.driver
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = smem
        config.hStream = d.CUstream(self.stream.ptr)
        if pdl:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        boxes = [ctypes.c_int32(v) if isinstance(v, int) else ctypes.c_uint64(v.data.ptr) for v in values]
        pointers = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(b) for b in boxes])
        check(d.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))

    def graph(self, plans: dict[str, MatvecPlan], *, pdl: bool = True, only: str | None = None) -> Any:
        gpu, stream = self.gpu, self.stream
        for plan in plans.values():
            gpu.function(plan.spec)
        with stream:
            stream.begin_capture()
            smem = 115 * 1024 if self.spread else 0
            grid = gpu.device.sm_count if self.spread else -(-self.dim // 256)
            self._launch(self.embed, grid, 128, [self.x0, self.x32, self.h0, self.x16, self.dim], pdl, smem)
            if only is not None:
                for layer in range(self.layers if only != "logits" else 4):
                    gpu.launch(plans[only], self.args(only, layer if only != "logits" else 0, plans), stream, pdl=pdl)
                return stream.end_capture()
            for layer in range(self.layers):
                gpu.launch(plans["qkv"], self.args("qkv", layer, plans), stream, pdl=pdl)
                self._launch(self.attention, gpu.device.sm_count, 128, [self.q32, self.o16, self.q_dim], pdl)
                for kind in ("out", "gateup", "down"):
                    gpu.launch(plans[kind], self.args(kind, layer, plans), stream, pdl=pdl)
            gpu.launch(plans["logits"], self.args("logits", 0, plans), stream, pdl=pdl)
            return stream.end_capture()

    def time_us(self, graph: Any, repeats: int = 21) -> float:
        cp, stream = self.gpu.cupy, self.stream
        graph.upload(stream) if hasattr(graph, "upload") else None
        times = []
        for i in range(repeats + 2):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            if i >= 2:
                times.append(cp.cuda.get_elapsed_time(start, end) * 1e3)
        return float(np.median(times))


def placement(chain: Chain, plans: dict[str, MatvecPlan]) -> str:
    """Blocks on the fullest multiprocessor and idle multiprocessors, per kind, averaged over the layers of one step."""
    cp = chain.gpu.cupy
    spied = {k: dataclasses.replace(p, spec=p.spec.with_defines(K_SMID=1)) for k, p in plans.items()}
    table = cp.full((4 * chain.layers + 1, 1024), -1, cp.int32)
    chain.smid = iter([table[i].data.ptr for i in range(len(table))])
    graph = chain.graph(spied)
    chain.smid = None
    for _ in range(3):
        graph.launch(chain.stream)
    chain.stream.synchronize()
    host = cp.asnumpy(table)
    out = []
    for i, kind in enumerate(KINDS):
        rows = host[i:-1:4] if kind != "logits" else host[-1:]
        counts = [np.bincount(r[r >= 0], minlength=chain.gpu.device.sm_count) for r in rows]
        most = np.mean([c.max() for c in counts])
        idle = np.mean([(c == 0).sum() for c in counts])
        out.append(f"{kind} most {most:.2f} idle {idle:.1f}")
    return ", ".join(out)


def anatomy(chain: Chain, plans: dict[str, MatvecPlan]) -> str:
    """Where a kernel's time goes, ns after its predecessor's last block ended: medians over layers, block 0 and all."""
    cp = chain.gpu.cupy
    spied = {k: dataclasses.replace(p, spec=p.spec.with_defines(K_TRACE=1)) for k, p in plans.items()}
    n = 4 * chain.layers + 1
    table = cp.zeros((n, 1024, 8), cp.uint64)
    chain.smid = iter([table[i].data.ptr for i in range(n)])
    graph = chain.graph(spied)
    chain.smid = None
    for _ in range(3):
        graph.launch(chain.stream)
    chain.stream.synchronize()
    t = cp.asnumpy(table).astype(np.int64)
    out = []
    for i, kind in enumerate(KINDS):
        lines = []
        for at in range(i, n - 1, 4) if kind != "logits" else [n - 1]:
            if at == 0:
                continue
            grid, before = plans[kind].grid, plans[KINDS[(i - 1) % 4]].grid if kind != "logits" else plans["down"].grid
            end = t[at - 1, :before, 6].max()
            x = t[at, :grid, :7] - end
            lines.append(np.concatenate([np.median(x, 0), x.min(0)[:1], x[:, 6:].max(0)]))
        m = np.median(np.array(lines), 0).astype(int)
        labels = ("start", "filled", "waited", "x", "dots", "barrier", "end")
        times = " ".join(f"{a} {b}" for a, b in zip(labels, m, strict=False))
        out.append(f"  {kind:7s}{times} | first {m[7]} last {m[8]}")
    return "\n".join(out)


def candidates(chain: Chain, kind: str, ring_kb: int) -> list[Geometry]:
    """Ways to split a row over warps."""
    rows, cols = chain.size[kind]
    device, dtype = chain.gpu.device, chain.dtype
    per_chunk = {"fp16": 4, "fp8": 8, "gf4": 16}[dtype]
    n_chunks = cols * DTYPE_BITS[dtype] // 128
    splits = []
    for chunks in range(1, 16 // per_chunk + 1):
        for warps in (1, 2, 4, 7, 8, 11, 12, 14, 16):
            used = n_chunks / (32 * warps * chunks)
            if 0.85 <= used <= 1:
                for target in (8, 16):
                    if warps > target:
                        continue
                    splits.append((warps, chunks, max(1, target // warps)))
    return [fill_geometry(rows, w, c, g, device, ring_kb=ring_kb) for w, c, g in splits]


def descend(chain: Chain, quick: bool, starts_only: bool = False) -> tuple[dict[str, MatvecPlan], float, list[str]]:
    device = chain.gpu.device
    best: dict[str, Geometry] = {}
    for kind in KINDS:
        rows, cols = chain.size[kind]
        geometry = default_geometry(kind, chain.dtype, rows, cols, device)  # type: ignore[arg-type]
        assert geometry is not None
        best[kind] = geometry
    log: list[str] = []

    def plans_of(choice: dict[str, Geometry]) -> dict[str, MatvecPlan]:
        return {k: chain.plan(k, g) for k, g in choice.items()}

    replace = dataclasses.replace

    def refit(kind: str, g: Geometry, **changes: int) -> Geometry:
        groups = g.threads // 32 // g.warps_per_row
        new = fill_geometry(chain.size[kind][0], g.warps_per_row, g.chunks, groups, device, **changes)
        return replace(new, pace=g.pace, blocks_per_sm=g.blocks_per_sm)

    base = chain.time_us(chain.graph(plans_of(best)))
    log.append(f"default {base:.1f}")
    if quick:
        return plans_of(best), base, log
    # Whole-step settings first: how deep the rings are, how fast they fill.
    starts = []
    for batch in (4, 8):
        for ring_kb in (64, 92):
            for pace in (1, 2):
                choice = {k: replace(refit(k, g, ring_kb=ring_kb, batch=batch), pace=pace) for k, g in best.items()}
                starts.append((f"batch {batch} ring {ring_kb} pace {pace}", choice))
    compile_all([chain.plan(k, g).spec for _, choice in starts for k, g in choice.items()], device.arch)
    timed = []
    for label, choice in starts:
        timed.append((chain.time_us(chain.graph(plans_of(choice)), 11), label, choice))
    timed.sort(key=lambda r: r[0])
    log += [f"  start {t:.1f} {label}" for t, label, _ in timed]
    base, label, best = timed[0]
    log.append(f"start {base:.1f} {label}")
    print("\n".join(log[:10]))

    if starts_only:
        print("\n".join(log[:14] + log[-9:]))
        return plans_of(best), base, log

    def attempt(kind: str, options: list[Geometry], label: str) -> None:
        nonlocal base
        options = [g for g in dict.fromkeys(options) if g != best[kind]]
        plans = {}
        for g in options:
            plan = chain.plan(kind, g)
            if plan.smem <= 101 * 1024:
                plans[g] = plan
        compiled = compile_all([p.spec for p in plans.values()], device.arch)
        results = []
        for g, plan in plans.items():
            r = compiled[plan.spec].resources
            t = chain.time_us(chain.graph(plans_of(best) | {kind: plan}), 9)
            results.append((t, g, r.spill_bytes))
        for t, g, spill in sorted(results, key=lambda r: r[0])[:4]:
            log.append(
                f"  {kind:7s} {label:7s} {t:8.1f} T{g.threads} wk{g.warps_per_row} nc{g.chunks} rb{g.batch} rs{g.stage_rows} "
                f"s{g.stages} p{g.pace} b{g.blocks_per_sm} r{g.max_registers} x{g.resident} spill{spill}"
            )
        good = [r for r in results if r[2] == 0]
        if good:
            t, g, _ = min(good, key=lambda r: r[0])
            again = chain.time_us(chain.graph(plans_of(best)), 21)
            t = chain.time_us(chain.graph(plans_of(best) | {kind: chain.plan(kind, g)}), 21)
            if t < again * 0.9985:
                best[kind], base = g, t
                log.append(f"  -> {kind} {label} {again:.1f} -> {t:.1f}")

    for kind in KINDS:
        rows, _ = chain.size[kind]
        g0 = best[kind]

        def like(g: Geometry, g0: Geometry = g0) -> Geometry:
            return replace(g, pace=g0.pace, blocks_per_sm=g0.blocks_per_sm)

        attempt(kind, [like(g) for g in candidates(chain, kind, 80)], "split")
        g = best[kind]
        groups = g.threads // 32 // g.warps_per_row
        rings = [
            like(fill_geometry(rows, g.warps_per_row, g.chunks, groups, device, stage_kb=kb, ring_kb=ring_kb, batch=batch))
            for kb in (8, 16, 32) for ring_kb in (64, 92) for batch in (4, 8)
        ]  # fmt: skip
        attempt(kind, rings, "ring")
        attempt(kind, [replace(best[kind], pace=p) for p in (1, 2)], "pace")
    return plans_of(best), base, log


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="1b,mistral")
    parser.add_argument("--dtypes", default="fp16,fp8,gf4")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--starts", action="store_true")
    options = parser.parse_args()
    gpu = Launcher()
    cp = gpu.cupy
    out_dir = Path(os.environ.get("OUT", "."))
    results = {}
    for dtype in options.dtypes.split(","):
        n = {"fp16": 14_400, "fp8": 7_200, "gf4": 3_600}[dtype] * 10**6 // 4
        rng = cp.random.default_rng(1)
        block = 1 << 24
        arena = cp.empty(n, cp.uint32)
        if dtype == "gf4":
            codes = rng.integers(0, 2**32, block + 4096, dtype=cp.uint32) & cp.uint32(0xFFFFFF00)
            scale = (rng.standard_normal(block + 4096, dtype=cp.float32) * 0.04).astype(cp.float16).view(cp.uint16) >> 8
            base = codes | scale.astype(cp.uint32)
        else:
            count = (block + 4096) * (2 if dtype == "fp16" else 4)
            values = (rng.standard_normal(count, dtype=cp.float32) * 0.03).astype(cp.float16)
            base = (values if dtype == "fp16" else (values.view(cp.uint16) >> 8).astype(cp.uint8)).view(cp.uint32)
        for i, at in enumerate(range(0, n, block)):
            size = min(block, n - at)
            arena[at : at + size] = base[(i * 257) % 4096 : (i * 257) % 4096 + size]
        cp.cuda.Device().synchronize()
        for shape in options.shapes.split(","):
            t0 = time.time()
            chain = Chain(gpu, shape, dtype, arena)
            plans, _, log = descend(chain, options.quick, options.starts)
            step = chain.time_us(chain.graph(plans), 31)
            chain.graph(plans).launch(chain.stream)
            chain.stream.synchronize()
            with_pdl = chain.logits.copy()
            off_graph = chain.graph(plans, pdl=False)
            off = chain.time_us(off_graph, 11)
            same = bool((with_pdl.view(cp.uint32) == chain.logits.view(cp.uint32)).all()) and bool(cp.isfinite(with_pdl).all())
            print(placement(chain, plans))
            print(anatomy(chain, plans))
            each = {k: chain.time_us(chain.graph(plans, only=k), 11) / (chain.layers if k != "logits" else 4) for k in KINDS}
            total = chain.total
            (out_dir / f"tune-{shape}-{dtype}.log").write_text("\n".join(log))
            parts = " ".join(f"{k} {t:.2f}us/{chain.bytes[k] / t / 1e3:.0f}" for k, t in each.items())
            print(
                f"{shape:8s} {dtype} step {step:7.1f} us {1e6 / step:6.0f} tok/s {total / step / 1e3:5.0f} GB/s "
                f"| no PDL {off:7.1f} same={same} | {parts} | {log[0]} ({time.time() - t0:.0f} s)",
                flush=True,
            )
            results[f"{shape}-{dtype}"] = {
                "step_us": step, "no_pdl_us": off, "same": same, "each_us": each,
                "geometry": {k: dataclasses.asdict(p.geometry) for k, p in plans.items()},
            }  # fmt: skip
            for k, p in plans.items():
                g = p.geometry
                print(
                    f"    {k:7s} T{g.threads} wk{g.warps_per_row} nc{g.chunks} rb{g.batch} rs{g.stage_rows} s{g.stages} "
                    f"p{g.pace} b{g.blocks_per_sm} r{g.max_registers} x{g.resident} smem {p.smem} grid {p.grid}",
                    flush=True,
                )
            del chain
        del arena
        cp.get_default_memory_pool().free_all_blocks()
    (out_dir / "tune.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
