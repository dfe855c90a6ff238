"""The second process of a test run: its reports arrive, and where it dies nothing is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix" or (os.cpu_count() or 1) < 2, reason="there is no second process here")

CONFTEST = 'pytest_plugins = ["tests.beside"]\n'
INI = "[pytest]\nmarkers =\n  beside\n  timed\n"
TESTS = """
import os, pytest
IS_SECOND = "CALMNB_TEST_REPORTS" in os.environ

@pytest.mark.beside
def test_computes(): assert IS_SECOND

@pytest.mark.beside
def test_fails(): assert (IS_SECOND, 1) == (True, 2)

@pytest.mark.beside
@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass

@pytest.mark.beside
def test_kills_the_second_process():
    if IS_SECOND: os._exit(7)

@pytest.mark.beside
def test_runs_here_then(): assert not IS_SECOND

@pytest.mark.timed
def test_waits(): assert not IS_SECOND
"""


@pytest.mark.parametrize("chosen", ["test", "computes or here_then"])
def test_every_test_is_reported_once(tmp_path: Path, chosen: str) -> None:
    for name, text in (("conftest.py", CONFTEST), ("pytest.ini", INI), ("test_it.py", TESTS)):
        (tmp_path / name).write_text(text)
    env = {key: value for key, value in os.environ.items() if key != "CALMNB_TEST_REPORTS"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-k", chosen]
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False).stdout
    if chosen == "test":
        assert "assert (True, 1) == (True, 2)" in said
        assert "the second process ended with 7" in said
        assert "not today" in said
        assert "1 failed, 4 passed, 1 skipped" in said
    else:  # nothing to wait for: all runs in one process
        assert "ended with" not in said
        assert "1 failed, 1 passed, 4 deselected" in said
