"""Griffe extensions: ``#:`` comments are documentation, and names of calmnb's in docstrings are links."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))

from api_reference import documented_as

__all__ = ["CommentDocstrings", "LinkedNames"]

_NAME = re.compile(r"(?<![`\w\[])`(calmnb(?:\.\w+)+)`(?!`)")


class CommentDocstrings(griffe.Extension):
    """Gives attributes without a docstring the ``#:`` lines above them."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment above `attr`, if it has one."""
        source = attr.module.filepath
        if attr.docstring is not None or not isinstance(node, ast.stmt) or isinstance(source, list):
            return
        text: list[str] = []
        for line in reversed(_lines(source)[: node.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            text.insert(0, line.strip().removeprefix("#:").strip())
        if text:
            attr.docstring = griffe.Docstring("\n".join(text), lineno=node.lineno - len(text), parent=attr)


class LinkedNames(griffe.Extension):
    """Turns `calmnb.load` in a docstring into a link where the site documents that name."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Link the names in the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_linked, obj.docstring.value)


def _linked(match: re.Match[str]) -> str:
    target = documented_as(match[1])
    return f"[`{match[1]}`][{target}]" if target else match[0]


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
