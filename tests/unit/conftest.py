"""Fixtures that test modules of one subject share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.emulator.launcher import EmulatedLauncher


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint with a tokenizer; copy it to change it."""
    from tests.hf_models import save, tiny_model, tiny_tokenizer

    checkpoint = save(tiny_model("llama"), tmp_path_factory.mktemp("llama") / "tiny")
    (checkpoint / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    return checkpoint


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    """Runs kernels on the CPU; each specialisation is compiled once for all test modules."""
    return EmulatedLauncher(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def checkpoint(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint."""
    return Path(shutil.copytree(llama_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a test converts to: a folder of its own, so that leftovers show."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.calm"
