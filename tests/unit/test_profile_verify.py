"""verify-profile: what is measured, which bounds hold, and what a machine without tools or GPU is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from calmnb.cli import app
from calmnb.config import ModelConfig
from calmnb.engine import cuda, cuda_graphs
from calmnb.errors import CalmnbError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.profile.verify import Check, Fidelity, recording_bounds, verify_engine
from calmnb.profile.verify_report import fidelity_markdown
from calmnb.shapes import shape_config
from tests.engine_models import random_weights
from tests.fake_gpu import ClockedGpu

CONFIG = ModelConfig("llama", "fp16", 64, 128, 16, 2, 4, 2, 96, rotary_dim=16)


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(specs: Any, arch: str, **_: Any) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)
    monkeypatch.setattr("calmnb.kernels.compile_kernel", lambda spec, arch: compile_all([spec], arch)[spec])
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(push_range=lambda *a, **k: None, pop_range=lambda **k: None))


class H200(ClockedGpu):
    name = "NVIDIA H200"


def measured(gpu: ClockedGpu | None = None, **options: Any) -> Fidelity:
    gpu = gpu or H200()
    with cuda.open_cuda_engine(random_weights(CONFIG), gpu=gpu, seq_len=128) as engine:
        return verify_engine(engine, "tiny", steps=16, rounds=3, **options)


def named(found: Fidelity, text: str) -> Check:
    (check,) = [check for check in found.checks if text in check.what]
    return check


def test_a_sound_profiler_passes_on_every_count() -> None:
    found = measured(H200(kernel_s=200e-6))
    assert found.failed == []
    assert named(found, "read kernel").value == pytest.approx(4400, rel=1e-6)
    assert named(found, "device copy").value == pytest.approx(4000, rel=1e-6)
    assert named(found, "rows / step, full").value == pytest.approx(0.0, abs=0.2)
    assert named(found, "events less by stamps").value == pytest.approx(0.0, abs=0.01)


def test_recording_that_costs_too_much_fails() -> None:
    # The kernel that moves the stamps takes 3 us here, of steps that take 130.
    found = measured(H200(kernel_s=10e-6))
    cost = named(found, "recording, full")
    assert cost.value == pytest.approx(100 * 3 / (13 * 10), rel=0.05)
    assert (cost.bound, cost.passed) == ("< 4% (all others)", True)
    assert named(found, "recording, light").result == "FAIL"
    assert found.failed == [named(found, "recording, light")]


def test_rows_that_do_not_sum_to_the_step_fail() -> None:
    class Slow(H200):
        """Its global timer loses 3% against its events."""

        @property
        def ticks(self) -> int:
            return round(self.now * 0.97e9)

    found = measured(Slow(kernel_s=50e-6))
    assert named(found, "rows / step, full").passed is False
    assert named(found, "rows / step, full").value == pytest.approx(-3, abs=0.3)


def test_events_that_disagree_with_stamps_fail() -> None:
    class Slow(H200):
        def mark(self) -> object:
            if self.launched and self.launched[-1].kernel.name == "attention":
                self.now += 2e-6
            return super().mark()

    check = named(measured(Slow(kernel_s=10e-6)), "events less by stamps")
    assert check.passed is False
    assert check.value == pytest.approx(2.0, abs=0.1)
    assert check.note.startswith("attention:")


def test_kernels_are_timed_alone_and_the_engine_is_left_as_it_was() -> None:
    gpu = H200()
    with cuda.open_cuda_engine(random_weights(CONFIG), gpu=gpu, seq_len=128) as engine:
        found = verify_engine(engine, "tiny", steps=16, rounds=1)
        assert (engine.time_source, engine.graphs.overlap, engine.recorder) == ("stamps", True, None)
    stages = [row["stage"] for row in found.kernels]
    assert stages[:2] == ["embed", "matmul_qkv"]
    assert [row["calls"] for row in found.kernels][:3] == [1, 2, 2]


def test_without_cupti_its_rows_say_how_to_get_it() -> None:
    found = measured()
    check = named(found, "events less by CUPTI")
    assert (check.value, check.passed, check.shown) == (None, None, "not measured")
    assert "pip install cupti-python" in check.note
    assert all(row["cupti_us"] is None for row in found.kernels)


def test_an_unknown_gpu_has_rates_but_no_bound() -> None:
    class Other(ClockedGpu):
        name = "NVIDIA Unheard-of 9000"

    found = measured(Other())
    assert named(found, "datasheet").value is None
    assert named(found, "read kernel").passed is None


@pytest.mark.parametrize(
    ("shape", "dtype", "light", "full"),
    [
        ("mistral-7b", "fp16", 0.5, 1.0), ("mistral-7b", "fp8", 0.5, 1.0), ("mistral-7b", "gf4", 2.0, 4.0),
        ("llama-3.2-1b", "fp16", 0.75, 1.5), ("llama-3.2-1b", "fp8", 2.0, 4.0), ("smollm2-135m", "fp16", 2.0, 4.0),
    ],
)  # fmt: skip
def test_bounds_are_those_of_the_model(shape: str, dtype: Any, light: float, full: float) -> None:
    assert recording_bounds(shape_config(shape, dtype))[:2] == (light, full)


def test_the_table_is_markdown_with_its_command(tmp_path: Path) -> None:
    found = measured()
    text = fidelity_markdown(found, command="calmnb verify-profile --shape tiny")
    assert text.startswith("# Fidelity of the profiler: tiny, fp16 weights, KV cache fp16, context 0, on NVIDIA H200\n")
    assert "`calmnb verify-profile --shape tiny`" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(found.checks) + 2 + len(found.kernels)
    assert {line.count("|") for line in rows[: 2 + len(found.checks)]} == {6}
    assert json.loads(json.dumps(found.to_dict()))["meta"]["model"] == "tiny"


# -- the command -----------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify-profile", *map(str, arguments)])


def test_on_a_cpu_it_reports_what_applies(spec_model: Any, tmp_path: Path) -> None:
    result = run(spec_model("A"), "--device", "reference", "--steps", 8, "--out", tmp_path / "f.md", "--json")
    assert not isinstance(result.exception, CalmnbError), result.exception
    found = json.loads(result.stdout)
    values = {check["what"]: check["value"] for check in found["checks"]}
    assert values["peak, calmnb's read kernel"] > 0
    assert values["peak, copy in memory"] > 0
    assert values["recording"] is not None
    assert abs(values["sum of rows / step"]) < 50
    assert values["kernel by CUPTI"] is None
    assert result.exit_code == (1 if any(check["passed"] is False for check in found["checks"]) else 0)
    assert "not measured" in (tmp_path / "f.md").read_text()


def test_a_shape_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "CuPy is not installed")
    error = run("--shape", "mistral-7b", "--dtype", "fp8").exception
    assert isinstance(error, CalmnbError)
    assert "CuPy is not installed" in str(error)
    assert "\n" not in str(error)


def test_a_shape_is_checked_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    monkeypatch.setattr(cuda, "CudaDevice", lambda **options: H200(kernel_s=100e-6))
    monkeypatch.setattr("calmnb.shapes.shape_config", lambda name, dtype: CONFIG.replace(dtype=dtype))
    result = run("--shape", "mistral-7b", "--dtype", "fp16", "--steps", 8, "--no-ncu", "--out", tmp_path / "f.md")
    assert result.exit_code == 0, result.output
    assert "kernels alone" in result.stdout
    assert "`calmnb verify-profile --shape mistral-7b --dtype fp16`" in (tmp_path / "f.md").read_text()


@pytest.mark.parametrize(("option", "value"), [("--dtype", "int3"), ("--kv-dtype", "fp4")])
def test_a_bad_option_is_explained(option: str, value: str) -> None:
    error = run("--shape", "mistral-7b", option, value).exception
    assert isinstance(error, CalmnbError)
    assert value in str(error)
