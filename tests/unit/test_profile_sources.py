"""profile(source=...) and CUPTI's records, on a GPU's stand-in and with stand-ins for NVIDIA's packages."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import calmnb
from calmnb.cli import app
from calmnb.engine import cuda, cuda_graphs
from calmnb.errors import CalmnbError, ConfigError, DeviceError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.profile import cupti as cupti_module
from calmnb.profile.cupti import KernelRecord, kernel_excess, trace_kernels, trace_launches, trace_steps
from calmnb.profile.report import text_report
from calmnb.profile.verify import verify_engine
from tests.fake_gpu import ClockedGpu


class Gpu(ClockedGpu):
    pci_bus_id = "0000:19:00.0"


class FakeCupti(SimpleNamespace):
    """CUPTI that sees what a stand-in GPU runs; `damage` may change a step's records before they are delivered."""

    class cuptiError(Exception):
        pass

    def __init__(self, gpu: ClockedGpu) -> None:
        super().__init__(ActivityKind=SimpleNamespace(CONCURRENT_KERNEL=10))
        self.gpu, self.enabled, self.pending, self.launches = gpu, False, [], 0
        self.registered = 0
        self.damage: Any = lambda records: records
        run = gpu.on_run

        def traced(launches: Any) -> None:
            began = gpu.now
            run(launches)
            self.launches += 1
            if self.enabled:
                each = (gpu.now - began) / len(launches)
                self.pending += self.damage(
                    [self.record(one.kernel.name, began + i * each, each, i) for i, one in enumerate(launches)]
                )

        gpu.on_run = traced
        launch = gpu.on_launch

        def traced_launch(launches: Any) -> None:
            began = gpu.now
            launch(launches)
            if self.enabled:
                seen = [self.record(one.kernel.name, began, gpu.now - began + 0.7e-6, 0) for one in launches]
                for record in seen:
                    record.graph_id = 0
                self.pending += seen

        gpu.on_launch = traced_launch

    def record(self, name: str, start: float, seconds: float, node: int) -> Any:
        return SimpleNamespace(
            name=name, start=round(start * 1e9), end=round((start + seconds) * 1e9), correlation_id=self.launches + 1,
            graph_id=3, graph_node_id=100 + node, registers_per_thread=32,
        )  # fmt: skip

    def get_version(self) -> int:
        return 130000

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        assert requested()[0] > 0
        self.registered += 1
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled = True

    def activity_disable(self, kind: int) -> None:
        self.enabled = False

    def activity_flush_all(self, flag: int) -> None:
        random.Random(1).shuffle(self.pending)
        self.completed(self.pending)
        self.pending = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(choose=lambda pos: 1 + pos % 7)

    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    monkeypatch.setattr(cuda, "CudaDevice", lambda **options: made)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=lambda *a, **k: None, pop_range=lambda **k: None))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return made


@pytest.fixture
def model(gpu: Gpu, spec_model: Any) -> Iterator[Any]:
    with calmnb.load(spec_model("A"), device="auto", seq_len=40) as loaded:
        yield loaded


@pytest.fixture
def cupti(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti(gpu)
    monkeypatch.setattr(cupti_module, "_SINK", cupti_module._Sink())
    monkeypatch.setattr(cupti_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=fake))
    return fake


def record(model: Any, source: Any = None, **options: Any) -> Any:
    return calmnb.profile(model, [1, 2, 3], tokens=8, measure_peak=False, source=source, **options)


# -- profile(source=...) ---------------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_tokens_and_says_which_it_was(model: Any, cupti: FakeCupti) -> None:
    tokens = {}
    for source in (None, "stamps", "stamps-light", "events", "cupti"):
        session = record(model, source)
        assert session.meta["time_source"] == (source or "stamps")
        assert set(session.events["source"]) == {source or "stamps"}
        decoded = session.tokens()
        assert decoded["pos"].tolist() == list(range(3, 10))
        tokens[source] = decoded["token"].tolist()
        assert model.engine.time_source == "stamps"
    assert len({tuple(each) for each in tokens.values()}) == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}])
