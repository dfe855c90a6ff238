"""The ``calmnb`` command, as a shell or a script meets it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from calmnb.bench import bench
from calmnb.cli import app
from calmnb.cli.common import COMMANDS, print_json
from calmnb.doctor import Finding
from calmnb.download import download
from calmnb.errors import CalmnbError, ConfigError
from tests.profile_fakes import SMOL, noisy_recorder

SpecModel = Callable[[str], Path]


def run(
    *arguments: object, stdin: str | None = None, timeout: float = 180, encoding: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``calmnb`` in a process of its own."""
    command = [sys.executable, "-m", "calmnb", *map(str, arguments)]
    env = os.environ | ({"PYTHONIOENCODING": encoding} if encoding else {})
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=timeout, encoding=encoding, env=env)


def test_every_promised_command_exists() -> None:
    assert set(get_command(app).commands) == set(COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"calmnb {command}" in result.output


def test_missing_file_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = run("info", tmp_path / "absent.calm")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "absent.calm" in done.stderr
    assert "Traceback" not in done.stderr


def test_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    pointer = tmp_path / "model.calm"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n")
    done = run("info", pointer)
    assert done.returncode == 1
    assert "LFS" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_json_is_json_alone(spec_model: SpecModel) -> None:
    done = run("info", spec_model("B"), "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert "fp8" in json.dumps(facts)


def test_generate_prints_calms_greedy_text(spec_model: SpecModel) -> None:
    """SPEC 9: model A, prompt "dbe", greedy: calm prints dbeggg for six positions."""
    done = run("generate", spec_model("A"), "-i", "dbe", "-t", 0, "-n", 3, "--device", "reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dbeggg\n"


def test_generate_reads_standard_input_and_prints_json(spec_model: SpecModel) -> None:
    done = run("generate", spec_model("A"), "-i", "-", "-t", 0, "-n", 3, "--device", "reference", "--json", stdin="dbe")
    assert json.loads(done.stdout)["text"] == "ggg"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("-t", "nan", "temperature"), ("-t", "inf", "temperature"), ("--top-p", "0", "top_p"), ("--device", "tpu", "tpu")],
)
def test_bad_option_is_explained(spec_model: SpecModel, option: str, value: str, named: str) -> None:
    done = run("generate", spec_model("A"), "-i", "dbe", option, value)
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_prompt_longer_than_the_context_is_refused(spec_model: SpecModel) -> None:
    done = run("generate", spec_model("A"), "-i", "d" * 40, "-c", 8, "--device", "reference")
    assert done.returncode == 1
    assert "40" in done.stderr
    assert "8" in done.stderr


def test_empty_prompt_is_refused_without_a_bos(spec_model: SpecModel) -> None:
    done = run("generate", spec_model("A"), "-i", "", "--device", "reference")
    assert done.returncode == 1
    assert "prompt" in done.stderr
    assert "Traceback" not in done.stderr


def test_converting_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    done = run("convert", tmp_path, tmp_path / "out.calm")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.calm").exists()


@pytest.mark.parametrize("name", ["not-a-repo", "../..", "-a/b", "a--b/c"])
def test_repository_name_is_checked_before_any_network(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a repository name.*owner/name"):
        download(name)


@pytest.mark.parametrize("command", ["info", "generate", "bench", "profile", "perplexity", "verify-profile", "nsys", "convert"])
@pytest.mark.parametrize("name", ["a" * 300, "~no-such-user/m"])
def test_a_path_that_cannot_be_is_an_error_of_ours(tmp_path: Path, command: str, name: str) -> None:
    argument = f"{name}.sqlite" if command == "nsys" else f"{name}.calm"
    rest = [str(tmp_path / "out.calm")] if command == "convert" else []
    found = CliRunner().invoke(app, [command, argument, *rest]).exception
    assert isinstance(found, CalmnbError)
    assert argument in str(found)


def test_bench_of_a_name_too_long_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigError, match="cannot be opened: File name too long"):
        bench("a" * 300)


def test_whatever_the_system_refuses_is_one_line() -> None:
    done = run("compare", "a" * 300, "b")
    assert done.returncode == 1
    assert done.stderr.endswith("File name too long\n")
    assert "Traceback" not in done.stderr


WAITS = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from calmnb.cli import app, main

@app.command()
def wait():
    print("ready", flush=True)
    time.sleep(60)

main()
"""


def test_interrupt_is_clean() -> None:
    """Ctrl-C while a command works ends it with status 130 and no traceback."""
    process = subprocess.Popen([sys.executable, "-c", WAITS, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


WRITES = """
from pathlib import Path
import sys, time
from calmnb.cli import app, main
from calmnb.files import replacing

@app.command()
def wait(folder: Path):
    with replacing(folder / "out") as temporary:
        temporary.write_text("half")
        print("ready", flush=True)
        time.sleep(60)

main()
"""


def test_termination_leaves_no_temporary_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, "wait", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


def test_what_the_terminal_cannot_show_is_replaced(spec_model: SpecModel) -> None:
    command = ["generate", spec_model("A"), "-i", "d日", "-n", 1, "-t", 0, "--device", "reference"]
    done = run(*command, encoding="latin-1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("d?")


def test_json_is_whole_whatever_the_terminal_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="replace")
    monkeypatch.setattr(sys, "stdout", out)
    print_json({"text": "日"})
    out.seek(0)
    assert json.load(out) == {"text": "日"}


@pytest.mark.filterwarnings("ignore:the model's vocabulary")
@pytest.mark.parametrize(("options", "said", "times"), [(["-t", "nan"], "temperature is nan", 1), (["-c", "4"], "context", 3)])
def test_a_chat_that_fails_says_so_and_ends_with_status_1(
    spec_model: SpecModel, options: list[str], said: str, times: int
) -> None:
    command = ["chat", str(spec_model("A")), "-i", "dddddd", "--device", "reference", *options]
    result = CliRunner().invoke(app, command, input="bbbbbb\neeeeee\n")
    lines = [*result.stderr.splitlines(), str(result.exception)]
    assert result.exit_code == 1
    assert len([line for line in lines if said in line]) == times


def test_markup_in_a_path_is_text(tmp_path: Path) -> None:
    saved = noisy_recorder(SMOL.replace(n_layers=2), tokens=5, model="a[/b]").session().save(tmp_path / "s.calmprof")
    out = tmp_path / "d[" / "red].calmprof"
    out.parent.mkdir()
    result = CliRunner().invoke(app, ["profile", str(saved), "-o", str(out)])
    assert result.exit_code == 0, result.exception
    assert "a[/b]" in result.stdout
    assert str(out) in result.stderr


def test_doctor_reports_json() -> None:
    done = run("doctor", "--json")
    names = {finding["name"] for finding in json.loads(done.stdout)}
    assert {"Python", "GPU", "cache", "jupyterlab"} <= names


def test_doctor_shows_the_whole_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("GPU", "missing", "at [/x]", "pip install 'calmnb[cuda13]'")]
    monkeypatch.setattr("calmnb.doctor.examine", lambda: findings)
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert "pip install 'calmnb[cuda13]'" in shown
    assert "at [/x]" in shown
