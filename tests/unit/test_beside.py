"""The second process of a test run: its reports arrive, and where it dies nothing is left out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


ENDLESS = """
import os, pytest, signal, time
from pathlib import Path

@pytest.mark.beside
@pytest.mark.parametrize("i", range(600))
def test_goes_on(i):
    Path("second").write_text(str(os.getpid()))
    time.sleep(0.1)

def test_is_killed():
    while not Path("second").exists(): time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(folder: Path, tests: str, *options: str) -> subprocess.Popen[str]:
    for name, text in (("conftest.py", CONFTEST), ("pytest.ini", INI), ("test_it.py", tests)):
        (folder / name).write_text(text)
    env = {key: value for key, value in os.environ.items() if key != "CALMNB_TEST_REPORTS"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_first_process_that_is_killed_takes_the_second_with_it(tmp_path: Path) -> None:
    start(tmp_path, ENDLESS).communicate()
    pid = int((tmp_path / "second").read_text())
    end = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "the second process goes on"
            time.sleep(0.1)


@pytest.mark.parametrize("chosen", ["test", "computes or here_then"])
def test_every_test_is_reported_once(tmp_path: Path, chosen: str) -> None:
    said = start(tmp_path, TESTS, "-k", chosen).communicate()[0]
    if chosen == "test":
        assert "assert (True, 1) == (True, 2)" in said
        assert "the second process ended with 7" in said
        assert "not today" in said
        assert "1 failed, 4 passed, 1 skipped" in said
    else:  # nothing to wait for: all runs in one process
        assert "ended with" not in said
        assert "1 failed, 1 passed, 4 deselected" in said
