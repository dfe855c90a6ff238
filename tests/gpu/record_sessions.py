"""Record the Sessions that come with calmnb: ``python -m tests.gpu.record_sessions --out notebooks/data``.

Two shapes x three weight dtypes with an fp16 KV cache, and fp8 weights with an fp8 cache, each at eight contexts from 0 to
32,000: eight files, under 5 MB in all. With ``--ncu``, also one decode step of Mistral-7B fp8 (4 of its layers, 1,000
positions) under Nsight Compute: its CSV and the session beside it. Needs a GPU with 24 GB or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from calmnb.engine.cuda_device import CudaDevice
from calmnb.engine.cuda_graphs import step_specs
from calmnb.engine.cuda_program import make_plans
from calmnb.engine.cuda_stamps import StampLevel
from calmnb.kernels import compile_all
from calmnb.profile.shape import CONTEXTS, file_name, profile_shape
from calmnb.profile.telemetry import telemetry_note
from calmnb.shapes import shape_config

CELLS = (("fp16", "fp16"), ("fp8", "fp16"), ("gf4", "fp16"), ("fp8", "fp8"))


def compile_ahead(shapes: list[str], longest: int) -> int:
    """Compile what all recordings need, many at a time: the engine does it one dtype after the other."""
    device = CudaDevice()
    arch, sms = device.arch, device.sm_count
    device.close()
    specs = []
    for shape in shapes:
        for dtype, kv_dtype in CELLS:
            plans = make_plans(shape_config(shape, dtype), kv_dtype, longest, "stop", arch, sms)  # type: ignore[arg-type]
            plain = step_specs(plans)
            specs += [*plain, *(spec.with_defines(CALMNB_STAMPS=int(StampLevel.HANDED_OVER)) for spec in plain)]
    return len(compile_all(specs, arch, threads=16))


def measure_with_ncu(out: Path, device: str) -> None:
    """One step under Nsight Compute; a failure is told and leaves the other files alone."""
    from calmnb.profile.ncu import attach_measured
    from calmnb.profile.ncu_step import measure_step

    name = f"{device}-ncu-mistral-7b-fp8"
    try:
        config = shape_config("mistral-7b", "fp8")
        session, launches, text = measure_step(config, context=1000, layers=4, name="mistral-7b", output=lambda line: None)
        (out / f"{name}.csv").write_text(text, encoding="utf-8")
        session.save(out / f"{name}.calmprof")
        print(attach_measured(session, launches).to_string())
    except Exception as error:
        print(f"ncu: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="h200", help="start of the file names")
    parser.add_argument("--shapes", nargs="+", default=["llama-3.2-1b", "mistral-7b"])
    parser.add_argument("--at", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ncu", action="store_true", help="measure one step under Nsight Compute too")
    parser.add_argument("--only-ncu", action="store_true", help="that, and nothing else")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only_ncu:
        return measure_with_ncu(arguments.out, arguments.device)
    options: dict[str, Any] = {"contexts": arguments.at, "tokens": arguments.tokens, "rounds": arguments.rounds}
    begun = time.perf_counter()
    count = compile_ahead(arguments.shapes, max(arguments.at) + 49)
    print(f"{count} kernels compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    total = 0
    for shape in arguments.shapes:
        for dtype, kv_dtype in CELLS:
            started = time.perf_counter()
            session = profile_shape(shape, dtype=dtype, kv_dtype=kv_dtype, **options)  # type: ignore[arg-type]
            path = session.save(arguments.out / file_name(shape, dtype, kv_dtype, device=arguments.device))
            total += path.stat().st_size
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - started:.1f} s")
            steps = session.steps.query("phase == 'decode' and not warmup")
            stamped = {c: 1e6 * float(steps.query("@c <= pos < @c + @arguments.tokens")["duration_s"].median())
                       for c in arguments.at}  # fmt: skip
            plain = session.meta["graph_us"]
            print("  us a step, stamped / plain: " + "  ".join(
                f"{c}: {stamped[c]:.1f}/{plain[str(c)]:.1f}" for c in arguments.at))  # fmt: skip
            print(f"  {session.summary()}")
            print(f"  {telemetry_note(session.meta) or session.meta['telemetry']}", flush=True)
    if arguments.ncu:
        measure_with_ncu(arguments.out, arguments.device)
    print(f"{total / 1e6:.2f} MB in all, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
