"""Rendering a template that a stranger wrote: no reach into Python, bounded time, bounded memory.

Chat templates are programs that come with a model file. Jinja's immutable sandbox keeps them from Python's internals and
from changing what they are given, but not from running for ever or filling memory. Two more fences:

* *time*: a watchdog thread raises an exception in the rendering thread at its next byte-code instruction. That works off
  the main thread, needs no signal and no trace function, and costs nothing while rendering;
* *size*: single operations that could take long or grow huge inside C, where no exception can land (``"a" * 10**9``,
  ``10**10**10``, a replace, join or format with a huge width), are measured before they are done. ``range`` is limited
  by the sandbox itself. Filters with unbounded cost that chat templates do not use are left out.

This stops mistakes and simple malice. It shares the process's memory, so it is no wall against a patient attacker.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from calmnb.errors import TemplateError

__all__ = ["MAX_CHARS", "MAX_SECONDS", "compile_template", "render"]

#: Characters that any intermediate string and the result may have, on top of what is put in.
MAX_CHARS = 4_000_000
#: Seconds that rendering may take.
MAX_SECONDS = 1.5

_DROPPED_FILTERS = (
    "center",
    "filesizeformat",
    "pprint",
    "random",
    "striptags",
    "urlize",
    "wordwrap",
    "xmlattr",
    "batch",
    "slice",
)
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")
_BRACE_FIELD = re.compile(r"\{[^{}:]*:((?:[^{}]|\{[^{}]*\})*)\}")


class _Raised(Exception):
    """The template called raise_exception."""


class _TooBig(Exception):
    """An operation would exceed MAX_CHARS."""


class _TimeUp(BaseException):
    """Not an Exception, so that no ``except Exception`` on the way can swallow it."""


def compile_template(source: str) -> jinja2.Template:
    """Compile the source of a chat template.

    Raises
    ------
    TemplateError
        If it is not valid Jinja.
    """
    try:
        with _Deadline(MAX_SECONDS):
            return _Environment().from_string(source)
    except _TimeUp:
        raise TemplateError(
            f"the chat template took more than {MAX_SECONDS:g} s to compile; it is not a chat template"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise TemplateError("the chat template is nested too deeply") from None


def render(template: jinja2.Template, variables: Mapping[str, Any], *, max_seconds: float = MAX_SECONDS) -> str:
    """Render within the bounds.

    Raises
    ------
    TemplateError
        With the template's own message where it calls ``raise_exception``; otherwise saying which bound it met.
    """
    try:
        with _Deadline(max_seconds):
            pieces, size = [], 0
            for piece in template.generate(**variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)
    except _TimeUp:
        raise TemplateError(
            f"the chat template was still running after {max_seconds:g} s and was stopped: it loops. Use another one, or none"
        ) from None
    except _Raised as error:
        raise TemplateError(f"the chat template refuses these messages: {error}") from None
    except (_TooBig, MemoryError, OverflowError) as error:
        raise TemplateError(f"the chat template was stopped: {error or 'out of memory'}") from None
    except SecurityError as error:
        raise TemplateError(f"the chat template reaches for what it may not touch: {error}") from None
    except RecursionError:
        raise TemplateError("the chat template was stopped: it calls itself without end") from None
    except Exception as error:  # whatever a template does wrong is the template's mistake
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from None


class _Deadline:
    """Raise `_TimeUp` in the current thread if the block takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._strike)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._done = False
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        # After this no strike can come; one that came but has not landed is taken back.
        with self._lock:
            self._done = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
        self._timer.cancel()

    def _strike(self) -> None:
        with self._lock:
            if not self._done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_TimeUp))


