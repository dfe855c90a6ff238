"""Lets a module stand for its main function.

Importing the submodule ``calmnb.convert`` binds that name in the package ``calmnb`` to the module, whatever the package
exported under it before. So that ``calmnb.convert(...)``, ``calmnb.perplexity(...)`` and ``calmnb.profile(...)`` always work,
those modules call themselves.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(module: str, function: str) -> None:
    """Make the module named `module` call its attribute `function`. For use at the module's end."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

    this = sys.modules[module]
    CallableModule.__doc__ = this.__doc__
    this.__class__ = CallableModule
