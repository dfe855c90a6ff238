"""Reports of Nsight Systems as sessions: both schemas, ranges and graphs, other programs' reports, damaged files."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import calmnb
from calmnb.errors import CalmnbError, ConfigError, FormatError
from calmnb.profile.attribution import find_steps, kernel_name, layer_of_range, step_of_range
from calmnb.profile.nsys import read_nsys
from calmnb.profile.session import Session
from tests.nsys_files import THREAD, ReportFile, step_names
from tests.profile_fakes import SMOL

Schema = Literal["old", "new"]
both_schemas = pytest.mark.parametrize("schema", ["old", "new"])


def ranged(path: Path, schema: Schema = "new") -> Path:
    """A prompt of 4 tokens and two decoded ones, kernel by kernel inside nested ranges; 2 us a kernel, 1 us between."""
    report = ReportFile(path, schema)
    host, gpu = 0.0, 100.0
    for title in ("prefill pos=0 n_tokens=4 kv_len=4", "decode pos=4 kv_len=5", "decode pos=5 kv_len=6"):
        begin = host
        for layer in range(2):
            first = host
            for stage, payload in (("matmul_qkv", 6_000), ("attention", 500)):
                report.push(stage, host, host + 3, payload=payload)
                report.launch(f"{stage}_kernel<8>(float*)", host + 1, gpu, gpu + 2)
                host, gpu = host + 4, gpu + 3
            report.push(f"layer {layer}", first - 0.5, host - 0.5)
        report.push(title, begin - 0.6, host - 0.4)
        gpu += 50
    return report.write()


REAL = Path(__file__).parents[1] / "golden" / "nsys"


@pytest.mark.parametrize("name", ["graph", "graph-no-pdl"])
def test_real_reports_of_graphs_give_eight_whole_steps(name: str) -> None:
    """Llama-3.2-1B fp8 on an H200 under nsys 2023.4 (tests/gpu/record_nsys.py)."""
    session = read_nsys(REAL / f"{name}.sqlite")
    stages = session.events.query("stage != 'gap'").groupby("stage", observed=True).size().to_dict()
    assert len(session.steps) == 8
    layers = dict.fromkeys(("matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"), 8 * 16)
    assert stages == {"embed": 8, **layers, "output": 8, "sample": 8}
    assert session.meta["nsys"]["version"] == "2023.4.4.54"


def test_kernels_that_nsys_cut_short_are_told() -> None:
    """With dependent launch this nsys ended the logits, 63 us long, after 6, and gave the rest to the kernel behind."""
    cut, whole = (read_nsys(REAL / f"{name}.sqlite") for name in ("graph", "graph-no-pdl"))
    assert "CALMNB_PDL=0" in cut.meta["time_note"]
    assert "time_note" not in whole.meta
    output = [session.pivot("stage")["time_us"]["output"] for session in (cut, whole)]
    assert output == pytest.approx([6.0, 63.4], abs=0.5)


@both_schemas
def test_ranges_say_step_layer_and_stage(tmp_path: Path, schema: Schema) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite", schema))
    decode = session.events[(session.events["phase"] == "decode") & (session.events["stage"] != "gap")]
    assert session.steps["pos"].tolist() == [0, 4, 5]
    assert session.steps["kv_len"].tolist() == [4, 5, 6]
    assert session.steps["n_tokens"].tolist() == [4, 1, 1]
    assert session.steps["run"].tolist() == [0, 0, 0]
    expected = [(layer, stage) for _ in range(2) for layer in range(2) for stage in ("matmul_qkv", "attention")]
    assert list(zip(decode["layer"], decode["stage"], strict=True)) == expected


@both_schemas
def test_times_are_those_of_the_kernels(tmp_path: Path, schema: Schema) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite", schema))
    assert session.steps["start_s"].tolist() == pytest.approx([0, 62e-6, 124e-6])
    assert session.steps["forward_s"].tolist() == pytest.approx([11e-6] * 3)  # 4 kernels of 2 us, 3 gaps of 1 us
    rows = session.events.groupby(["step", "stage"], observed=True)["exclusive_s"].sum()
    assert rows[1, "attention"] == pytest.approx(4e-6)
    assert rows[1, "gap"] == pytest.approx(3e-6)
    assert set(session.events["source"]) == {"nsys"}


def test_payload_of_a_stage_is_its_bytes(tmp_path: Path) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite"))
    stages = session.stages().set_index("stage")
    assert stages.loc["matmul_qkv", "bytes_min"] == 12_000
    assert stages.loc["matmul_qkv", "gb_per_s"] == pytest.approx(3.0)
    assert session.steps["kv_bytes"].tolist() == [1_000] * 3


def test_a_model_configuration_gives_bytes_instead(tmp_path: Path) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite"), config=SMOL)
    stages = session.stages().set_index("stage")
    assert stages.loc["matmul_qkv", "bytes_min"] == 2 * (SMOL.q_dim + 2 * SMOL.kv_dim) * SMOL.dim
    assert session.config == SMOL


def test_gpu_and_its_peak_come_from_the_report(tmp_path: Path) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite"))
    assert session.meta["device"] == "NVIDIA H200"
    assert session.meta["nsys"]["schema"] == "3.25.0"
    assert session.meta["peaks"]["datasheet"]["gb_per_s"] == 4800


def test_an_unknown_gpu_has_the_bandwidth_that_the_report_gives(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite", gpu="Accelerator 9")
    report.launch("k", 0, 1, 2)
    peak = read_nsys(report.write()).peak()
    assert peak is not None
    assert peak.gb_per_s == 4800


@both_schemas
def test_a_replayed_graph_is_read_by_the_order_of_its_kernels(tmp_path: Path, schema: Schema) -> None:
    report = ReportFile(tmp_path / "r.sqlite", schema)
    report.launch("fill_random", 0, 0, 50)
    for i in range(3):
        report.graph([*step_names(2), "collect_stamps"], 100 + 50 * i, 110 + 50 * i)
    session = read_nsys(report.write())
    stages = session.stages().set_index("stage")["calls"].to_dict()
    assert session.steps["n_tokens"].tolist() == [0, 1, 1, 1]
    assert session.meta["engine"] == "cuda"
    assert stages == {
        "embed": 1, "matmul_qkv": 2, "attention": 2, "matmul_attn": 2, "matmul_ffn_up": 2, "matmul_ffn_down": 2, "output": 1,
        "sample": 1, "other": 1, "gap": 1,
    }  # fmt: skip


def test_a_position_that_nothing_tells_is_not_made_up(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.graph(step_names(1), 0, 10)
    session = read_nsys(report.write())
    assert session.steps["pos"].tolist() == [-1]
    assert "context" not in session.summary()


def test_graph_nodes_are_kept(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.graph(step_names(1), 0, 10)
    session = read_nsys(report.write())
    assert session.events["graph_node"].tolist() == [*range(100, 108), -1]


def test_a_range_around_a_replayed_graph_gives_its_position(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    for pos in (7, 8):
        report.push(f"decode pos={pos}", 50 * pos, 50 * pos + 5)
        report.graph(step_names(1), 50 * pos + 1, 50 * pos + 3)
    session = read_nsys(report.write())
    assert session.steps["pos"].tolist() == [7, 8]
    assert session.steps["kv_len"].tolist() == [8, 9]
    assert session.stages().set_index("stage").loc["matmul_ffn_down", "calls"] == 1


def test_another_programs_outermost_ranges_become_steps(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "training.sqlite")
    for i in range(3):
        report.push("iteration", 100 * i, 100 * i + 50)
        report.push("forward", 100 * i + 1, 100 * i + 20)
        report.launch("void gemm<float, 128>(Params)", 100 * i + 2, 100 * i + 10, 100 * i + 40)
        report.launch("void add<float>(float*)", 100 * i + 30, 100 * i + 45, 100 * i + 50)
    report.launch("memset", 400, 500, 510)
    session = read_nsys(report.write())
    kernels = session.kernels().set_index("kernel")
    assert session.steps["n_tokens"].tolist() == [1, 1, 1, 0]
    assert kernels.loc["gemm<float, 128>", "calls"] == 3
    assert kernels.loc["gemm<float, 128>", "mean_us"] == pytest.approx(30)
    assert set(kernels["stage"]) == {"other", "gap"}
    assert session.events["nvtx"].tolist()[:2] == ["iteration > forward", "iteration"]


def test_a_foreign_report_says_steps_not_tokens(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.launch("k", 0, 1, 3)
    session = read_nsys(report.write())
    assert session.meta["engine"] == "foreign"
    assert "ms/step" in session.summary()
    assert "tok" not in session.summary()
    assert "other" in session._repr_html_()


def test_started_ranges_reach_across_threads_of_their_process(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.started("request", 0, 100, thread=THREAD + 1)
    report.push("elsewhere", 0, 100, thread=THREAD + 2)
    report.launch("k", 10, 20, 30)
    assert read_nsys(report.write()).events["nvtx"].tolist() == ["request", ""]


def test_a_range_that_never_ended_holds_to_the_end(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.push("open", 5, None)
    report.launch("before", 1, 2, 3)
    report.launch("inside", 10, 20, 30)
    events = read_nsys(report.write()).events.set_index("kernel")
    assert events.loc["inside", "nvtx"] == "open"
    assert events.loc["before", "nvtx"] == ""


def test_kernels_are_enough(tmp_path: Path) -> None:
    """No launches, no ranges, no strings, no names: still a table of kernels."""
    connection = sqlite3.connect(tmp_path / "r.sqlite")
    connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 3000), (5000, 6000)")
    connection.commit()
    connection.close()
    session = read_nsys(tmp_path / "r.sqlite")
    assert session.kernels().set_index("kernel").loc["unknown kernel", "total_ms"] == pytest.approx(3e-3)
    assert session.meta["nsys"]["without_launch"] == 2


def test_the_busiest_device_is_read_unless_one_is_named(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.launch("short", 0, 1, 2)
    report.launch("long", 0, 1, 90, device=1)
    path = report.write()
    assert "long" in set(read_nsys(path).events["kernel"])
    assert "short" in set(read_nsys(path, device=0).events["kernel"])
    with pytest.raises(ConfigError, match="kernels of 0, 1"):
        read_nsys(path, device=5)


def test_saving_and_loading_is_identity(tmp_path: Path) -> None:
    session = read_nsys(ranged(tmp_path / "r.sqlite"))
    assert Session.load(session.save(tmp_path / "s.calmprof")) == session


def test_it_exports_a_chrome_trace_with_every_kernel(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "r.sqlite")
    report.launch("mine", 0, 1, 3)
    trace = read_nsys(report.write()).to_chrome_trace(tmp_path / "t.json").read_text()
    assert "mine" in trace


def test_public_name_is_the_function() -> None:
    assert calmnb.read_nsys is read_nsys


# -- what is no report ---------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        read_nsys(tmp_path / "absent.sqlite")


@pytest.mark.parametrize("data", [b"", b"hello", b"SQLite format 3\0" + bytes(200)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r.sqlite").write_bytes(data)
    with pytest.raises(FormatError, match=r"r\.sqlite"):
        read_nsys(tmp_path / "r.sqlite")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_report_is_refused(tmp_path: Path, share: float) -> None:
    data = ranged(tmp_path / "whole.sqlite").read_bytes()
    (tmp_path / "r.sqlite").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(FormatError):
        read_nsys(tmp_path / "r.sqlite")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(100, 20_000), value=st.integers(0, 255))
def test_a_flipped_byte_gives_a_session_or_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    data = bytearray(ranged(folder / "whole.sqlite").read_bytes())
    data[at % len(data)] = value
    (folder / "r.sqlite").write_bytes(data)
    with contextlib.suppress(FormatError):
        assert len(read_nsys(folder / "r.sqlite").events) > 0


def test_another_database_is_named_as_such(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "r.sqlite").executescript("CREATE TABLE people (name TEXT);")
    with pytest.raises(FormatError, match="not a report of Nsight Systems"):
        read_nsys(tmp_path / "r.sqlite")


def test_a_report_without_kernels_says_how_to_record_them(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "r.sqlite").executescript("CREATE TABLE StringIds (id INTEGER, value TEXT);")
    with pytest.raises(FormatError, match=r"without GPU kernels.*--trace=cuda"):
        read_nsys(tmp_path / "r.sqlite")


def test_graphs_traced_as_wholes_are_explained(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "r.sqlite").executescript("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER);")
    with pytest.raises(FormatError, match="--cuda-graph-trace=node"):
        read_nsys(tmp_path / "r.sqlite")


def test_a_view_in_place_of_a_table_is_not_followed(tmp_path: Path) -> None:
    """A query of a stranger's that never ends."""
    sqlite3.connect(tmp_path / "r.sqlite").executescript(
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
        "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n;"
    )
    with pytest.raises(FormatError):
        read_nsys(tmp_path / "r.sqlite")


