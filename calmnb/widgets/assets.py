"""The browser half of a widget: files in ``static/``, joined into the one module that anywidget wants.

Each file is a plain ES module. Joining drops their imports of one another and their exports of helpers, so that no
bundler is needed, nothing is built, and nothing is fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["bundle", "static_text"]

_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[\w.-]+";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const)", re.MULTILINE)


def static_text(name: str) -> str:
    """Text of a file in ``static/``."""
    return (_STATIC / name).read_text(encoding="utf-8")


def bundle(*names: str) -> str:
    """Join modules, in order of dependence, into one; the last keeps its default export."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", static_text(name))) for name in names)
