"""How this GPU's clocks and tools behave, in numbers: ``python -m tests.gpu.check_capture [--shapes S:DTYPE ...] [--out DIR]``.

Prints what an event pair costs, CUPTI's records of a step raw, and the fidelity table of each shape, each part guarded so that
one that fails does not hide the others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calmnb.engine.cuda import open_random_engine
from calmnb.shapes import TIED, shape_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m:fp16", "llama-3.2-1b:fp8", "mistral-7b:fp8"])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--no-ncu", action="store_true")
    arguments = parser.parse_args()
    parts: list[tuple[str, Callable[[], None]]] = []
    config = shape_config("llama-3.2-1b", "fp8").replace(n_layers=3)
    with open_random_engine(config, is_tied=True, seq_len=256) as engine:
        engine.pretend_cached(100)
        for name, part in (
            ("event pairs", event_pairs),
            ("cupti", cupti_records),
            ("nvml", nvml),
            ("handed over", handed_over),
        ):
            guarded(name, lambda part=part: part(engine))  # type: ignore[misc]
    for text in arguments.shapes:
        shape, dtype = text.split(":")
        parts.append((f"fidelity {text}", lambda shape=shape, dtype=dtype: fidelity(shape, dtype, arguments.out)))  # type: ignore[misc]
    parts.append(("stamp costs", lambda: stamp_costs(None)))
    if not arguments.no_ncu:
        parts.append(("ncu", ncu))
    for name, part in parts:
        guarded(name, part)


def guarded(name: str, part: Callable[[], None]) -> None:
    print(f"===== {name}", flush=True)
    began = time.perf_counter()
    try:
        part()
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print(f"----- {name}: {time.perf_counter() - began:.1f} s", flush=True)


def event_pairs(engine: Any) -> None:
    from calmnb.profile.cupti import cupti_problem, trace_kernels

    def us(times: Any) -> str:
        return f"{1e6 * statistics.median(times):.3f}"

    events = engine.runner.events
    times = sorted(1e6 * t for _ in range(3) for t in events.time_pairs(60))
    print(f"nothing: min {times[0]:.3f} median {statistics.median(times):.3f} us")
    for blocks in (1, engine.gpu.sm_count, 2 * engine.gpu.sm_count):
        for ns in (0, 5_000, 20_000):
            pairs, own = events.time_stays(60, ns, blocks)
            over = sorted(1e6 * (a - b) for a, b in zip(pairs, own, strict=True))
            where, low, high = f"stay {ns} ns, {blocks} blocks", over[3], over[-4]
            print(f"{where}: pair {us(pairs)}, itself {us(own)}, over {low:.2f} {statistics.median(over):.2f} {high:.2f}")
            if not cupti_problem():
                with trace_kernels() as records:
                    pairs, own = events.time_stays(60, ns, blocks)
                seen = statistics.median((r.end - r.start) / 1e3 for r in records if r.name == "hold_time")
                print(f"    under cupti: pair {us(pairs)}, itself {us(own)}, cupti {seen:.3f}")


def stamp_costs(_: Any) -> None:
    """Percent that each kind of stamp adds to a step, neighbours in time compared."""
    for shape, dtype in (
        ("smollm2-135m", "fp16"), ("llama-3.2-1b", "fp16"), ("llama-3.2-1b", "fp8"), ("llama-3.2-1b", "gf4"),
        ("mistral-7b", "fp16"), ("mistral-7b", "fp8"), ("mistral-7b", "gf4"),
    ):  # fmt: skip
        with open_random_engine(shape_config(shape, dtype), is_tied=shape in TIED, seq_len=400) as engine:  # type: ignore[arg-type]
            for context in (0,):
                engine.pretend_cached(context)
                levels = (0, 1, 2, 3, 4)
                for level in levels:
                    engine.time_graph(context, 40, level=level)
                times = [[engine.time_graph(context, 40, level=level) for level in levels] for _ in range(7)]
                costs = [100 * statistics.median(row[i] / row[0] - 1 for row in times) for i in range(len(levels))]
                off = 1e6 * statistics.median(row[0] for row in times)
                print(
                    f"{shape} {dtype} at {context}: {off:.1f} us; "
                    + "  ".join(f"level {i}: {c:+.2f}%" for i, c in enumerate(costs) if i)
                )


def cupti_records(engine: Any) -> None:
    from calmnb.profile.cupti import step_records, trace_kernels

    for overlap in (True, False):
        engine.graphs.overlap = overlap
        with trace_kernels() as records:
            engine.graphs.forget()
            list(engine.decode_many(1, 100, 3))
        print(f"overlap {overlap}: {len(records)} records, {len({r.launch for r in records})} launches")
        last = max(r.launch for r in records)
        for r in sorted((r for r in records if r.launch == last), key=lambda r: r.start)[:40]:
            print(f"  node {r.node} graph {r.graph} {r.name:20s} {r.start % 10**9} +{r.end - r.start}")
        for step in step_records(records, engine, 100, 3):
            print(f"  pos {step.pos}: {1e6 * (step.step_end - step.step_start):.2f} us, {len(step.kernels)} kernels")
    engine.graphs.overlap = True


def handed_over(engine: Any) -> None:
    """Ends of kernels as the next one sees them, beside those that their last blocks note."""
    from calmnb.profile.recorder import SessionRecorder

    rows: dict[int, Any] = {}
    for level in (1, 3):
        recorder = SessionRecorder({})
        between, moving = engine.time_steps(100, 60, recorder, level=level)
        settled = recorder.steps[5:]
        first = [r.step_start for r in settled]
        rows[level] = [np.median([r.starts - t for r, t in zip(settled, first, strict=True)], axis=0),
                       np.median([r.ends - t for r, t in zip(settled, first, strict=True)], axis=0)]  # fmt: skip
        whole = statistics.median(r.step_end - r.step_start for r in settled)
        print(f"level {level}: rows {1e6 * whole:.2f} us, events and moving", [statistics.median(x) for x in (between, moving)])
    for i, kernel in enumerate(settled[0].kernels):
        cells = (f"{1e6 * rows[level][side][i]:9.2f}" for level in (1, 3) for side in (0, 1))
        blocks, seen = " ".join([next(cells), next(cells)]), " ".join([next(cells), next(cells)])
        print(f"  {kernel.stage:16s} {kernel.layer:3d} start, end: blocks {blocks}  handed over {seen}")


def nvml(engine: Any) -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByPciBusId(engine.gpu.pci_bus_id)
    calls: dict[str, Callable[[], Any]] = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "sm clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "energy": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "throttle": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    for name, call in calls.items():
        try:
            began = time.perf_counter()
            value = call()
            print(f"{name}: {value} ({1e6 * (time.perf_counter() - began):.0f} us)")
        except Exception as error:
            print(f"{name}: {type(error).__name__} {error}")
    seen = []
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        seen.append((time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    marks = [b[0] for a, b in itertools.pairwise(seen) if a[1] != b[1]]
    print(f"energy counter changed {len(marks)} times in 0.5 s at", [round(m - seen[0][0], 3) for m in marks[:12]])


def fidelity(shape: str, dtype: Any, out: Path) -> None:
    from calmnb.profile.verify import verify_engine
    from calmnb.profile.verify_report import fidelity_markdown

    began = time.perf_counter()
    with open_random_engine(shape_config(shape, dtype), is_tied=shape in TIED, seq_len=400) as engine:
        print(f"opened in {time.perf_counter() - began:.1f} s")
        found = verify_engine(engine, shape, say=lambda line: print(f"{time.perf_counter() - began:.1f} s {line}", flush=True))
    text = fidelity_markdown(found, command=f"calmnb verify-profile --shape {shape} --dtype {dtype}")
    (out / f"fidelity-{shape}-{dtype}.md").write_text(text)
    print(text)


def ncu() -> None:
    from calmnb.profile.ncu import attach_measured
    from calmnb.profile.ncu_step import measure_step

    for shape, dtype, context in (("llama-3.2-1b", "fp16", 1000), ("mistral-7b", "fp8", 0)):
        began = time.perf_counter()
        session, launches, text = measure_step(
            shape_config(shape, dtype), is_tied=shape in TIED, context=context, layers=2, output=lambda line: print(" ", line)
        )  # type: ignore[arg-type]
        print(f"{shape} {dtype}: {time.perf_counter() - began:.1f} s, {len(launches)} launches, {len(text)} characters")
        print(attach_measured(session, launches).to_string())


if __name__ == "__main__":
    main()
