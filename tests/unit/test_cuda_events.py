"""How the CUDA engine times recorded steps: stamps, stamps of block 0 alone, and events with NVTX ranges."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calmnb.config import ModelConfig
from calmnb.engine import cuda, cuda_graphs
from calmnb.engine.cuda_events import step_name
from calmnb.engine.cuda_program import make_plans
from calmnb.engine.cuda_stamps import STAMP_ROWS, StampRing
from calmnb.engine.stages import stage_cost, step_cost
from calmnb.errors import ConfigError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources, compile_all
from calmnb.profile.attribution import layer_of_range, stage_of_range, step_of_range
from calmnb.profile.nsys import read_nsys
from calmnb.sampler import Sampling
from tests.engine_models import random_weights
from tests.fake_gpu import ClockedGpu
from tests.nsys_files import ReportFile

CONFIG = ModelConfig("llama", "fp16", 64, 128, 16, 2, 4, 2, 96, rotary_dim=16)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Every range that was opened, as its path of names and its payload; `nvtx` is a fake that checks the nesting."""
    seen: list[tuple[str, int | None]] = []
    stack: list[str] = []

    def push(message: str, *, domain: str, payload: int | None = None) -> None:
        assert domain == "calmnb"
        stack.append(message)
        seen.append((" > ".join(stack), payload))

    def pop(*, domain: str) -> None:
        assert domain == "calmnb"
        stack.pop()

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=push, pop_range=pop, stack=stack))
    return seen


class Steps:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def add(self, phase: str, pos: int, kv_len: int, n: int, kernels: Any, starts: Any, ends: Any, a: float, b: float) -> None:
        self.steps.append((phase, pos, kv_len, n, kernels, starts.copy(), ends.copy(), a, b))

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        raise AssertionError("the engine does not sample here")


def open_engine(source: Any = "stamps", gpu: ClockedGpu | None = None, **options: Any) -> tuple[cuda.CudaEngine, Steps]:
    config = CONFIG.replace(**options)
    engine = cuda.open_cuda_engine(random_weights(config), gpu=gpu or ClockedGpu(), seq_len=64)
    engine.time_source = source
    recorder = Steps()
    engine.recorder = recorder
    return engine, recorder


# -- stamps -----------------------------------------------------------------------------------------------------------


def test_stamps_are_exact_to_the_nanosecond() -> None:
    engine, recorder = open_engine(gpu=ClockedGpu(kernel_s=1.536e-6))
    list(engine.decode_many(3, 0, 5))
    for step in recorder.steps:
        np.testing.assert_allclose(step[6] - step[5], 1.536e-6, atol=2e-9)


def test_a_step_queued_behind_another_begins_where_that_ended() -> None:
    gpu = ClockedGpu()
    engine, recorder = open_engine(gpu=gpu)
    run = gpu.on_run

    def with_pause(launches: Any) -> None:
        gpu.now += 2e-6  # between two graphs
        run(launches)

    gpu.on_run = with_pause
    list(engine.decode_many(3, 0, 6))
    first, *others = recorder.steps
    assert first[8] - first[7] == pytest.approx(len(first[4]) * 10e-6, abs=1e-8)
    for step in others:
        assert step[5][0] - step[7] == pytest.approx(2e-6, abs=1e-8)


def test_steps_never_overlap_on_the_hosts_clock() -> None:
    gpu = ClockedGpu()
    engine, recorder = open_engine(gpu=gpu)
    for first in (0, 8, 16):  # the way from clock to clock is measured again at each
        list(engine.decode_many(3, first, 8))
        gpu.now += 1e-4
    for before, after in itertools.pairwise(recorder.steps):
        assert after[7] >= before[8] - 1e-9


def test_a_pause_of_the_hosts_is_in_no_step() -> None:
    gpu = ClockedGpu()
    engine, recorder = open_engine(gpu=gpu)
    for pos in range(3):
        engine.step(1, pos)
        gpu.now += 1e-3
    assert [step[8] - step[7] == pytest.approx(len(step[4]) * 10e-6, abs=1e-8) for step in recorder.steps] == [True] * 3


