"""What kernels take of a multiprocessor, and how a session of a GPU knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calmnb import bench
from calmnb.engine import cuda_graphs
from calmnb.errors import ConfigError, DeviceError, FormatError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources
from calmnb.profile import Session, shape
from calmnb.profile.launches import LAUNCH_COLUMNS, launch_table, resident_blocks
from calmnb.profile.shape import file_name, profile_shape, shape_session
from calmnb.shapes import shape_config
from tests.stamped_gpu import StampedGpu

SHAPE = "smollm2-135m"


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(64, 0, 0, 256), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)
    monkeypatch.setattr(bench, "measure_read", lambda gpu: 4400.0)
    monkeypatch.setattr(bench, "gpu_clocks", lambda: {"driver": "1.2", "sm_mhz": "1980", "memory_mhz": "3201"})


def recorded(**options: Any) -> Session:
    options = {"contexts": (0, 900), "tokens": 4, "warmup": 1, "rounds": 2, "prompt": 0, **options}
    return profile_shape(SHAPE, dtype="fp8", gpu=StampedGpu(shape_config(SHAPE, "fp8")), **options)


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "blocks"),
    [
        # NVIDIA's occupancy calculator (cuda_occupancy.h): the limit is named.
        ("sm_90", 32, 1024, 0, 2),  # threads
        ("sm_90", 32, 32, 0, 32),  # blocks
        ("sm_90", 64, 256, 0, 4),  # registers: 65536 / (64 * 256)
        ("sm_90", 65, 256, 0, 3),  # registers, rounded up to 72 a thread: 65536 // 18432
        ("sm_90", 255, 256, 0, 1),
        ("sm_90", 32, 128, 100 * 1024, 2),  # shared memory: (100 + 1) KiB of 228
        ("sm_80", 32, 128, 54 * 1024, 2),  # 55 of 164
        ("sm_89", 32, 512, 0, 3),  # 1536 threads
        ("sm_90", 32, 128, 300 * 1024, 0),  # does not fit at all
        ("sm_42", 32, 128, 0, 0),  # unknown
    ],
)
def test_resident_blocks_follow_nvidias_rules(arch: str, registers: int, threads: int, shared: int, blocks: int) -> None:
    assert resident_blocks(arch, registers=registers, threads=threads, shared_bytes=shared) == blocks


def test_a_launch_becomes_occupancy_and_waves() -> None:
    launch = {"kernel": "k", "stage": "output", "registers": 64, "threads": 256, "grid": [1056, 1], "shared_bytes": 2048}
    meta = {"gpu": {"arch": "sm_90", "sm_count": 132}, "launches": [{**launch, "short": False}]}
    rows = pd.DataFrame({"kernel": ["k", "other"], "stage": ["output", "output"], "kv_len": [5.0, 5.0]})
    table = launch_table(meta, rows)
    assert list(table.columns) == list(LAUNCH_COLUMNS)
    assert table.loc[0].to_dict() == {
        "registers": 64.0, "threads": 256.0, "blocks": 1056.0, "shared_kb": 2.0, "occupancy_percent": 50.0, "waves": 2.0,
    }  # fmt: skip
    assert table.loc[1].isna().all()


def test_the_attention_of_short_contexts_is_told_from_the_long_one(no_gpu_needed: None) -> None:
    session = recorded()
    by_context = [session.select(kv_len=span).kernels().set_index("stage") for span in ((1, 20), (900, 920))]
    short, long = (table.loc["attention", "threads"] for table in by_context)
    assert short < long  # threads of a block: the short form has fewer warps
    assert session.kernels()["registers"].dropna().unique().tolist() == [64]


def test_a_shape_is_recorded_at_its_contexts_in_turns(no_gpu_needed: None) -> None:
    session = recorded()
    assert session.steps["pos"].tolist() == [0, 1, 2, 3, 900, 901, 902, 903] * 2
    assert session.steps["run"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert session.steps["warmup"].tolist() == [True, False, False, False] * 4
    assert session.meta["graph_us"] == {"0": pytest.approx(1e3 / 48, abs=1e-3), "900": pytest.approx(1e3 / 48, abs=1e-3)}
    assert session.meta["peaks"]["measured"]["gb_per_s"] == 4400.0
    assert session.meta["clocks"] == {"sm_mhz": 1980, "memory_mhz": 3201}
    assert session.meta["versions"]["driver"] == "1.2"
    assert session.meta["model"] == SHAPE
    sums = session.events.groupby("step")["exclusive_s"].sum()
    assert sums.to_numpy() == pytest.approx(session.steps["duration_s"].to_numpy(), rel=1e-12)


def test_each_round_begins_with_a_prompt(no_gpu_needed: None) -> None:
    session = recorded(prompt=40, contexts=(0,))
    assert session.steps["phase"].tolist() == ["prefill", *["decode"] * 4] * 2
    assert session.steps["run"].tolist() == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3]
    prompts = session.steps[session.steps["phase"] == "prefill"]
    assert prompts["n_tokens"].tolist() == [40, 40]
    assert (session.stages("prefill")["flops"] > 0).any()


def test_times_are_whole_ticks_and_so_pack_well(no_gpu_needed: None, tmp_path: Path) -> None:
    session = recorded(rounds=5)
    ticks = session.events["start_s"] * 2**30
    assert (ticks == ticks.round()).all()
    size = session.save(tmp_path / "s.calmprof").stat().st_size
    assert size < 8 * len(session.events) + 10_000, "more than eight bytes a row"


@pytest.mark.parametrize(
    "bad", [{"tokens": 1}, {"rounds": 0}, {"contexts": ()}, {"contexts": (-1,)}, {"warmup": -1}, {"prompt": -1}]
)
def test_arguments_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tokens > warmup >= 0"):
        recorded(**bad)


def test_without_a_gpu_the_saved_recording_is_shown_and_named(
    no_gpu_needed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "DATA_FOLDERS", (tmp_path / "none", tmp_path))
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "CuPy is not installed")
    said: list[str] = []
    with pytest.raises(FormatError, match=r"h200-smollm2-135m-fp8\.calmprof is not in"):
        shape_session(SHAPE, "fp8", say=said.append)
    saved = recorded()
    saved.save(tmp_path / file_name(SHAPE, "fp8", "fp16"))
    assert shape_session(SHAPE, "fp8", say=said.append) == saved
    assert said[-1].startswith("smollm2-135m fp8, KV fp16: no GPU here; showing Fake H200, recorded on 20")
    with pytest.raises(DeviceError, match="smollm2-135m cannot be recorded: no GPU here"):
        shape_session(SHAPE, "fp8", record=True)


def test_with_a_gpu_it_is_recorded_now(no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    said: list[str] = []
    options: dict[str, Any] = {"contexts": (0,), "tokens": 3, "rounds": 1, "prompt": 0}
    options["gpu"] = StampedGpu(shape_config(SHAPE, "fp8"))
    session = shape_session(SHAPE, "fp8", say=said.append, **options)
    assert said == ["smollm2-135m fp8, KV fp16: recorded now on Fake H200"]
    assert len(session.steps) == 3


def test_a_model_too_large_for_this_gpu_shows_the_saved_recording(
    no_gpu_needed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "DATA_FOLDERS", (tmp_path,))
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    saved = recorded()
    saved.save(tmp_path / file_name(SHAPE, "fp8", "fp16"))
    said: list[str] = []
    small = StampedGpu(shape_config(SHAPE, "fp8"), free=1 << 20)
    assert shape_session(SHAPE, "fp8", say=said.append, gpu=small) == saved
    assert "not recorded here" in said[0]
    assert "GiB free" in said[0]
    with pytest.raises(DeviceError, match="GiB free"):
        shape_session(SHAPE, "fp8", record=True, gpu=small)


def test_file_names_say_device_shape_and_storage() -> None:
    assert file_name("mistral-7b", "gf4", "fp8", device="rtx4090") == "rtx4090-mistral-7b-gf4-kv-fp8.calmprof"
