"""The project's own papers agree with each other: packages, conda list, CLI, public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import calmnb

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

#: conda-forge calls some packages by another name.
CONDA_NAMES = {"matplotlib": "matplotlib-base", "cupy-cuda13x": "cupy"}
#: Test tools that conda users of the environment do not need: pip brings them with ``.[test]``.
PIP_ONLY = {"calmnb"}


def requirement(text: str) -> tuple[str, str]:
    """Split ``name[extra]>=1`` into its name and its version bounds."""
    match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*(.*)", text)
    assert match, text
    return match[1].lower(), match[2].replace(" ", "")


def conda_packages() -> dict[str, str]:
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    listed = (line.split(" #")[0].strip().removeprefix("- ") for line in lines if re.match(r"  - [a-z]", line))
    return {name: bounds for name, bounds in map(requirement, listed) if name != "conda-forge"}


@pytest.mark.parametrize("extra", ["", "lab", "cuda13"])
def test_conda_environment_holds_every_requirement_with_its_bounds(extra: str) -> None:
    project = PYPROJECT["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    conda = conda_packages()
    for name, bounds in map(requirement, wanted):
        assert conda.get(CONDA_NAMES.get(name, name)) == bounds, f"environment.yml: {name}{bounds}"


def test_conda_environment_names_nothing_that_pyproject_does_not() -> None:
    project = PYPROJECT["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in ("lab", "cuda13", "test"))]
    known = {CONDA_NAMES.get(requirement(r)[0], requirement(r)[0]) for group in lists for r in group}
    extra = set(conda_packages()) - known - {"python", "pip", "cuda-version", "cuda-nvrtc", "cuda-cudart-dev"}
    assert not extra


def test_version_is_the_same_everywhere() -> None:
    assert calmnb.__version__ == PYPROJECT["project"]["version"]


def test_public_names_are_sorted_and_all_resolve() -> None:
    assert calmnb.__all__ == sorted(calmnb.__all__)
    for name in calmnb.__all__:
        value = getattr(calmnb, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_import_is_light() -> None:
    """``import calmnb`` compiles nothing and loads no heavy package."""
    heavy = ("numba", "pandas", "matplotlib", "cupy", "anywidget", "IPython", "torch", "transformers")
    code = f"import sys, calmnb; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.beside
def test_wheel_carries_kernels_notebooks_and_widget_assets(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    for folder, pattern in (("kernels", "*.cu*"), ("notebooks", "*.ipynb")):
        for path in (ROOT / folder).rglob(pattern):
            assert f"calmnb/_{folder}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert "calmnb/_kernels/one_kernel/v6_ring.cu" in names
    for path in (ROOT / "calmnb" / "widgets" / "static").iterdir():
        assert f"calmnb/widgets/static/{path.name}" in names
    assert not [name for name in names if name.endswith((".calm", ".gguf"))]
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path / "site")
    code = "from calmnb.profile.shape import saved_path; print(saved_path('mistral-7b', 'fp8'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site" / "calmnb")