def test_text_where_a_time_belongs_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "r.sqlite")
    connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('soon', 5)")
    connection.commit()
    connection.close()
    with pytest.raises(FormatError, match="damaged"):
        read_nsys(tmp_path / "r.sqlite")


def test_a_raw_report_without_nsys_says_how_to_export_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("calmnb.profile.nsight._PLACES", {"nsys": (), "ncu": ()})
    (tmp_path / "r.nsys-rep").write_bytes(b"NVIDIA")
    with pytest.raises(CalmnbError, match="nsys export --type sqlite"):
        read_nsys(tmp_path / "r.nsys-rep")


# -- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode pos=12 kv_len=13", ("decode", 12, 13, 1)),
        ("prefill pos=0 n_tokens=24", ("prefill", 0, 24, 24)),
        ("token 12", ("decode", 12, 13, 1)),
        ("decode", ("decode", -1, 0, 1)),
        ("decoder block 3", None),
        ("forward", None),
    ],
)
def test_names_of_steps(text: str, expected: tuple[str, int, int, int] | None) -> None:
    assert step_of_range(text) == expected


@pytest.mark.parametrize(
    ("text", "layer"), [("layer 3", 3), ("layers.12", 12), ("Layer_0", 0), ("layernorm", None), ("layer", None)]
)
def test_names_of_layers(text: str, layer: int | None) -> None:
    assert layer_of_range(text) == layer


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("matvec_qkv", "matvec_qkv"),
        ("void gemm<float, (int)8>(Params<(bool)1>)", "gemm<float, (int)8>"),
        ("(anonymous namespace)::k(int)", "(anonymous namespace)::k"),
        ("x" * 500, "x" * 157 + "..."),
    ],
)
def test_kernel_names_lose_what_says_nothing(name: str, short: str) -> None:
    assert kernel_name(name) == short


def test_router_and_output_are_told_apart() -> None:
    names = step_names(1)
    names.insert(names.index("matvec_gateup"), "matvec_rows")
    stages = [row.stage for row in find_steps(names)[0].rows]
    assert stages == [
        "embed", "matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_up", "matmul_ffn_down",
        "output", "sample",
    ]  # fmt: skip


def test_steps_without_logits_are_prompt() -> None:
    steps = find_steps([*step_names(1, ()), *step_names(1)])
    assert [step.phase for step in steps] == ["prefill", "decode"]


@given(st.lists(st.sampled_from(["embed", "matvec_qkv", "attention", "gemm", "sample_max", "matvec_rows"]), max_size=40))
def test_steps_never_overlap(names: list[str]) -> None:
    end = 0
    for step in find_steps(names):
        assert step.first >= end
        assert names[step.first] == "embed"
        end = step.first + len(step.rows)
    assert end <= len(names)
