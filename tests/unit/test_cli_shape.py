"""``calmnb profile`` of a shape (random weights on a GPU) and of a saved session, and options that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calmnb.cli import app
from calmnb.errors import ConfigError
from calmnb.profile import Session, shape
from tests.profile_fakes import SMOL, noisy_recorder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def profile_shape(name: str, **options: Any) -> Session:
        seen.update(options, name=name)
        options["progress"]("making random weights")
        return noisy_recorder(SMOL.replace(n_layers=2), tokens=5, model=name).session()

    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    monkeypatch.setattr(shape, "profile_shape", profile_shape)
    return seen


def test_a_shape_is_recorded_and_saved(asked: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "m.calmprof"
    command = ["profile", "--shape", "mistral-7b", "--dtype", "fp8", "--at", "0", "--at", "4000", "-n", "6", "-o", str(out)]
    result = CliRunner().invoke(app, [*command, "--kv-dtype", "fp8"])
    assert result.exit_code == 0, result.output
    assert asked["name"] == "mistral-7b"
    assert (asked["dtype"], asked["kv_dtype"], asked["contexts"]) == ("fp8", "fp8", [0, 4000])
    assert (asked["tokens"], asked["warmup"]) == (6, 2)
    assert Session.load(out).meta["model"] == "mistral-7b"
    assert "making random weights" in result.stderr
    assert "tok/s" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int4"], "--dtype is 'int4'; accepted are fp16, fp8, gf4"),
        (["--kv-dtype", "gf4"], "--kv-dtype is 'gf4'"),
        (["--source", "events"], "a shape is timed by stamps"),
    ],
)
def test_what_is_not_accepted_is_one_line(asked: dict[str, Any], options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["profile", "--shape", "mistral-7b", *options])
    assert result.exit_code != 0
    assert words in str(result.exception)
    assert not asked


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "CuPy is not installed")
    result = CliRunner().invoke(app, ["profile", "--shape", "mistral-7b"])
    assert "random weights made on a GPU: no GPU here" in str(result.exception)
    assert "h200-mistral-7b-fp16.calmprof" in str(result.exception)  # what can be shown instead
    result = CliRunner().invoke(app, ["profile", "--shape", "llama-2-7b"])  # has no recording
    assert "calmprof" not in str(result.exception)


def test_a_saved_session_is_shown(tmp_path: Path) -> None:
    saved = noisy_recorder(SMOL.replace(n_layers=2), tokens=5, model="some").session().save(tmp_path / "s.calmprof")
    result = CliRunner().invoke(app, ["profile", str(saved), "--csv", str(tmp_path / "s.csv")])
    assert result.exit_code == 0, result.output
    assert "matmul_qkv" in result.stdout
    assert (tmp_path / "s.csv").is_file()
    for command in ("info", "bench", "generate"):
        result = CliRunner().invoke(app, [command, str(saved)])
        assert "calmnb profile s.calmprof" in str(result.exception), command


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("profile in.calm -o in.calm", "-o in.calm is what the command reads"),
        ("profile in.calm --csv ./in.calm", "--csv in.calm is what the command reads"),
        ("profile in.calm -o link", "-o link is what the command reads"),
        ("profile --shape mistral-7b -o s --trace s", "-o and --trace would both write s"),
        ("profile --shape mistral-7b --csv no/s.csv", "--csv no/s.csv cannot be written: No such file"),
        ("profile --shape mistral-7b --csv folder", "--csv folder cannot be written: it is a folder"),
        ("profile --shape mistral-7b --plots b.calmprof", "--plots b.calmprof cannot be written: File exists"),
        ("profile --shape mistral-7b --plots /proc/x", "--plots /proc/x cannot be written"),
        ("compare in.calm b.calmprof --plot b.calmprof", "--plot b.calmprof is what the command reads"),
        ("bench in.calm --append in.calm", "--append in.calm is what the command reads"),
        ("bench in.calm --append folder", "--append folder cannot be written: it is a folder"),
        ("bench in.calm --append /proc/x/y", "--append /proc/x/y cannot be written"),
        ("demo --wheel in.calm --roofline in.calm", "--roofline in.calm is what the command reads"),
    ],
)
def test_outputs_are_checked_before_any_work(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("in.calm")
    for name in ("in.calm", "b.calmprof"):
        (tmp_path / name).write_text(name)
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    assert not asked
    assert (tmp_path / "in.calm").read_text() == "in.calm"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("profile demo --dtype gf4", "--dtype: goes with --shape; a model has its own storage, as in demo:gf4"),
        ("profile demo --at 5 --dtype fp8", "--dtype and --at: goes with --shape"),
        ("profile demo --shape mistral-7b", "MODEL: does not go with --shape"),
        ("profile s.calmprof -n 9", "--max-tokens: s.calmprof is a saved session"),
        ("bench demo --kv-dtype foo", "--kv-dtype is 'foo'; accepted are fp16, fp8"),
        ("bench demo --device tpu", "--device is 'tpu'; accepted are auto, cpu, cuda, reference"),
        ("bench demo --dtype gf4", "--dtype: goes with --shape"),
        ("bench demo --shape mistral-7b", "MODEL: does not go with --shape"),
    ],
)
def test_options_that_would_not_be_heeded_are_refused(asked: dict[str, Any], command: str, words: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert words in str(result.exception)
    assert not asked
