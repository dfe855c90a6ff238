"""The magics: same options as the command line, errors as one line."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import calmnb
from calmnb.magics import CalmMagics


@pytest.fixture
def shell() -> Iterator[Any]:
    made = InteractiveShell()
    made.run_line_magic("load_ext", "calmnb")
    yield made
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()


@pytest.fixture
def loaded(shell: Any, spec_model: Callable[[str], Path]) -> Any:
    shell.run_line_magic("calm_load", f"'{spec_model('A')}' -o m --device reference")
    yield shell
    shell.user_ns["m"].close()


def test_load_puts_a_model_into_the_variable(loaded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(loaded.user_ns["m"], calmnb.Model)
    assert loaded.user_ns["m"].engine.info.engine == "reference"


def test_loading_again_closes_the_model_before(loaded: Any, spec_model: Callable[[str], Path]) -> None:
    before = loaded.user_ns["m"]
    loaded.run_line_magic("calm_load", f"{spec_model('A')} -o m --device reference")
    assert loaded.user_ns["m"] is not before
    with pytest.raises(calmnb.CalmnbError, match="closed"):
        before.generate("x")


def test_profile_returns_the_session_and_stores_it(loaded: Any) -> None:
    session = loaded.run_cell_magic("calm_profile", "-n 4 -o s --raw --peak 10", "\nabc\n")
    assert isinstance(session, calmnb.Session)
    assert loaded.user_ns["s"] is session
    assert (session.steps["phase"] == "decode").sum() == 3
    assert session.peak().gb_per_s == 10


def test_json_prints_only_json(loaded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert loaded.run_cell_magic("calm_profile", "-m m -n 3 --raw --json --peak 10", "abc") is None
    data = json.loads(capsys.readouterr().out)
    assert {row["stage"] for row in data["stages"]} >= {"matmul_qkv", "output"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no/such/file.calm", "no/such/file.calm"),
        ("x.calm --device tpu", "tpu"),
        ("x.calm -o 3x", "name of a variable"),
        ("", "path"),
        ("x.calm --depth 3", "--depth"),
    ],
)
def test_a_mistake_in_loading_is_one_line(shell: Any, line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        shell.run_line_magic("calm_load", line)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("line", "cell", "words"),
    [
        ("-m nothing", "hi", "no variable 'nothing'"),
        ("", "  ", "empty"),
        ("-m number", "hi", "int"),
        ("-n 1 -m m --raw --peak 1", "abc", "tokens is 1"),
        ("-m m -n 4 --raw -t -1 --peak 1", "abc", "temperature"),
        ("-o 1x", "hi", "variable"),
    ],
)
def test_a_mistake_in_profiling_is_one_line(loaded: Any, line: str, cell: str, words: str) -> None:
    loaded.user_ns["number"] = 3
    with pytest.raises(UsageError, match=words):
        loaded.run_cell_magic("calm_profile", line, cell)


def test_the_model_loaded_last_is_the_default(loaded: Any) -> None:
    magics = loaded.magics_manager.registry["CalmMagics"]
    assert isinstance(magics, CalmMagics)
    assert magics.last == "m"
