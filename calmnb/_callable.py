"""Lets a module stand for its main function.

Importing a submodule binds its name in the package to the module, whatever the package exported under that name before. So
that ``calmnb.convert(...)``, ``calmnb.perplexity(...)`` and ``calmnb.profile(...)`` always work, those modules call themselves.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(module: str, function: str, *, keep: tuple[str, ...] = ()) -> None:
    """Make the module named `module` call its attribute `function`. For use at the module's end.

    Parameters
    ----------
    module, function
        Names.
    keep
        Functions of a package that are named like the submodules they live in: importing those leaves the names alone, so
        that the package's own ``__getattr__`` goes on answering with the function.
    """

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in keep and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    this = sys.modules[module]
    CallableModule.__doc__ = this.__doc__
    this.__class__ = CallableModule
