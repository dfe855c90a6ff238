"""JupyterLab in a headless Chromium, for tests: own configuration, loopback only, everything ended at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CALMNB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[2]


def missing() -> str:
    """Why no browser test can run here, or an empty string."""
    if not CHROMIUM:
        return "Chromium is not installed (apt-get install chromium)"
    try:
        import jupyterlab  # noqa: F401
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed (pip install -e '.[test]')"
    return ""


@contextlib.contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """Serve `folder`; yields the server's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / ".jupyter-test"
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "default",
    }
    command = [
        sys.executable, "-m", "jupyter", "lab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--expose-app-in-browser", f"--ServerApp.root_dir={folder}",
        "--ServerApp.disable_check_xsrf=True",
    ]  # fmt: skip
    quiet = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True, exist_ok=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    whole = home / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    whole.parent.mkdir(parents=True, exist_ok=True)
    whole.write_text('{"windowingMode": "none"}')  # cells out of sight are in the page too
    with (home / "log.txt").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for_server(server, address, home / "log.txt")
            yield address
        finally:
            _end(server, address)


def _wait_for_server(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended at once:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api/status", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within 120 s:\n{log.read_text()[-3000:]}")


def _end(server: subprocess.Popen[bytes], address: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        with urllib.request.urlopen(f"{address}/api/kernels", timeout=5) as answer:
            kernels = json.load(answer)
        for kernel in kernels:
            request = urllib.request.Request(f"{address}/api/kernels/{kernel['id']}", method="DELETE")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=10).close()
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(10)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium; yields playwright's Browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


class Notebook:
    """One notebook open in one page."""

    def __init__(self, page: Any, address: str, name: str) -> None:
        self.page, self.address, self.name = page, address, name
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.set_default_timeout(60_000)

    def open(self) -> None:
        """Load the page and wait for the kernel; tries twice, because a loaded machine may lose the first attempt."""
        for attempt in (1, 2):
            try:
                self.page.goto(f"{self.address}/doc/tree/{self.name}", wait_until="domcontentloaded", timeout=90_000)
                self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
                self.page.wait_for_function(
                    "() => { const p = window.jupyterapp?.shell?.currentWidget;"
                    " return p?.sessionContext?.session?.kernel?.status === 'idle'; }",
                    timeout=90_000,
                )
                return
            except Exception:
                if attempt == 2:
                    raise

    def run_all(self, timeout: float = 240) -> None:
        """Run every cell and wait until each has its number.

        JupyterLab loses the command now and then when the notebook has just opened, so it is given again where nothing
        happens for ten seconds.
        """
        deadline = time.monotonic() + timeout
        quiet_since = 0.0
        while time.monotonic() < deadline:
            open_cells, busy = self.page.evaluate(
                """() => { const notebook = window.jupyterapp.shell.currentWidget;
                const cells = [...notebook.content.model.cells].filter((cell) => cell.type === 'code');
                return [cells.filter((cell) => cell.executionCount === null).length,
                  cells.some((cell) => cell.executionState === 'running')
                  || notebook.sessionContext.session.kernel.status !== 'idle']; }"""
            )
            if not open_cells:
                return
            if busy:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > 10:
                self.command("notebook:run-all-cells", wait=False)
                quiet_since = time.monotonic()
            self.page.wait_for_timeout(200)
        raise TimeoutError(f"{open_cells} cells did not finish within {timeout} s")

    def command(self, name: str, *, wait: bool = True) -> None:
        """Execute a JupyterLab command."""
        tail = "" if wait else "; return null"
        self.page.evaluate(
            f"() => {{ const r = window.jupyterapp.commands.execute({name!r}){tail or '; return r.then(() => null)'} }}"
        )

    def chat(self, index: int = 0) -> Any:
        """The `index`-th chat widget of the page."""
        return self.page.locator(".calmnb-chat").nth(index)

    def wait_status(self, status: str, index: int = 0, timeout: float = 60) -> None:
        """Wait until a chat widget says it is in `status`."""
        self.page.wait_for_function(
            "([i, s]) => document.querySelectorAll('.calmnb-chat')[i]?.dataset.status === s", arg=[index, status],
            timeout=timeout * 1000, polling=50,
        )  # fmt: skip

    def say(self, text: str, index: int = 0) -> None:
        """Type a message and press Enter."""
        box = self.chat(index).get_by_label("Message", exact=True)
        box.fill(text)
        box.press("Enter")

    def set_theme(self, name: str) -> None:
        """Switch JupyterLab's theme."""
        self.page.evaluate(
            "n => window.jupyterapp.commands.execute('apputils:change-theme', { theme: n }).then(() => null)", name
        )
        wanted = "false" if "Dark" in name else "true"
        self.page.wait_for_function("w => document.body.dataset.jpThemeLight === w", arg=wanted, polling=100)


def notebook_json(*cells: str) -> str:
    """A notebook of code cells."""
    made = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for i, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