def test_rows_of_a_step_sum_to_it(model: Any, cupti: FakeCupti, sampling: dict[str, Any]) -> None:
    for source in ("stamps", "stamps-light", "events", "cupti"):
        session = record(model, source, **sampling)
        sums = session.events.groupby("step")["exclusive_s"].sum()
        np.testing.assert_allclose(sums, session.steps["duration_s"], atol=1e-12)


def test_events_say_that_they_serialise(model: Any) -> None:
    session = record(model, "events")
    assert session.meta["serialised"] is True
    assert session.meta["event_overhead_s"] == pytest.approx(1e-6, abs=2e-9)
    assert "launched one by one" in text_report(session)
    assert "launched one by one" in session._repr_html_()
    assert "serialised" not in record(model, "stamps").meta


def test_recorded_work_lies_in_the_profilers_range(model: Any, gpu: Gpu) -> None:
    for source in ("stamps", "events"):
        gpu.profiled.clear()
        record(model, source)
        assert gpu.profiled == [True, False]


def test_the_range_is_closed_and_the_source_restored_when_a_run_fails(model: Any, gpu: Gpu) -> None:
    def fail(launches: Any) -> None:
        raise DeviceError("no")

    gpu.on_launch = gpu.on_run = fail
    with pytest.raises(DeviceError):
        record(model, "events")
    assert gpu.profiled == [True, False]
    assert model.engine.time_source == "stamps"


def test_a_gpu_without_nvml_says_so_in_the_session(model: Any) -> None:
    assert "nvidia-ml-py" in record(model).meta["telemetry"]["problem"]
    assert "telemetry" not in record(model, telemetry=False).meta


@pytest.mark.parametrize("source", ["nsys", "cpu", "clock"])
def test_an_unknown_source_is_refused(model: Any, source: Any) -> None:
    with pytest.raises(ConfigError, match="accepted are stamps, stamps-light, events, cupti"):
        record(model, source)


def test_a_cpu_has_its_own_clock_alone(spec_model: Any) -> None:
    with calmnb.load(spec_model("A"), device="reference") as loaded:
        with pytest.raises(ConfigError, match="the reference engine times by 'cpu' alone"):
            record(loaded, "events")
        assert record(loaded, "cpu").meta["time_source"] == "cpu"


