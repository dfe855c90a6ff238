"""Nsight Compute's CSV: units, separators and noise; declared bytes beside measured ones."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.engine.base import Kernel
from calmnb.engine.stages import stage_cost
from calmnb.errors import ConfigError, FormatError
from calmnb.profile.attribution import find_steps
from calmnb.profile.ncu import MEASURED_COLUMNS, NCU_COLUMNS, attach_measured, measured_rows, ncu_stages, read_ncu_csv
from calmnb.profile.recorder import SessionRecorder
from calmnb.profile.session import Session
from tests.nsys_files import step_names
from tests.profile_fakes import SMOL, meta_of

HEADER = [
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device",
    "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value",
]  # fmt: skip


def quoted(rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue()


def launch(number: int, kernel: str, *metrics: tuple[str, str, str], process: int = 41) -> list[list[object]]:
    place = [number, process, "python3", "127.0.0.1", kernel, "1", "13", "(256, 1, 1)", "(132, 1, 1)", "0", "9.0"]
    return [[*place, "Command line profiler metrics", *metric] for metric in metrics]


def table_of(names: Sequence[str], read: Sequence[float]) -> str:
    rows = [HEADER]
    for i, (name, size) in enumerate(zip(names, read, strict=True)):
        rows += launch(
            i, name, ("dram__bytes_read.sum", "byte", f"{round(size):,}"), ("dram__bytes_write.sum", "byte", "128"),
            ("gpu__time_duration.sum", "ns", "2,048"),
        )  # type: ignore[arg-type]  # fmt: skip
    return "==PROF== Connected to process 41\n" + quoted(rows) + "==PROF== Disconnected from process 41\n"


def session_of(n_layers: int = 2, *, ending: Sequence[str] = ("matvec_rows", "sample_max"), steps: int = 3) -> Session:
    config = SMOL.replace(n_layers=n_layers)
    kernels = find_steps(step_names(n_layers, ending))[0].rows
    named = tuple(Kernel(k.stage, k.layer, f"{k.name}_fp8") for k in kernels)
    recorder = SessionRecorder(meta_of(config, engine="cuda", time_source="stamps"))
    for pos in range(steps):
        ends = 1.0 + pos + np.arange(1, len(named) + 1) * 1e-6
        recorder.add("decode", pos, pos + 1, 1, named, ends - 1e-6, ends, 1.0 + pos, float(ends[-1]))
    return recorder.session()


def test_units_and_separators_become_bytes_and_seconds() -> None:
    text = quoted(
        [
            HEADER,
            *launch(0, "k(int)", ("dram__bytes_read.sum", "Mbyte", "1,234.5"), ("gpu__time_duration.sum", "usecond", "12.5")),
            *launch(1, "k(int)", ("dram__bytes_read.sum", "byte", "1,234,567"), ("gpu__time_duration.sum", "ms", "2")),
        ]
    )
    table = read_ncu_csv(text)
    assert list(table) == list(NCU_COLUMNS)
    assert table["bytes_read"].tolist() == [1234.5e6, 1234567]
    assert table["duration_s"].tolist() == pytest.approx([12.5e-6, 2e-3])
    assert table["kernel"].tolist() == ["k", "k"]


def test_output_of_program_and_tool_is_passed_over() -> None:
    rows = quoted([HEADER, *launch(0, "k", ("dram__bytes_read.sum", "byte", "64"))]).splitlines()
    text = "\n".join(
        ["==PROF== Connected", 'He said "1", "2"', "no newline" + rows[0], '"quoted", text', "50%... done" + rows[1], "=="]
    )
    assert read_ncu_csv(text)["bytes_read"].tolist() == [64]


def test_launches_of_several_processes_stay_apart() -> None:
    metric = ("dram__bytes_read.sum", "byte", "8")
    table = read_ncu_csv(quoted([HEADER, *launch(0, "a", metric, process=1), *launch(0, "b", metric, process=2)]))
    assert table["kernel"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("number", "process", "kernel", "said"),
    [
        ("0", "x", "k", "Process ID is 'x'"),
        ("7" * 5000, "1", "k", "ID is '7777"),
        ("0", "1", "k" * 200_000, "field larger than field limit"),
    ],
    ids=["process", "launch", "kernel"],
)
def test_ids_and_names_that_cannot_be_are_named(number: Any, process: Any, kernel: str, said: str) -> None:
    text = quoted([HEADER, *launch(number, kernel, ("dram__bytes_read.sum", "byte", "8"), process=process)])
    with pytest.raises(FormatError, match=f"the output of ncu: .*{said}.*; .*measure again"):
        read_ncu_csv(text)


def test_what_was_not_measured_is_nan() -> None:
    table = read_ncu_csv(quoted([HEADER, *launch(0, "k", ("dram__bytes_read.sum", "byte", "n/a"))]))
    assert math.isnan(table["bytes_measured"][0])
    assert math.isnan(table["duration_s"][0])


def test_a_file_reads_as_its_text(tmp_path: Path) -> None:
    text = table_of(["k"], [100])
    (tmp_path / "n.csv").write_text(text)
    pd.testing.assert_frame_equal(read_ncu_csv(tmp_path / "n.csv"), read_ncu_csv(text))


@given(st.integers(0, 10**15), st.sampled_from([("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9), ("Tbyte", 1e12)]))
def test_any_count_survives_its_commas(count: int, unit: tuple[str, float]) -> None:
    table = read_ncu_csv(quoted([HEADER, *launch(0, "k", ("dram__bytes_read.sum", unit[0], f"{count:,}"))]))
    assert table["bytes_read"][0] == pytest.approx(count * unit[1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing\nhere\n", "no table"),
        (quoted([HEADER]), "no kernel"),
        (quoted([["ID", "Kernel Name", "dram__bytes_read.sum"], ["", "", "byte"], ["0", "k", "5"]]), "wide form"),
        (quoted([HEADER, *launch(0, "k", ("dram__bytes_read.sum", "sector", "5"))]), "unit 'sector'"),
        (quoted([HEADER, *launch(0, "k", ("dram__bytes_read.sum", "byte", "five"))]), "'five' is not a number"),
    ],
)
def test_what_cannot_be_read_is_explained(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_ncu_csv(text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"absent\.csv"):
        read_ncu_csv(tmp_path / "absent.csv")


def test_launches_get_stage_and_layer_from_their_order() -> None:
    names = ["fill_random", *step_names(2)]
    table = ncu_stages(read_ncu_csv(table_of(names, [1] * len(names))))
    assert table["step"].tolist() == [-1, *[0] * len(step_names(2))]
    assert table["stage"].tolist()[:4] == ["other", "embed", "matmul_qkv", "attention"]
    assert table["layer"].max() == 1


def test_measured_bytes_stand_beside_declared_ones() -> None:
    session = session_of()
    events = session.events[(session.events["step"] == 1) & (session.events["stage"] != "gap")]
    table = read_ncu_csv(table_of(step_names(2), [1.01 * b for b in events["bytes_min"]]))
    measured = attach_measured(session, table).set_index("stage")
    declared = 2 * stage_cost(SMOL, "matmul_qkv", 2).bytes_min
    assert list(measured.reset_index()[list(MEASURED_COLUMNS)]) == list(MEASURED_COLUMNS)
    assert measured.loc["matmul_qkv", "bytes_min"] == declared
    assert measured.loc["matmul_qkv", "bytes_measured"] == pytest.approx(1.01 * declared + 2 * 128, rel=1e-6)
    assert measured.loc["matmul_qkv", "calls"] == 2
    assert measured.loc["matmul_qkv", "kernel"] == "matvec_qkv_fp8"
    assert measured.loc["matmul_qkv", "ncu_us"] == pytest.approx(2 * 2.048)


def test_of_several_steps_the_median_is_taken() -> None:
    names = step_names(1)
    values = [size for size in (100, 900, 200) for _ in names]
    rows = measured_rows(session_of(1), read_ncu_csv(table_of(names * 3, values)))
    assert set(rows["bytes_measured"]) == {200 + 128}


def test_the_kernel_that_moves_stamps_is_left_out() -> None:
    names = [*step_names(1), "collect_stamps"]
    assert len(measured_rows(session_of(1), read_ncu_csv(table_of(names, [1] * len(names))))) == len(names) - 1


def test_another_number_of_launches_is_refused() -> None:
    names = step_names(3)
    with pytest.raises(ConfigError, match=r"13 kernels.*18 launches"):
        attach_measured(session_of(2), read_ncu_csv(table_of(names, [1] * len(names))))


def test_a_named_step_of_another_length_is_refused() -> None:
    names = step_names(2, ("matvec_rows",))
    with pytest.raises(ConfigError, match=r"step 1 of the session has 13 kernels, ncu saw 12"):
        attach_measured(session_of(2), read_ncu_csv(table_of(names, [1] * len(names))), step=1)
    with pytest.raises(ConfigError, match="0 to 2"):
        attach_measured(session_of(2), read_ncu_csv(table_of(names, [1] * len(names))), step=9)


def test_as_many_launches_of_another_kind_are_refused() -> None:
    names = step_names(1, ("matvec_rows", "sample_max", "sample_draw"))
    swapped = session_of(1, ending=("sample_max", "sample_draw", "matvec_rows"))
    with pytest.raises(ConfigError, match="launch 6"):
        attach_measured(swapped, read_ncu_csv(table_of(names, [1] * len(names))))


def test_launches_of_unknown_names_are_matched_by_order() -> None:
    rows = measured_rows(session_of(1), read_ncu_csv(table_of([f"k{i}" for i in range(8)], range(8))))
    assert rows["bytes_measured"].tolist() == [128 + i for i in range(8)]
