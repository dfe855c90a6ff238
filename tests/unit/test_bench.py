"""Benchmarks: what a row holds, how rows are shown and kept, and a run on the reference engine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from calmnb.bench import BenchRow, append_results, bench, format_rows
from calmnb.cli import app
from calmnb.config import ModelConfig
from calmnb.engine import cuda_graphs
from calmnb.engine.stages import kv_bytes, weight_bytes_per_token
from calmnb.errors import CalmnbError, ConfigError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.profile import profile
from tests.fake_gpu import FakeGpu, deliver

ROW = BenchRow(
    "mistral-7b", "fp8", "fp16", "cuda", "NVIDIA H200", 0, 500.0, 2.0, 1.9, 2.1, 5, 128, 7_000_000_000, 3500.0, 72.9, None,
    1.99, {"numpy": "2"}, "2026-01-01T00:00:00+00:00",
)  # fmt: skip


def test_table_has_a_line_a_row_and_a_dash_for_what_is_unknown() -> None:
    known = dataclasses.replace(ROW, model="mine.calm", percent_measured=88.8, read_gb_per_s=4500.0)
    head, first, second = format_rows([ROW, known]).splitlines()
    columns = [
        "model",
        "dtype",
        "kv",
        "context",
        "tok/s",
        "ms/token",
        "p20..p80",
        "GB/s",
        "%",
        "sheet",
        "%",
        "read",
        "graph",
        "ms",
    ]
    assert head.split() == [*columns, "read", "GB/s"]  # no prompt: nobody timed one
    numbers = ["fp8", "fp16", "0", "500.0", "2.0000", "1.9000..2.1000", "3500", "72.9"]
    assert first.split() == ["mistral-7b", *numbers, "-", "1.9900", "-"]
    assert second.split() == ["mine", *numbers, "88.8", "1.9900", "4500.0"]


def test_results_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    append_results(path, [ROW])
    append_results(path, [dataclasses.replace(ROW, context=4000)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["context"] for r in rows] == [0, 4000]
    assert rows[0] == dataclasses.asdict(ROW)


@pytest.mark.parametrize("name", ["", "file/results.jsonl"])
def test_results_that_cannot_be_written_are_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalmnbError, match=r"1 rows cannot be added to .*; choose another file"):
        append_results(tmp_path / name, [ROW])


def test_rows_are_shown_although_they_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any, **__: Any) -> list[BenchRow]:
        (tmp_path / "results").mkdir()
        return [ROW]

    monkeypatch.setattr("calmnb.bench.bench", measured)
    result = CliRunner().invoke(app, ["bench", "m.calm", "--append", str(tmp_path / "results")])
    assert "500.0" in result.stdout
    assert isinstance(result.exception, CalmnbError)


def test_rows_of_a_file_say_their_bytes(spec_model: Callable[[str], Path]) -> None:
    lines: list[str] = []
    rows = bench(
        spec_model("A"), contexts=(0, 20), runs=3, tokens=8, device="reference", measured_peak=10.0, progress=lines.append
    )  # fmt: skip
    config = ModelConfig("test", "fp16", 32, 64, 16, 2, 2, 1, 12, rotary_dim=16)
    for row, length in zip(rows, (5, 25), strict=True):
        assert row.bytes_per_token == weight_bytes_per_token(config) + kv_bytes(config, length)
        assert row.gb_per_s == pytest.approx(row.bytes_per_token / (row.ms_per_token * 1e6))
        assert row.percent_measured == pytest.approx(10 * row.gb_per_s)
        assert row.tok_per_s == pytest.approx(1000 / row.ms_per_token)
        assert row.ms_p20 <= row.ms_per_token <= row.ms_p80
    assert [r.context for r in rows] == [0, 20]
    assert len(lines) >= 8


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("no-such-shape", {}, "neither a file nor one of the shapes"),
        ("mistral-7b", {"runs": 0}, "runs 0"),
        ("mistral-7b", {"contexts": (-1,)}, "contexts"),
        ("mistral-7b", {"kv_dtype": "foo"}, "kv_dtype is 'foo'; accepted are fp16, fp8"),
        ("mistral-7b", {"device": "cpu"}, "for the CPU give a .calm file"),
    ],
)
def test_bad_requests_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(model, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", "x"), ("tokens", 1), ("tokens", True), ("warmup", 0.5), ("warmup", -1), ("peak", "x"), ("peak", math.nan),
     ("peak", math.inf), pytest.param("peak", 10**400, id="peak-huge"), ("peak", 0)],
)  # fmt: skip
def test_profile_refuses_a_wrong_argument(name: str, value: Any) -> None:
    model: Any = SimpleNamespace(engine=None, generate=None)
    with pytest.raises(ConfigError, match=f"profile: {name} is {value!r}"):
        profile(model, "ab", **{name: value})


@pytest.mark.parametrize("model", ["demo", None, Path("m.calm")])
def test_profile_asks_for_a_loaded_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"give a loaded model: calmnb\.load"):
        profile(model, "hello")


def test_a_shape_runs_on_the_gpu_at_each_context(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.on_run = lambda launches: deliver(launches, lambda pos: 1)

    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    small = ModelConfig("llama", "gf4", 64, 128, 16, 2, 4, 2, 96, rotary_dim=16)
    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)
    monkeypatch.setattr("calmnb.bench.shape_config", lambda name, dtype: small.replace(dtype=dtype))
    rows = bench("mistral-7b", dtype="fp8", contexts=(0, 300), runs=2, tokens=5, measured_peak=1.0, gpu=gpu)
    assert [(r.context, r.dtype, r.engine, r.tokens) for r in rows] == [(0, "fp8", "cuda", 5), (300, "fp8", "cuda", 5)]
    assert all(np.isfinite(r.tok_per_s) and r.graph_ms for r in rows)
    assert gpu.closed
