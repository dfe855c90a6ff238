"""JupyterLab, a browser and a page for the tests of one module. Their lives end with the module: playwright keeps an event
loop running, which other tests could not start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import browser, jupyter_lab, missing


def _check() -> None:
    reason = missing()
    if reason and os.environ.get("CALMNB_REQUIRE_BROWSER") != "1":
        pytest.skip(reason)
    assert not reason, reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    _check()
    settings = folder / ".jupyter-test" / "settings" / "@jupyter-widgets" / "jupyterlab-manager" / "plugin.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"saveState": true}')
    with jupyter_lab(folder) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    _check()
    with browser() as made:
        yield made


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context(
        viewport={"width": 1440, "height": 1240}, accept_downloads=True, permissions=["clipboard-read", "clipboard-write"]
    )
    yield context.new_page()
    context.close()