def test_the_ring_holds_thousands_of_steps() -> None:
    assert STAMP_ROWS >= 4096
    engine, _ = open_engine()
    engine.step(1, 0)
    assert engine.program("logits", stamped=True).launches[-1].args[0].rows == STAMP_ROWS


def test_a_row_that_is_still_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The serial number arrives before the times: those that stand there are of an older step."""
    gpu = ClockedGpu()
    monkeypatch.setattr("calmnb.engine.cuda_graphs.StampRing", functools.partial(StampRing, rows=12))
    engine, recorder = open_engine(gpu=gpu)
    list(engine.decode_many(3, 0, 20))
    stamps = engine.graphs.stamps
    assert stamps is not None
    row = stamps._ring[20 % 12 * stamps._stride :][: stamps._stride]
    late: list[np.ndarray] = []
    run = gpu.on_run

    def out_of_order(launches: Any) -> None:
        before = row.copy()
        run(launches)
        late.append(row[6:40].copy())
        row[6:40] = before[6:40]

    def arrive(seconds: float) -> None:
        row[6:40] = late.pop() if late else row[6:40]

    gpu.on_run = out_of_order
    monkeypatch.setattr("calmnb.engine.cuda_stamps.time.sleep", arrive)
    list(engine.decode_many(3, 20, 1))
    step = recorder.steps[-1]
    np.testing.assert_allclose(step[6] - step[5], 10e-6, atol=2e-9)
    assert step[5][0] > recorder.steps[-2][6][-1]


def test_the_ring_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine.cuda_graphs.StampRing", functools.partial(StampRing, rows=12))
    engine, recorder = open_engine()
    list(engine.decode_many(3, 0, 40))
    assert [step[1] for step in recorder.steps] == list(range(40))
    starts = np.array([step[5][0] for step in recorder.steps])
    assert (np.diff(starts) > 9e-6).all(), "an older step was read again"


def test_steps_that_nobody_asks_for_are_passed_over() -> None:
    engine, recorder = open_engine()
    run = engine.decode_many(3, 0, 30)
    next(run)
    run.close()
    list(engine.decode_many(3, 1, 2))
    assert [step[1] for step in recorder.steps] == [0, 1, 2]
    times = [step[7] for step in recorder.steps]
    assert times == sorted(times)


def levels_of(graph: Any) -> set[int]:
    return {dict(one.kernel.spec.defines).get("CALMNB_STAMPS", 0) for one in graph if one.kernel.name != "collect_stamps"}


@pytest.mark.parametrize(
    ("source", "arch", "overlap", "level"),
    [
        ("stamps", "sm_90", True, 3), ("stamps-light", "sm_90", True, 4), ("stamps", "sm_90", False, 1),
        ("stamps-light", "sm_90", False, 2), ("stamps", "sm_89", True, 1), ("stamps-light", "sm_80", True, 2),
    ],
)  # fmt: skip
def test_kernels_note_what_is_cheapest_where_they_overlap(source: Any, arch: str, overlap: bool, level: int) -> None:
    gpu = ClockedGpu()
    gpu.arch, gpu.has_pdl = arch, arch >= "sm_90"
    engine, recorder = open_engine(source, gpu)
    engine.graphs.overlap = overlap
    list(engine.decode_many(3, 0, 3))
    assert engine.info.time_source == source
    assert levels_of(gpu.graphs[-1]) == {level}
    for step in recorder.steps:
        np.testing.assert_allclose(step[6] - step[5], 10e-6, atol=2e-9)
        assert step[8] - step[7] == pytest.approx(len(step[4]) * 10e-6, abs=2e-8)


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_every_kernel_of_a_step_compiles_with_stamps(level: int, tmp_path: Path) -> None:
    """Level 3 and 4 stamp inside pdl_wait, which takes the names of arguments and start from the kernel around it."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    config = CONFIG.replace(dtype="fp8", n_experts=4, n_experts_active=2)
    specs = cuda_graphs.step_specs(make_plans(config, "fp8", 4096, "roll", "sm_90", 132))
    compiled = compile_all([spec.with_defines(CALMNB_STAMPS=level) for spec in specs], "sm_90", cache_dir=tmp_path, threads=2)
    assert [spec for spec, kernel in compiled.items() if kernel.resources.spill_bytes] == []


