"""One step under Nsight Compute: what runs in the process under it, and what the command makes of what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from calmnb.cli import app
from calmnb.config import ModelConfig
from calmnb.engine import cuda, cuda_graphs
from calmnb.engine.stages import stage_cost
from calmnb.errors import CalmnbError, ConfigError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.profile import ncu_step
from calmnb.profile.ncu import read_ncu_csv
from calmnb.profile.ncu_step import measure_step, run_task
from calmnb.profile.session import Session
from calmnb.profile.verify import verify_bytes
from tests.fake_gpu import ClockedGpu
from tests.unit.test_profile_ncu import table_of

CONFIG = ModelConfig("llama", "fp16", 64, 128, 16, 6, 4, 2, 96, rotary_dim=16)
WEIGHTS = ("matmul_qkv", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down", "output")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ClockedGpu:
    made = ClockedGpu()

    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)
    monkeypatch.setattr(cuda, "CudaDevice", lambda **options: made)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=lambda *a, **k: None, pop_range=lambda **k: None))
    return made


class FakeNcu:
    """Runs the task in this process and prints a row a kernel of the range, with bytes off from the declared by `factor`."""

    def __init__(self, gpu: ClockedGpu) -> None:
        self.gpu, self.factor = gpu, 1.0
        self.asked: dict[str, Any] = {}
        self.steps: list[list[str]] = []
        run = gpu.on_run

        def noted(launches: Any) -> None:
            if gpu.profiled[-1:] == [True]:
                self.steps.append([one.kernel.name for one in launches])
            run(launches)

        gpu.on_run = noted

    def __call__(self, command: list[str], **options: Any) -> str:
        self.asked = {"command": command, **options}
        task = json.loads(Path(command[-1]).read_text())
        run_task(task)
        self.task = task
        session = Session.load(task["session"])
        rows = session.events[(session.events["stage"] != "gap") & (session.events["step"] == 0)]
        declared = [max(int(n * self.factor) - 128, 0) for n in rows["bytes_counted"]]
        return table_of(self.steps[-1], declared)


@pytest.fixture
def ncu(gpu: ClockedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNcu]:
    fake = FakeNcu(gpu)
    monkeypatch.setattr(ncu_step, "run_ncu", fake)
    monkeypatch.setattr("calmnb.shapes.shape_config", lambda name, dtype: CONFIG.replace(dtype=dtype))
    return fake


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ncu", *map(str, arguments)])


def test_one_step_lies_in_the_range_and_has_no_stamps(ncu: FakeNcu, gpu: ClockedGpu) -> None:
    measure_step(CONFIG, output=lambda line: None)
    assert gpu.profiled == [True, False]
    assert len(ncu.steps) == 1
    assert "collect_stamps" not in ncu.steps[0]
    assert ncu.steps[0][-1].startswith("sample")


def test_a_few_layers_stand_for_all_and_the_count_covers_them(ncu: FakeNcu) -> None:
    measure_step(CONFIG, layers=2, output=lambda line: None)
    assert ncu.task["config"]["n_layers"] == 2
    assert ncu.asked["in_range"] is True
    assert len(ncu.steps[0]) <= ncu.asked["count"] == 20
    measure_step(CONFIG, layers=None, output=lambda line: None)
    assert ncu.task["config"]["n_layers"] == CONFIG.n_layers


def test_the_session_is_of_the_same_step(ncu: FakeNcu) -> None:
    session, launches, _ = measure_step(CONFIG, context=100, kv_dtype="fp8", name="tiny", output=lambda line: None)
    assert (session.meta["model"], session.meta["kv_dtype"]) == ("tiny", "fp8")
    assert session.steps["pos"].tolist()[0] == 100
    assert len(launches) == len(ncu.steps[0])


def test_the_command_sets_measured_bytes_beside_declared_ones(ncu: FakeNcu, tmp_path: Path) -> None:
    result = run(
        "--shape", "mistral-7b", "--dtype", "fp8", "--json", "--save", tmp_path / "s.calmprof", "-o", tmp_path / "n.csv"
    )
    assert result.exit_code == 0, result.exception
    rows = {row["stage"]: row for row in json.loads(result.stdout)}
    fp8 = CONFIG.replace(dtype="fp8")
    for stage in WEIGHTS:
        cost = stage_cost(fp8, stage, 1)  # type: ignore[arg-type]
        calls = 1 if stage == "output" else 4
        assert (rows[stage]["calls"], rows[stage]["bytes_min"]) == (calls, calls * cost.bytes_min)
        assert rows[stage]["measured_to_counted"] == pytest.approx(1.0)
    saved = Session.load(tmp_path / "s.calmprof")
    assert len(saved.steps) == 1
    assert (saved.events["stage"] != "gap").sum() == len(ncu.steps[0])
    assert saved.pivot("stage", values="bytes_measured").loc["matmul_qkv"].item() == rows["matmul_qkv"]["bytes_measured"]
    assert len(read_ncu_csv(tmp_path / "n.csv")) == len(ncu.steps[0])


def test_the_command_takes_a_model_file(ncu: FakeNcu, spec_model: Any) -> None:
    result = run("--layers", 0, spec_model("B"))
    assert result.exit_code == 0, result.exception
    assert ncu.task["config"]["dtype"] == "fp8"
    assert ncu.task["name"] == "B"
    assert "measured MB" in result.stdout


@pytest.mark.parametrize("extra", [["--", "true"], ["--session", "x.calmprof"]])
def test_a_shape_brings_its_own_command_and_session(ncu: FakeNcu, extra: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "load", classmethod(lambda cls, path: None))
    error = run("--shape", "mistral-7b", *extra).exception
    assert isinstance(error, ConfigError)
    assert "leave --session and COMMAND out" in str(error)


def test_without_command_or_shape_it_says_what_to_write() -> None:
    error = run().exception
    assert isinstance(error, CalmnbError)
    assert "nothing to measure" in str(error)


def test_bytes_that_agree_pass_and_others_fail(ncu: FakeNcu) -> None:
    rows, check = verify_bytes(CONFIG, is_tied=True)
    assert (check.passed, check.bound) == (True, "within 2%")
    assert {row["stage"] for row in rows} >= set(WEIGHTS)
    ncu.factor = 1.05
    rows, check = verify_bytes(CONFIG, is_tied=True)
    assert check.passed is False
    assert check.value == pytest.approx(5.0, abs=0.1)


def test_no_ncu_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise CalmnbError("ncu is not on the PATH: get it")

    monkeypatch.setattr(ncu_step, "run_ncu", missing)
    rows, check = verify_bytes(CONFIG, is_tied=True)
    assert (rows, check.value, check.passed, check.note) == ([], None, None, "ncu is not on the PATH: get it")