# --- the environment -------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's part for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Sends ``a ~ b`` through a function that can measure it."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        """Write a call of `_Environment.join_values`."""
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """What Hugging Face chat templates expect, within bounds."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        self.filters["sum"] = _sum
        for name, cost in _FILTER_COSTS.items():
            self.filters[name] = _measured(self.filters[name], cost)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once; Jinja would let a template print such an attribute as nothing."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join rendered pieces; Jinja calls it for macros and ``{% set %}`` blocks."""
        return _join("", parts)

    @staticmethod
    def join_values(parts: Iterable[Any]) -> str:
        """Join values as the ``~`` operator does."""
        return _join("", map(str, parts))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Measure an operation, then do it."""
        if operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(b, int) and isinstance(a, Sequence):
                    # A list of big strings grows again when it is shown, so lists are held shorter.
                    _check_size(len(a) * max(b, 0) * (1 if isinstance(a, (str, bytes)) else 100))
            if isinstance(left, int) and isinstance(right, int):
                _check_size((left.bit_length() + right.bit_length()) * 1000)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * max(right, 0) * 1000)
        elif operator == "+":
            if isinstance(left, Sequence) and isinstance(right, Sequence):
                _check_size(len(left) + len(right))
        elif isinstance(left, str):
            _check_percent_format(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the widths of a ``str.format``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_brace_format(str(value.__self__))
        return wrapped

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure string methods, then call."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            cost = _METHOD_COSTS.get(getattr(__obj, "__name__", ""))
            if cost is not None:
                args, kwargs = cost(owner, *args, *kwargs.values()), {}
        return super().call(__context, __obj, *args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int):
        _check_size(indent * 1000)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- the cost of an operation, before it is done ---------------------------------------------------------------------


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise _TooBig(f"it makes something larger than {MAX_CHARS:,} characters")


def _join(glue: str, parts: Iterable[str]) -> str:
    kept, size = [], 0
    for part in parts:
        size += len(part) + len(glue)
        _check_size(size)
        kept.append(part)
    return glue.join(kept)


def _check_percent_format(form: str) -> None:
    """A ``%`` format may not ask for wide fields."""
    for number in (number for match in _PERCENT_FIELD.finditer(form) for number in match.groups()):
        if number == "*" or len(number or "") > 4:
            raise _TooBig("a format asks for a field that is wider than 9999 characters, or takes its width from a value")


def _check_brace_format(form: str) -> None:
    """``str.format`` neither."""
    for spec in _BRACE_FIELD.findall(form):
        if "{" in spec or re.search(r"\d{5}", spec):
            raise _TooBig("a format asks for a field that is wider than 9999 characters, or takes its width from a value")


def _replace_cost(text: str, old: Any, new: Any, *rest: Any) -> tuple[Any, ...]:
    _check_size(len(text) + (text.count(str(old)) if old else len(text) + 1) * len(str(new)))
    return (old, new, *rest)


def _width_cost(text: str, width: Any, *rest: Any) -> tuple[Any, ...]:
    del text
    _check_size(width if isinstance(width, int) else 0)
    return (width, *rest)


def _expandtabs_cost(text: str, width: Any = 8, *rest: Any) -> tuple[Any, ...]:
    _check_size(len(text) + text.count("\t") * (width if isinstance(width, int) else 8))
    return (width, *rest)


def _join_cost(glue: str, parts: Any = (), *rest: Any) -> tuple[Any, ...]:
    kept = list(parts)
    _check_size(sum(len(part) + len(glue) for part in kept if isinstance(part, str)))
    return (kept, *rest)


def _to_bytes_cost(number: int, length: Any = 1, *rest: Any) -> tuple[Any, ...]:
    del number
    _check_size(length if isinstance(length, int) else 0)
    return (length, *rest)


_METHOD_COSTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "replace": _replace_cost,
    "ljust": _width_cost,
    "rjust": _width_cost,
    "center": _width_cost,
    "zfill": _width_cost,
    "expandtabs": _expandtabs_cost,
    "join": _join_cost,
    "to_bytes": _to_bytes_cost,
}


def _filter_replace(text: Any, old: Any = "", new: Any = "", *rest: Any) -> None:
    _replace_cost(str(text), old, new, *rest)


def _filter_indent(text: Any, width: Any = 4, *rest: Any, **kwargs: Any) -> None:
    del rest
    width = kwargs.get("width", width)
    step = width if isinstance(width, int) else len(str(width))
    _check_size(len(str(text)) + (str(text).count("\n") + 1) * step)


def _filter_format(form: Any, *values: Any, **kwargs: Any) -> None:
    del values, kwargs
    _check_percent_format(str(form))


def _filter_join(parts: Any, glue: Any = "", attribute: Any = None, **kwargs: Any) -> None:
    glue = kwargs.get("d", glue)
    if isinstance(parts, Sequence):  # what is lazy was made in Python, where the watchdog reaches
        _check_size(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(parts) * len(str(glue)))


def _filter_round(value: Any, precision: Any = 0, *rest: Any, **kwargs: Any) -> None:
    del value, rest
    precision = kwargs.get("precision", precision)
    _check_size(abs(precision) * 10_000 if isinstance(precision, int) else 0)


def _sum(values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter, one addition at a time."""
    total = start
    for value in values:
        if attribute is not None:
            value = value[attribute]
        if isinstance(total, Sequence) and isinstance(value, Sequence):
            _check_size(len(total) + len(value))
        total = total + value
    return total


_FILTER_COSTS: dict[str, Callable[..., None]] = {
    "replace": _filter_replace,
    "indent": _filter_indent,
    "format": _filter_format,
    "join": _filter_join,
    "round": _filter_round,
}


def _measured(function: Callable[..., Any], cost: Callable[..., None]) -> Callable[..., Any]:
    """`function`, after asking what it would cost."""
    passed = getattr(function, "jinja_pass_arg", None)

    def measured(*args: Any, **kwargs: Any) -> Any:
        cost(*(args if passed is None else args[1:]), **kwargs)
        return function(*args, **kwargs)

    if passed is not None:
        measured.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return measured