def test_a_kernel_ends_when_the_next_one_sees_it_end() -> None:
    class Overlapping(ClockedGpu):
        """A kernel starts 4 us before the one ahead of it ends."""

        def _run(self, launches: Any) -> None:
            super()._run(launches)
            for i, one in enumerate(launches):
                if i and getattr(one.args[0], "stamp", 0):
                    pair = (ctypes.c_uint64 * 2).from_address(one.args[0].stamp)
                    pair[0] -= 4000

    gpu = Overlapping()
    engine, recorder = open_engine("stamps", gpu)
    collect, gpu._collect = gpu._collect, lambda a: None  # type: ignore[method-assign]
    run = gpu.on_run

    def in_two(launches: Any) -> None:
        run(launches)  # the stamps, changed after all kernels ran, are moved last
        collect(launches[-1].args[0])

    gpu.on_run = in_two
    list(engine.decode_many(3, 0, 2))
    for step in recorder.steps:
        starts, ends = step[5], step[6]
        np.testing.assert_allclose(ends[:-1] - starts[1:], 4e-6, atol=2e-9)
        np.testing.assert_allclose(np.diff(ends), 10e-6, atol=2e-9)


def test_without_overlap_no_kernel_depends_on_the_one_before() -> None:
    gpu = ClockedGpu()
    engine, _ = open_engine(gpu=gpu)
    list(engine.decode_many(3, 0, 2))
    engine.graphs.overlap = False
    list(engine.decode_many(3, 2, 2))
    assert [any(one.dependent for one in graph) for graph in gpu.graphs] == [True, False]


def test_a_step_without_a_recorder_has_no_stamps() -> None:
    gpu = ClockedGpu()
    engine, _ = open_engine(gpu=gpu)
    engine.recorder = None
    list(engine.decode_many(3, 0, 2))
    assert [dict(one.kernel.spec.defines).get("CALMNB_STAMPS", 0) for one in gpu.graphs[0]] == [0] * len(gpu.graphs[0])


@pytest.mark.parametrize("source", ["cupti", "nsys", "cpu", "clock", ""])
def test_sources_that_the_engine_cannot_time_by_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="accepted are stamps, stamps-light, events"):
        open_engine(source)


# -- events -----------------------------------------------------------------------------------------------------------


def test_a_kernel_takes_what_lies_between_its_events_less_what_the_pair_adds(ranges: Any) -> None:
    engine, recorder = open_engine("events", ClockedGpu(kernel_s=7e-6, pair_s=1.4e-6))
    list(engine.decode_many(3, 0, 3))
    assert engine.runner.events.overhead_s == pytest.approx(0.7e-6, abs=2e-9)
    for _, _, _, _, kernels, starts, ends, begin, end in recorder.steps:
        assert len(kernels) == len(starts)
        np.testing.assert_allclose(ends - starts, 7e-6, atol=2e-9)
        assert (starts[1:] >= ends[:-1]).all(), "kernels overlap"
        assert begin <= starts[0]
        assert end == ends[-1]


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, min_p=0.0, top_k=5, seed=1)])
def test_tokens_are_the_graphs(ranges: Any, sampling: Sampling | None) -> None:
    answers = []
    for source in ("stamps", "events"):
        engine, recorder = open_engine(source)
        answers.append([(d.token, d.pos) for d in engine.decode_many(3, 0, 20, sampling=sampling)])
        assert [step[1] for step in recorder.steps] == list(range(20))
    assert answers[0] == answers[1]