@pytest.mark.filterwarnings("ignore:the model's vocabulary:UserWarning")
def test_the_command_takes_a_source(gpu: Gpu, spec_model: Any, tmp_path: Path) -> None:
    arguments = [
        "profile",
        str(spec_model("T")),
        "-i",
        "dbe",
        "-n",
        "4",
        "--device",
        "cuda",
        "-o",
        str(tmp_path / "s.calmprof"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--source", "events"])
    assert result.exit_code == 0, result.exception
    assert calmnb.Session.load(tmp_path / "s.calmprof").meta["time_source"] == "events"
    assert "launched one by one" in result.stderr
    assert isinstance(CliRunner().invoke(app, [*arguments, "--source", "sundial"]).exception, CalmnbError)


# -- CUPTI -----------------------------------------------------------------------------------------------------------------


def test_kernels_are_named_by_the_order_of_their_nodes(model: Any, cupti: FakeCupti) -> None:
    session = record(model, "cupti")
    program = model.engine.program_at("greedy", 5)
    rows = session.events[(session.events["pos"] == 5) & (session.events["stage"] != "gap")]
    assert list(rows["kernel"]) == [kernel.name for kernel in program.kernels]
    assert list(rows["layer"]) == [kernel.layer for kernel in program.kernels]
    assert (rows["duration_s"] > 0).all()


def test_without_node_numbers_the_order_of_starting_serves(model: Any, cupti: FakeCupti) -> None:
    def unnumbered(records: list[Any]) -> list[Any]:
        for record in records:
            record.graph_node_id = 0
        return records

    cupti.damage = unnumbered
    steps = trace_steps(model.engine, 0, 3)
    assert [step.kernels for step in steps] == [model.engine.program_at("greedy", 0).kernels] * 3


def test_graphs_are_captured_anew_so_that_cupti_knows_their_nodes(model: Any, gpu: Gpu, cupti: FakeCupti) -> None:
    list(model.engine.decode_many(1, 0, 2))
    before = len(gpu.graphs)
    trace_steps(model.engine, 0, 2)
    assert len(gpu.graphs) > before


def test_cupti_is_used_again_and_again_and_registered_once(model: Any, cupti: FakeCupti) -> None:
    for n in (2, 3, 4):
        assert len(trace_steps(model.engine, 0, n)) == n
    assert cupti.registered == 1
    assert not cupti.enabled


def test_what_cupti_counts_beyond_a_kernel_is_measured(model: Any, cupti: FakeCupti) -> None:
    assert kernel_excess(model.engine) == pytest.approx(0.7e-6, abs=2e-9)


def test_verify_takes_off_what_cupti_counts_beyond_a_kernel(
    model: Any, cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measure in ("measure_read", "measure_copy"):
        monkeypatch.setattr(f"calmnb.bench.{measure}", lambda gpu: 4000.0)
    found = verify_engine(model.engine, "tiny", steps=8, rounds=1)
    check = next(check for check in found.checks if check.what.startswith("kernel by events less by CUPTI"))
    assert check.passed is True
    assert check.value == pytest.approx(0.0, abs=0.05)
    assert "0.70 us are taken off" in check.note
    assert [row["cupti_us"] - row["events_us"] for row in found.kernels] == pytest.approx([0.7] * len(found.kernels), abs=0.05)


def test_cupti_sees_the_launches_that_events_time(model: Any, cupti: FakeCupti) -> None:
    engine = model.engine
    steps = trace_launches(engine, 0, 2)
    assert [step.pos for step in steps] == [0, 1]
    assert [step.kernels for step in steps] == [engine.program_at("greedy", 0).kernels] * 2
    assert all((step.ends - step.starts == pytest.approx(10.7e-6, abs=2e-9)) for step in steps)
    assert (engine.recorder, engine.time_source) == (None, "stamps")


def test_launches_that_cupti_lost_are_an_error(model: Any, cupti: FakeCupti) -> None:
    record = cupti.record
    lost = iter([True] + 1000 * [False])

    def forgetful(name: str, *args: Any) -> Any:
        return record("hold_time" if name == "attention" and next(lost) else name, *args)

    cupti.record = forgetful
    with pytest.raises(DeviceError, match=r"delivered \d+ of the \d+ kernel records of 2 steps"):
        trace_launches(model.engine, 0, 2)


def test_missing_records_are_an_error(model: Any, cupti: FakeCupti) -> None:
    seen: list[int] = []
    cupti.damage = lambda records: seen.append(1) or (records if len(seen) != 2 else [])  # type: ignore[func-returns-value]
    with pytest.raises(DeviceError, match="delivered 2 of 3 steps"):
        trace_steps(model.engine, 0, 3)


def test_records_of_other_kernels_are_an_error(model: Any, cupti: FakeCupti) -> None:
    cupti.damage = lambda records: [r for r in records if r.name != "attention"]
    with pytest.raises(DeviceError, match="delivered 0 of 3 steps"):
        trace_steps(model.engine, 0, 3)

    def renamed(records: list[Any]) -> list[Any]:
        records[2].name = "something_else"
        return records

    cupti.damage = renamed
    with pytest.raises(DeviceError, match="are not those of the engine's graph"):
        trace_steps(model.engine, 0, 3)


def test_what_is_no_kernel_is_passed_over(cupti: FakeCupti) -> None:
    with trace_kernels() as records:
        cupti.pending = [SimpleNamespace(kind=1, bytes=4), cupti.record("k", 1.0, 1e-6, 0)]
    assert records == [KernelRecord("k", 1_000_000_000, 1_000_001_000, 1, 3, 100)]


def test_a_failure_of_cuptis_is_explained(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int) -> None:
        raise cupti.cuptiError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    cupti.activity_enable = refuse
    with pytest.raises(DeviceError, match=r"MULTIPLE_SUBSCRIBERS.*Another profiler"), trace_kernels():
        pass
    cupti.activity_enable = lambda kind: None
    with trace_kernels():  # and the next use is not refused
        pass


def test_without_cupti_the_error_says_how_to_get_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="pip install cupti-python"):
        record(model, "cupti")
