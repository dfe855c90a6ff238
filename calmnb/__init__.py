"""calmnb: run a language model at the limit of its memory, and see where each token's time and bytes go.

>>> import calmnb
>>> model = calmnb.load(calmnb.demo_model("fp8"))       # doctest: +SKIP
>>> session = calmnb.profile(model, "Once upon a time", tokens=32)  # doctest: +SKIP
>>> session.stages()                                    # doctest: +SKIP

Names below load on first use: ``import calmnb`` itself compiles nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calmnb.checkpoint import CalmFile, open_calm
    from calmnb.config import ModelConfig
    from calmnb.convert import convert
    from calmnb.download import demo_model, download
    from calmnb.errors import CalmnbError
    from calmnb.generate import Generation, Token
    from calmnb.info import file_info
    from calmnb.magics import load_ipython_extension
    from calmnb.model import Model, load
    from calmnb.perplexity import perplexity
    from calmnb.profile import Comparison, Session, SessionRecorder, compare, measure_bandwidth, profile, speed_of_light
    from calmnb.profile.nsys import read_nsys
    from calmnb.sampler import Sampling
    from calmnb.widgets import ChatWidget, CompareView, KernelTable, ProfileView

__version__ = "0.1.0"

_HOME = {
    "CalmFile": "calmnb.checkpoint",
    "CalmnbError": "calmnb.errors",
    "ChatWidget": "calmnb.widgets",
    "CompareView": "calmnb.widgets",
    "Comparison": "calmnb.profile",
    "Generation": "calmnb.generate",
    "KernelTable": "calmnb.widgets",
    "Model": "calmnb.model",
    "ModelConfig": "calmnb.config",
    "ProfileView": "calmnb.widgets",
    "Sampling": "calmnb.sampler",
    "Session": "calmnb.profile",
    "SessionRecorder": "calmnb.profile",
    "Token": "calmnb.generate",
    "compare": "calmnb.profile",
    "convert": "calmnb.convert",
    "demo_model": "calmnb.download",
    "download": "calmnb.download",
    "file_info": "calmnb.info",
    "load": "calmnb.model",
    "load_ipython_extension": "calmnb.magics",
    "measure_bandwidth": "calmnb.profile",
    "open_calm": "calmnb.checkpoint",
    "perplexity": "calmnb.perplexity",
    "profile": "calmnb.profile",
    "read_nsys": "calmnb.profile.nsys",
    "speed_of_light": "calmnb.profile",
}

__all__ = [
    "CalmFile",
    "CalmnbError",
    "ChatWidget",
    "CompareView",
    "Comparison",
    "Generation",
    "KernelTable",
    "Model",
    "ModelConfig",
    "ProfileView",
    "Sampling",
    "Session",
    "SessionRecorder",
    "Token",
    "compare",
    "convert",
    "demo_model",
    "download",
    "file_info",
    "load",
    "load_ipython_extension",
    "measure_bandwidth",
    "open_calm",
    "perplexity",
    "profile",
    "read_nsys",
    "speed_of_light",
]


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module("calmnb.plots")
    if name not in _HOME:
        raise AttributeError(f"module 'calmnb' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # wins over the submodule of the same name (convert, perplexity, profile)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