def test_the_same_kernels_run_one_by_one(ranges: Any) -> None:
    gpu = ClockedGpu()
    engine, _ = open_engine("events", gpu)
    gpu.launched.clear()
    list(engine.decode_many(3, 0, 1))
    mine = [one for one in gpu.launched if not one.kernel.name.startswith("hold_")]
    program = engine.program("greedy", short=True)
    assert [one.kernel for one in mine] == [one.kernel for one in program.launches]
    assert not any(one.dependent for one in mine)


def test_the_stream_is_held_while_a_group_of_kernels_is_queued(ranges: Any) -> None:
    gpu = ClockedGpu()
    engine, _ = open_engine("events", gpu, n_layers=30)
    gpu.launched.clear()
    list(engine.decode_many(3, 0, 1))
    names = [one.kernel.name for one in gpu.launched]
    holds = [i for i, name in enumerate(names) if name == "hold_stream"]
    assert len(holds) == 2 + -(-(2 + 30 * 5 + 1) // 64)  # twice to measure what a pair adds
    flag = engine.runner.events._flag[0]
    assert flag == gpu.launched[holds[-1]].args[1].value, "the last group is never let go"


def test_nothing_runs_ahead_of_the_caller(ranges: Any) -> None:
    engine, recorder = open_engine("events")
    run = engine.decode_many(3, 0, 20)
    for i in range(3):
        next(run)
        assert len(recorder.steps) == i + 1
    run.close()
    assert [d.pos for d in engine.decode_many(3, 3, 2)] == [4, 5]
    assert [step[1] for step in recorder.steps] == [0, 1, 2, 3, 4]


def test_ranges_are_step_layer_and_stage_with_the_stages_bytes(ranges: Any) -> None:
    engine, _ = open_engine("events")
    engine._positions.end = 12
    list(engine.decode_many(3, 12, 1, sampling=Sampling(temperature=0.5)))
    step = "decode pos=12 kv_len=13"
    layers = [
        path
        for i in range(2)
        for path in [
            f"{step} > layer {i}",
            *(
                f"{step} > layer {i} > {s}"
                for s in ("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down")
            ),
        ]
    ]
    assert [path for path, _ in ranges] == [step, f"{step} > embed", *layers, f"{step} > output", f"{step} > sample"]
    payloads = dict(ranges)
    assert payloads[f"{step} > layer 1 > attention"] == stage_cost(CONFIG, "attention", 13).bytes_min
    assert payloads[f"{step} > layer 0 > matmul_qkv"] == stage_cost(CONFIG, "matmul_qkv", 13).bytes_min
    assert sys.modules["nvtx"].stack == []


def test_router_and_experts_share_a_range(ranges: Any) -> None:
    engine, _ = open_engine("events", n_experts=4, n_experts_active=2)
    list(engine.decode_many(3, 0, 1))
    assert [path for path, _ in ranges].count("decode pos=0 kv_len=1 > layer 0 > matmul_ffn_up") == 1


def test_a_prompt_in_batches_has_ranges_too(ranges: Any) -> None:
    engine, recorder = open_engine("events")
    engine.prefill([5] * 24)
    step = "prefill pos=0 n_tokens=24 kv_len=24"
    paths = [path for path, _ in ranges]
    assert paths[:3] == [step, f"{step} > embed", f"{step} > layer 0"]
    assert paths[-2:] == [f"{step} > layer 1 > matmul_ffn_down", f"{step} > output"]
    assert dict(ranges)[f"{step} > layer 1 > attention"] == stage_cost(CONFIG, "attention", 24, n_tokens=24).bytes_min
    assert recorder.steps[0][:4] == ("prefill", 0, 24, 24)
    assert sys.modules["nvtx"].stack == []


def test_a_graph_has_the_range_of_its_step(ranges: Any) -> None:
    engine, _ = open_engine("stamps")
    list(engine.decode_many(3, 0, 2))
    assert [path for path, _ in ranges] == ["decode pos=0 kv_len=1", "decode pos=1 kv_len=2"]


def test_what_is_not_recorded_has_no_range(ranges: Any) -> None:
    engine, _ = open_engine("events")
    engine.recorder = None
    list(engine.decode_many(3, 0, 2))
    engine.prefill([5] * 8, 2)
    assert ranges == []


def test_ranges_are_closed_when_a_launch_fails(ranges: Any) -> None:
    gpu = ClockedGpu()
    engine, _ = open_engine("events", gpu)
    list(engine.decode_many(3, 0, 1))

    def fail(launches: Any) -> None:
        raise RuntimeError("no")

    gpu.on_launch = fail
    with pytest.raises(RuntimeError):
        list(engine.decode_many(3, 1, 1))
    assert sys.modules["nvtx"].stack == []


def test_nsys_sees_steps_layers_stages_and_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the engine tells NVTX and CUDA, written as a report of Nsight Systems and read back."""
    gpu, report, host = ClockedGpu(kernel_s=10e-6), ReportFile(tmp_path / "r.sqlite"), itertools.count(1)
    opened: list[tuple[str, int, int | None]] = []

    def pop(*, domain: str) -> None:
        text, start, payload = opened.pop()
        report.push(text, start, next(host), payload=payload)

    push = lambda text, *, domain, payload=None: opened.append((text, next(host), payload))  # noqa: E731
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=push, pop_range=pop))
    run = gpu.on_launch

    def traced(launches: Any) -> None:
        began = gpu.now * 1e6
        run(launches)
        for one in launches:
            report.launch(
                one.kernel.name, next(host) + 0.1, began + 1e4, gpu.now * 1e6 + 1e4 + (one.kernel.name == "hold_stream")
            )

    engine, _ = open_engine("events", gpu, n_layers=14)  # more kernels than are queued at once
    gpu.on_launch = traced
    engine._positions.end = 12
    list(engine.decode_many(3, 12, 3))
    session = read_nsys(report.write())
    assert session.steps["pos"].tolist() == [12, 13, 14]
    assert session.steps["kv_len"].tolist() == [13, 14, 15]
    rows = session.events[(session.events["step"] == 1) & (session.events["stage"] != "gap")]
    program = engine.program_at("greedy", 13)
    assert list(zip(rows["stage"], rows["layer"], strict=True)) == [(k.stage, k.layer) for k in program.kernels]
    np.testing.assert_allclose(rows["duration_s"], 10e-6, atol=2e-9)
    config = CONFIG.replace(n_layers=14)
    assert session.steps["bytes_min"].tolist() == [step_cost(config, n).bytes_min for n in (13, 14, 15)]


def test_names_of_ranges_are_read_back() -> None:
    assert step_of_range(step_name("decode", 12, 13)) == ("decode", 12, 13, 1)
    assert step_of_range(step_name("prefill", 3, 27, 24)) == ("prefill", 3, 27, 24)
    assert layer_of_range("layer 3") == 3
    assert stage_of_range("matmul_qkv") == "matmul_qkv"


def test_an_interrupted_step_leaves_no_times_behind() -> None:
    """Ctrl-C while a recorded step was waited for: the steps after it got the times of the steps before them."""
    engine, recorder = open_engine()
    gpu: Any = engine._gpu
    engine.step(1, 0)
    wait = gpu.wait
    calls = iter([None, None, KeyboardInterrupt()])  # a step waits for its times and for its logits

    def interrupted() -> None:
        wait()
        if (error := next(calls, None)) is not None:
            raise error

    gpu.wait = interrupted
    engine.step(2, 1)
    with pytest.raises(KeyboardInterrupt):
        engine.step(2, 2)
    gpu.wait = wait
    engine.recorder = after = Steps()
    engine.step(3, 2)
    list(engine.decode_many(4, 3, 3))
    assert [step[1] for step in after.steps] == [2, 3, 4, 5]
    assert [step[4][-1].stage for step in after.steps] == ["output", "sample", "sample", "sample"]
    assert after.steps[0][-2] >= recorder.steps[-1][-1]
