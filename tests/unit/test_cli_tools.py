"""``calmnb nsys``, ``calmnb ncu`` and ``%%calm_nsys`` with stand-ins for NVIDIA's tools."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from typer.testing import CliRunner

from calmnb.cli import app
from calmnb.errors import CalmnbError, FormatError
from calmnb.profile import nsight
from calmnb.profile.nsys import read_nsys
from calmnb.profile.session import Session
from tests.nsys_files import ReportFile, step_names
from tests.unit.test_profile_ncu import session_of, table_of

#: Writes its arguments down, runs the program behind its options, and leaves a report where it was told to.
FAKE_NSYS = """#!/bin/sh
printf '%s\\n' "$@" >> "$FAKE/arguments"
case "$1" in
profile)
    shift
    for a in "$@"; do
        case "$a" in --output=*) out="${a#--output=}"; shift;; --*) shift;; *) break;; esac
    done
    "$@" || exit $?
    [ -z "$FAKE_SAYS" ] || printf "$FAKE_SAYS"
    echo "Generated report"
    [ -n "$FAKE_SILENT" ] || echo NVIDIA > "$out.nsys-rep";;
export)
    [ -z "$FAKE_BROKEN" ] || { echo "unsupported version" >&2; exit 1; }
    for a in "$@"; do case "$a" in --output=*) cp "$FAKE/report.sqlite" "${a#--output=}";; esac; done;;
esac
"""
FAKE_NCU = """#!/bin/sh
printf '%s\\n' "$@" >> "$FAKE/arguments"
while [ $# -gt 0 ]; do
    case "$1" in
    --log-file) cp "$FAKE/ncu.csv" "$2"; shift 2;;
    --csv) shift;;
    --*) shift 2;;
    *) break;;
    esac
