"""Outside tools on a shape: run where they are, shown as saved where they are not, and said which."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from calmnb.errors import CalmnbError, FormatError
from calmnb.profile import Session, read_nsys, shape
from calmnb.profile.ncu import attach_measured
from calmnb.profile.shape_tools import _SCRIPT, shape_ncu, shape_nsys
from calmnb.shapes import shape_config
from tests.profile_fakes import noisy_recorder

SHAPE, NAME = "smollm2-135m", "h200-ncu-smollm2-135m-fp8"
CONFIG = shape_config(SHAPE, "fp8")
REPORT = shape.saved_file("h200-nsys-mistral-7b-fp8.sqlite")


def session() -> Session:
    return noisy_recorder(CONFIG.replace(n_layers=2), tokens=5, device="NVIDIA H200", model=SHAPE).session()


def ncu_csv(recording: Session) -> str:
    """What ncu says of one step of `recording`: every kernel moves what it counts."""
    lines = ['"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    first = int(recording.steps.query("phase == 'decode' and not warmup")["step"].iloc[0])
    rows = recording.events[recording.events["step"] == first].query("stage not in ('gap', 'sample')")
    for i, row in enumerate(rows.to_dict("records")):
        metrics = (("dram__bytes_read.sum", row["bytes_counted"]), ("dram__bytes_write.sum", 0))
        lines += [f'"{i}","7","{row["kernel"]}(Args)","{name}","byte","{value}"' for name, value in metrics]
    return "\n".join(lines) + "\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shape, "DATA_FOLDERS", (tmp_path,))
    return tmp_path


def test_without_a_gpu_the_saved_counters_are_shown_beside_their_session(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "CuPy is not installed")
    with pytest.raises(FormatError, match=f"{NAME}.csv is not in"):
        shape_ncu(SHAPE, "fp8")
    (data / f"{NAME}.csv").write_text(ncu_csv(session()))
    session().save(data / f"{NAME}.calmprof")
    said: list[str] = []
    shown, launches = shape_ncu(SHAPE, "fp8", say=said.append)
    assert said == ["smollm2-135m fp8, KV fp16: no GPU here; showing NVIDIA H200, measured on 2026-11-29"]
    table = attach_measured(shown, launches)
    assert table["measured_to_counted"].dropna().to_list() == pytest.approx([1.0] * table["measured_to_counted"].count())


def test_with_ncu_it_is_measured_now(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    asked: dict[str, Any] = {}

    def measure_step(config: Any, **options: Any) -> tuple[Session, str, str]:
        asked.update(options)
        return session(), "launches", ""

    monkeypatch.setattr("calmnb.profile.ncu_step.measure_step", measure_step)
    said: list[str] = []
    assert shape_ncu(SHAPE, "fp8", context=77, say=said.append)[1] == "launches"
    assert (asked["is_tied"], asked["context"], asked["kv_dtype"]) == (True, 77, "fp16")
    assert said == ["smollm2-135m fp8, KV fp16: measured now by Nsight Compute on NVIDIA H200"]


def test_where_a_tool_fails_its_reason_is_told_and_what_is_saved_shown(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise CalmnbError("the tool is not on the PATH")

    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    monkeypatch.setattr("calmnb.profile.ncu_step.measure_step", fail)
    monkeypatch.setattr("calmnb.profile.nsight.nsys_script", fail)
    (data / f"{NAME}.csv").write_text(ncu_csv(session()))
    session().save(data / f"{NAME}.calmprof")
    shutil.copy(REPORT, data / "h200-nsys-smollm2-135m-fp8.sqlite")
    said: list[str] = []
    shape_ncu(SHAPE, "fp8", say=said.append)
    shape_nsys(SHAPE, "fp8", say=said.append)
    assert "not measured here: the tool is not on the PATH; showing NVIDIA H200" in said[0]
    assert "not run here: the tool is not on the PATH; showing NVIDIA H200, recorded by nsys" in said[1]


def test_a_real_report_has_the_steps_layers_stages_and_bytes_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded by nsys 2023.4 on an H200 (tests/gpu/record_nsys.py), kernel by kernel inside calmnb's ranges."""
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "CuPy is not installed")
    said: list[str] = []
    shown = shape_nsys("mistral-7b", "fp8", say=said.append)
    assert said == ["mistral-7b fp8: no GPU here; showing NVIDIA H200, recorded by nsys 2023.4.4.54"]
    assert shown.steps["pos"].tolist() == [1000, 1001, 1002, 1003]
    assert shown.steps["kv_len"].tolist() == [1001, 1002, 1003, 1004]
    stages = ["matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"]
    expected = [("embed", -1), *((stage, layer) for layer in range(32) for stage in stages), ("output", -1), ("sample", -1)]
    for _, rows in shown.events.query("stage != 'gap'").groupby("step"):
        assert list(zip(rows["stage"], rows["layer"], strict=True)) == expected
    inside = shown.events.query("layer == 7 and stage == 'attention'").iloc[0]
    assert inside["nvtx"] == "decode pos=1000 kv_len=1001 > layer 7 > attention"
    # What the ranges carry as payload are the model's own bytes.
    carried = read_nsys(REPORT).events
    assert carried["bytes_min"].tolist() == shown.events["bytes_min"].tolist()
    assert "time_note" not in shown.meta


def test_the_script_for_nsys_is_python_that_records_inside_the_range() -> None:
    code = _SCRIPT.format(shape=SHAPE, dtype="fp8", kv_dtype="fp16", context=5)
    compile(code, "cell.py", "exec")
    first, last = code.index("profiler(True)"), code.index("profiler(False)")
    assert code.count("decode_many") == 2
    assert first < code.rindex("decode_many") < last
