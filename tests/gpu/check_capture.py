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
        for name, part in (("event pairs", event_pairs), ("cupti", cupti_records), ("nvml", nvml)):
            guarded(name, lambda part=part: part(engine))  # type: ignore[misc]
    for text in arguments.shapes:
        shape, dtype = text.split(":")
        parts.append((f"fidelity {text}", lambda shape=shape, dtype=dtype: fidelity(shape, dtype, arguments.out)))  # type: ignore[misc]
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
    events = engine.runner.events
    for title, launch in (
        ("nothing", None),
        ("a kernel that ends at once", events.idle_launch(0)),
        ("a kernel that stays 5 us", events.idle_launch(5_000)),
        ("a kernel that stays 20 us", events.idle_launch(20_000)),
    ):
        times = sorted(1e6 * t for _ in range(3) for t in events.time_pairs(60, launch))
        print(f"{title}: min {times[0]:.3f} median {statistics.median(times):.3f} p90 {times[len(times) * 9 // 10]:.3f} us")


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
    with trace_kernels() as records:
        engine.runner.events.time_pairs(20, engine.runner.events.idle_launch(0))
        engine.runner.events.time_pairs(20, engine.runner.events.idle_launch(20_000))
    print("hold by cupti, us:", " ".join(f"{(r.end - r.start) / 1e3:.2f}" for r in records))


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
