"""What this installation can do, and what it lacks: the answers behind ``calmnb doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from typing import Literal, NamedTuple

__all__ = ["Finding", "examine"]


class Finding(NamedTuple):
    """One line of the report. `remedy` is empty where nothing needs doing."""

    name: str
    state: Literal["ok", "missing", "bad"]
    found: str
    remedy: str


def examine() -> list[Finding]:
    """Look at this machine and installation; nothing is downloaded, compiled or changed.

    Returns
    -------
    list of Finding
        "bad" means that calmnb cannot work properly; "missing" that an optional part is not there.
    """
    return [_python(), *_packages(), _cpu(), _memory(), _cache(), *_jupyter(), _gpu(), *_tools()]


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}", "")


def _packages() -> list[Finding]:
    names = ("calmnb", "numpy", "numba", "tokenizers", "sentencepiece", "safetensors", "gguf", "pandas", "matplotlib")
    findings = []
    for name in names:
        try:
            findings.append(Finding(name, "ok", metadata.version(name), ""))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "bad", "not installed", f"pip install {name}"))
    return findings


def _cpu() -> Finding:
    from calmnb.profile.device import cpu_info

    info = cpu_info()
    return Finding("CPU", "ok", f"{info.name}, {os.cpu_count()} logical cores", "")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    return Finding("memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free", "")


def _cache() -> Finding:
    from calmnb.cache import cache_folder
    from calmnb.errors import CalmnbError

    try:
        folder = cache_folder()
    except CalmnbError as error:
        return Finding("cache", "bad", "not writable", str(error))
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("cache", "bad", f"{folder} is not writable", "set CALMNB_CACHE to a folder you can write")
    return Finding("cache", "ok", f"{folder}, {free / 1e9:.1f} GB free", "")


def _jupyter() -> list[Finding]:
    findings = []
    for name in ("jupyterlab", "ipywidgets", "anywidget", "ipykernel"):
        try:
            findings.append(Finding(name, "ok", metadata.version(name), ""))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", "not installed", "pip install 'calmnb[lab]'"))
    return findings


def _gpu() -> Finding:
    if importlib.util.find_spec("cupy") is None:
        return Finding(
            "GPU", "missing", "CuPy is not installed; the CPU engine is used", "pip install 'calmnb[cuda13]' (or cuda12)"
        )
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return Finding("GPU", "missing", f"CuPy {cupy.__version__} sees no GPU ({error}); the CPU engine is used", "")
    if count == 0:
        return Finding("GPU", "missing", f"CuPy {cupy.__version__} sees no GPU; the CPU engine is used", "")
    from calmnb.engine import MIN_CAPABILITY

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    name, capability = properties["name"].decode(), (properties["major"], properties["minor"])
    found = f"{name}, compute capability {capability[0]}.{capability[1]}, CuPy {cupy.__version__}"
    if capability < MIN_CAPABILITY:
        return Finding("GPU", "missing", f"{found}; the CPU engine is used", "the kernels need compute capability 8.0 or newer")
    return Finding("GPU", "ok", f"{found}, {properties['totalGlobalMem'] / 1e9:.0f} GB", "")


def _tools() -> list[Finding]:
    findings = []
    for tool, package in (("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")):
        path = shutil.which(tool)
        if path:
            findings.append(Finding(tool, "ok", path, ""))
        else:
            findings.append(Finding(tool, "missing", "not on the PATH", f"optional: install NVIDIA {package}"))
    return findings
