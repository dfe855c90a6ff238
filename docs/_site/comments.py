"""Griffe extension: the ``#:`` comments above a constant are its documentation."""

from __future__ import annotations

import ast
from typing import Any

import griffe

__all__ = ["CommentDocstrings"]


class CommentDocstrings(griffe.Extension):
    """Gives attributes without a docstring the ``#:`` lines above them."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment above `attr`, if it has one."""
        if attr.docstring is not None or not isinstance(node, ast.stmt):
            return
        source = attr.module.filepath
        if isinstance(source, list):
            return
        lines = source.read_text(encoding="utf-8").splitlines()
        text: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            text.insert(0, line.strip().removeprefix("#:").strip())
        if text:
            attr.docstring = griffe.Docstring("\n".join(text), lineno=node.lineno - len(text), parent=attr)