done
"$@"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the stand-ins on the PATH, and what they hand out."""
    folder = tmp_path / "fake tools"
    folder.mkdir()
    for name, text in (("nsys", FAKE_NSYS), ("ncu", FAKE_NCU)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("FAKE", str(folder))
    report = ReportFile(folder / "report.sqlite")
    for i in range(3):
        report.graph(step_names(2), 100 * i, 100 * i + 10)
    report.write()
    names = step_names(2)
    (folder / "ncu.csv").write_text(table_of(names, [1e6] * len(names)))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the tools."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "_PLACES", {"nsys": (), "ncu": ()})
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def arguments(fake: Path) -> list[str]:
    return (fake / "arguments").read_text().splitlines()


# -- nsys ------------------------------------------------------------------------------------------------------------------


def test_nsys_prints_stages_and_kernels_and_saves_the_session(fake: Path, tmp_path: Path) -> None:
    result = run("nsys", "-o", "s.calmprof", "--", "true")
    assert result.exit_code == 0, result.output
    assert "matmul_qkv" in result.stdout
    assert "matvec_gateup" in result.stdout
    assert Session.load(tmp_path / "s.calmprof").meta["settings"]["command"] == ["true"]


def test_nsys_records_kernels_inside_graphs_and_everything_from_the_start(fake: Path) -> None:
    assert run("nsys", "--", "true").exit_code == 0
    given = arguments(fake)
    assert {"--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none"} <= set(given)
    assert not [option for option in given if option.startswith("--capture-range")]


def test_nsys_records_a_range_when_asked(fake: Path) -> None:
    assert run("nsys", "--capture-range", "--", "true").exit_code == 0
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(arguments(fake))


def test_options_behind_the_program_are_the_programs(fake: Path) -> None:
    assert run("nsys", "printf", "%s", "-o").exit_code == 0
    given = arguments(fake)
    assert given[given.index("%s") + 1] == "-o"


def test_output_of_the_program_stays_out_of_the_results(fake: Path) -> None:
    result = run("nsys", "--json", "--", "echo", "noise from the program")
    assert json.loads(result.stdout)["stages"][0]["stage"] == "embed"
    assert "noise from the program" in result.stderr


def test_nsys_keeps_its_report_when_asked(fake: Path, tmp_path: Path) -> None:
    assert run("nsys", "--report", "kept", "--", "true").exit_code == 0
    assert (tmp_path / "kept.nsys-rep").is_file()
    assert len(read_nsys(tmp_path / "kept.sqlite").steps) == 3


def test_the_growing_bar_of_nsys_is_left_out(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As nsys 2023.4 prints it: over itself, some hundred times.
    monkeypatch.setenv(
        "FAKE_SAYS", r"[1/1] [0%%      ] r.nsys-rep\r[1/1] [=======61%%  ] r.nsys-rep\r[1/1] [====100%%] r.nsys-rep\n"
    )
    result = run("nsys", "--", "echo", "12% of the program's own")
    assert "r.nsys-rep" not in result.stderr
    assert "12% of the program's own" in result.stderr
    assert "warning" not in result.stderr


def test_a_report_that_nsys_made_in_part_is_said_to_be_incomplete(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nsys 2023.4 on a program of CUDA 13, which calls a function that it has not heard of; its status is 0.
    monkeypatch.setenv(
        "FAKE_SAYS", "Unknown runtime API function index: 486\n**** Errors occurred while processing the raw events. ****\n"
    )
    result = run("nsys", "--", "true")
    assert result.exit_code == 0
    assert "kernels may be missing" in result.stderr


def test_a_report_is_read_instead_of_run(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "old.nsys-rep").write_text("NVIDIA")
    assert run("nsys", "old.nsys-rep").exit_code == 0
    assert "profile" not in arguments(fake)
    assert run("nsys", fake / "report.sqlite").exit_code == 0


def test_calmnb_means_the_one_of_this_environment(fake: Path) -> None:
    result = run("nsys", "--", "python", "-c", "import sys; print('at', sys.executable)")
    assert f"at {sys.executable}" in result.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [(["false"], "status 1"), (["no-such-program"], "not a program on the PATH")],
)
def test_a_program_that_fails_is_an_error(fake: Path, command: list[str], words: str) -> None:
    result = run("nsys", "--", *command)
    assert isinstance(result.exception, CalmnbError)
    assert words in str(result.exception)


def test_no_report_is_an_error(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SILENT", "1")
    assert "wrote no report" in str(run("nsys", "--", "true").exception)
    assert "cudaProfilerStart" in str(run("nsys", "--capture-range", "--", "true").exception)


def test_a_report_that_nsys_cannot_export_is_an_error(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    error = run("nsys", "--", "true").exception
    assert isinstance(error, FormatError)
    assert "unsupported version" in str(error)


def test_a_report_of_before_is_not_taken_for_the_new_one(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SILENT", "1")
    (tmp_path / "r.nsys-rep").write_text("old")
    assert "wrote no report" in str(run("nsys", "--report", "r", "--", "true").exception)


@pytest.mark.parametrize(("tool", "page"), [("nsys", "nsight-systems"), ("ncu", "nsight-compute")])
def test_a_missing_tool_is_one_line_that_says_where_to_get_it(bare: None, tool: str, page: str) -> None:
    error = run(tool, "--", sys.executable, "-V").exception
    assert isinstance(error, CalmnbError)
    assert f"https://developer.nvidia.com/{page}" in str(error)
    assert "\n" not in str(error)


def test_tools_are_found_where_installers_put_them(tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2024.1", "2025.3"):
        (tmp_path / "opt" / version).mkdir(parents=True)
        (tmp_path / "opt" / version / "nsys").write_text("#!/bin/sh\n")
        (tmp_path / "opt" / version / "nsys").chmod(0o755)
    monkeypatch.setattr(nsight, "_PLACES", {"nsys": (f"{tmp_path}/opt/*",)})
    assert nsight.find_tool("nsys") == str(tmp_path / "opt" / "2025.3" / "nsys")


def test_long_kernel_names_leave_room_for_the_numbers(fake: Path, tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "long.sqlite")
    report.launch(f"void gemm<{'tile_128x128, ' * 9}>(Params)", 0, 10, 43.5)
    report.write()
    assert "33.50" in run("nsys", "long.sqlite").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nsys -o rep.sqlite rep.sqlite", "-o rep.sqlite is what the command reads"),
        ("nsys -o k.sqlite --report k -- true", "-o and --report (.sqlite) would both write k.sqlite"),
        ("nsys -o no/s.calmprof -- true", "-o no/s.calmprof cannot be written: No such file or directory"),
        ("ncu -o rep.csv --session rep.csv -- true", "-o rep.csv is what the command reads"),
        ("ncu -o x --save x -- true", "-o and --save would both write x"),
    ],
)
def test_outputs_are_checked_before_anything_runs(fake: Path, tmp_path: Path, words: str, said: str) -> None:
    for name in ("rep.sqlite", "rep.csv"):
        (tmp_path / name).write_text(name)
    assert said in str(run(*words.split()).exception)
    assert not (fake / "arguments").exists()
    assert (tmp_path / "rep.sqlite").read_text() == "rep.sqlite"


# -- ncu -------------------------------------------------------------------------------------------------------------------


def test_ncu_prints_bytes_by_kernel(fake: Path) -> None:
    result = run("ncu", "--", "true")
    assert result.exit_code == 0, result.output
    assert "matvec_residual" in result.stdout
    assert "written MB" in result.stdout


def test_ncu_measures_nodes_of_graphs_in_base_units(fake: Path) -> None:
    assert run("ncu", "--skip", 5, "--count", 7, "--kernels", "matvec", "--", "true").exit_code == 0
    given = arguments(fake)
    for option, value in (("--graph-profiling", "node"), ("--print-units", "base"), ("--launch-skip", "5"),
                          ("--launch-count", "7"), ("--kernel-name", "regex:matvec")):  # fmt: skip
        assert given[given.index(option) + 1] == value


def test_ncu_measures_only_decode_steps_of_calmnb(fake: Path) -> None:
    assert run("ncu", "--", "calmnb", "info", "--help").exit_code == 0
    given = arguments(fake)
    names = re.compile(given[given.index("--kernel-name") + 1].removeprefix("regex:"))
    assert all(names.search(name) for name in step_names(1))
    assert not [name for name in ("attention_prefill", "embed_rows", "read_bytes", "fill_random") if names.search(name)]


def test_ncu_sets_measured_bytes_beside_declared_ones(fake: Path, tmp_path: Path) -> None:
    session_of(2).save(tmp_path / "s.calmprof")
    result = run("ncu", "--session", "s.calmprof", "--json", "--", "true")
    rows = {row["stage"]: row for row in json.loads(result.stdout)}
    assert rows["matmul_attn"]["bytes_measured"] == 2 * (1_000_000 + 128)
    assert rows["matmul_attn"]["bytes_min"] > 0


def test_ncu_writes_its_csv_and_reads_it_again(fake: Path, tmp_path: Path) -> None:
    assert run("ncu", "-o", "kept.csv", "--", "true").exit_code == 0
    (fake / "ncu").unlink()
    assert "matvec_qkv" in run("ncu", "kept.csv").stdout


def test_ncu_without_permission_says_what_to_do(fake: Path) -> None:
    (fake / "ncu.csv").write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    assert "administrator" in str(run("ncu", "--", "true").exception)


def test_an_error_of_ncu_is_passed_on(fake: Path) -> None:
    (fake / "ncu.csv").write_text("==ERROR== Unknown metric\n")
    assert "status 1 under ncu: Unknown metric" in str(run("ncu", "--", "false").exception)


# -- magic -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell() -> Iterator[Any]:
    made = InteractiveShell()
    made.run_line_magic("load_ext", "calmnb")
    yield made
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()


def test_the_magic_runs_the_cell_in_a_process_of_its_own(
    fake: Path, tmp_path: Path, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("value = 42\n")
    session = shell.run_cell_magic("calm_nsys", "-o s", "import os, beside\nprint('pid', os.getpid(), beside.value)\n")
    words = capsys.readouterr().out.split()
    assert isinstance(session, Session)
    assert shell.user_ns["s"] is session
    assert int(words[words.index("pid") + 1]) != os.getpid()
    assert words[words.index("pid") + 2] == "42"


def test_the_magic_shows_the_traceback_of_a_cell_that_fails(fake: Path, shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="status 1"):
        shell.run_cell_magic("calm_nsys", "", "raise ValueError('here')")
    assert "ValueError: here" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "cell", "words"), [("", " ", "empty"), ("-o 1x", "pass", "variable")])
def test_a_mistake_with_the_magic_is_one_line(shell: Any, line: str, cell: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shell.run_cell_magic("calm_nsys", line, cell)


def test_the_magic_without_nsys_says_where_to_get_it(bare: None, shell: Any) -> None:
    with pytest.raises(UsageError, match=r"developer\.nvidia\.com"):
        shell.run_cell_magic("calm_nsys", "", "pass")
