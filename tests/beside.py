"""A second pytest for the tests that only compute: it runs them while the others wait, for a browser mostly.

Tests marked ``beside`` come last. Where others come before them, a process with the lowest priority starts on them at once,
and at their turn its reports are shown as if they had run here. Where it died, the rest does run here. It stands still
during tests marked ``timed``. Not for it are threads that wait for each other, as the CPU engine's: at that priority the one
beside a busy process comes to its turn once in a while, and all wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

#: Names the file that the second process writes its reports to, and tells it that it is the second.
_REPORTS = "CALMNB_TEST_REPORTS"


def pytest_configure(config: pytest.Config) -> None:
    """In the second process: write reports, and take only what time the first leaves."""
    path = os.environ.get(_REPORTS)
    if path is None:
        return
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")  # where sessions share the processor, nice counts inside one alone
    config.pluginmanager.register(_Writer(config, Path(path)))


class _Writer:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path, self._parent = config, path, os.getppid()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if os.getppid() != self._parent:  # killed, it could not end this process
            os._exit(1)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put them last."""
    items.sort(key=_is_beside)


def _is_beside(item: pytest.Item) -> bool:
    return item.get_closest_marker("beside") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Start the second process where that saves time; end it with the loop."""
    beside = [item.nodeid for item in session.items if _is_beside(item)]
    option = session.config.option
    is_of_use = 0 < len(beside) < len(session.items) and os.name == "posix" and (os.cpu_count() or 1) > 1
    if not is_of_use or _REPORTS in os.environ or option.collectonly or option.usepdb:
        return (yield)
    with tempfile.TemporaryDirectory() as folder:
        second = _Second(session.config, Path(folder), beside)
        session.config.pluginmanager.register(second)
        try:
            return (yield)
        finally:
            session.config.pluginmanager.unregister(second)
            second.end()


class _Second:
    def __init__(self, config: pytest.Config, folder: Path, nodeids: list[str]) -> None:
        self._config, self._nodeids = config, set(nodeids)
        self._reports: dict[str, list[Any]] = {}
        self._rest, self._has_died = "", False
        self._log = folder / "log"
        path = folder / "reports"
        path.touch()
        self._file = path.open(encoding="utf-8")
        env = os.environ | {_REPORTS: str(path), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        # The time that it may take counts while it waits or stands still, too.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=1800", *nodeids]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=config.rootpath, env=env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._file.close()

    def _signal(self, number: int) -> None:
        """To the process and the compilers that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("timed") is not None:
            self._signal(signal.SIGSTOP)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if item.get_closest_marker("timed") is not None:
            self._signal(signal.SIGCONT)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        reports = self._of(item.nodeid) if item.nodeid in self._nodeids else None
        if reports is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _of(self, nodeid: str) -> list[Any] | None:
        """The reports on a test when it has ended, or None where the process ended without it."""
        while True:
            is_over = self._process.poll() is not None
            *lines, self._rest = (self._rest + self._file.read()).split("\n")
            for data in map(json.loads, lines):
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
                if isinstance(report.longrepr, list):
                    report.longrepr = tuple(report.longrepr)  # of a skipped test; JSON has no tuples
                self._reports.setdefault(report.nodeid, []).append(report)
            reports = self._reports.get(nodeid, [])
            if reports and reports[-1].when == "teardown":
                return reports
            if is_over:
                self._tell()
                return None
            time.sleep(0.1)

    def _tell(self) -> None:
        """Say once that the process died, and what it said last."""
        if self._has_died:
            return
        self._has_died = True
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f"\n{__name__}: the second process ended with {self._process.returncode}; the rest runs here")
        terminal.write_line(self._log.read_text(encoding="utf-8", errors="replace")[-2000:])
