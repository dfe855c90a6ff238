"""Rendering a template that a stranger wrote: no reach into Python, bounded time, bounded memory.

Chat templates are programs that come with a model file. Jinja's immutable sandbox keeps them from Python's internals and
from changing what they are given, but not from running for ever or filling memory. Two more fences:

* *time*: a watchdog thread raises an exception in the rendering thread at its next byte-code instruction. That works off
  the main thread, needs no signal and no trace function, and costs nothing while rendering;
* *size*: single operations that could take long or grow huge inside C, where no exception can land (``"a" * 10**9``,
  ``10**10**10``, a search for a long text in a long one, a list that doubles itself and is shown), are measured before
  they are done. ``range`` is limited by the sandbox itself. Filters with unbounded cost that chat templates do not use
  are left out. Nothing is folded at compile time, so that every operation passes here.

This stops mistakes and simple malice. It shares the process's memory, so it is no wall against a patient attacker.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from calmnb.chat_costs import (
    COMPARING_TESTS,
    MAX_CHARS,
    METHOD_COSTS,
    TooBig,
    check_percent_format,
    check_shown,
    check_size,
    check_steps,
    checked_result,
    checked_test,
    compare_values,
    entries_cost,
    finalize,
    join_filter,
    join_texts,
    measured_filter,
    sum_values,
    text_of,
)
from calmnb.errors import TemplateError

__all__ = ["MAX_CHARS", "MAX_SECONDS", "compile_template", "render"]

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


class _Raised(Exception):
    """The template called raise_exception."""


class _TimeUp(BaseException):
    """Not an Exception, so that no ``except Exception`` on the way can swallow it."""


def compile_template(source: object) -> jinja2.Template:
    """Compile the source of a chat template.

    Raises
    ------
    TemplateError
        If it is not text, not valid Jinja, or more than Python can compile.
    """
    if not isinstance(source, str):
        raise TemplateError(
            f"the chat template is a {type(source).__name__}; accepted is Jinja source as text. Correct chat_template in the "
            "model's files and convert again"
        )
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
    except Exception as error:  # Jinja writes Python, and Python has limits of its own
        raise TemplateError(
            f"the chat template cannot be compiled: {type(error).__name__}: {_shortened(error)}; nest fewer blocks, write "
            "shorter numbers and name no argument twice"
        ) from None


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
                check_size(size)
                pieces.append(piece)
            return "".join(pieces)
    except _TimeUp:
        raise TemplateError(
            f"the chat template was still running after {max_seconds:g} s and was stopped: it loops. Use another one, or none"
        ) from None
    except _Raised as error:
        raise TemplateError(f"the chat template refuses these messages: {_shortened(error)}") from None
    except (TooBig, MemoryError, OverflowError) as error:
        raise TemplateError(f"the chat template was stopped: {error or 'out of memory'}") from None
    except SecurityError as error:
        raise TemplateError(f"the chat template reaches for what it may not touch: {error}") from None
    except RecursionError:
        raise TemplateError("the chat template was stopped: it calls itself without end") from None
    except Exception as error:  # whatever a template does wrong is the template's mistake
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {_shortened(error)}") from None


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 1000 else text[:1000] + "..."


class _Deadline:
    """Raise `_TimeUp` in the current thread if the block takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._strike)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._done = self._struck = False
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        # After this no strike can come; one that came but has not landed is taken back.
        with self._lock:
            self._done = True
            if self._struck:  # only then: in CPython 3.11 taking nothing back leaves the interpreter waiting for it
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
        self._timer.cancel()

    def _strike(self) -> None:
        with self._lock:
            if not self._done:
                self._struck = True
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
    """Sends what could be expensive through functions that can measure it, and folds no constants."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        """Write a call of `_Environment.join_values`."""
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:
        """Write a call of `_Environment.compare`."""
        self.write("environment.compare(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:
        """Write a dict whose keys are measured: the hash of a nested tuple is computed again each time."""
        self.write("{")
        for item in node.items:
            self.write("environment.finalize(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """What Hugging Face chat templates expect, within bounds."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "-", "*", "**", "//", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters |= {"tojson": _tojson, "sum": sum_values, "join": join_filter}
        for name, function in self.filters.items():
            self.filters[name] = measured_filter(function, name)
        tests: dict[str, Any] = self.tests
        for name, operation in COMPARING_TESTS.items():
            tests[name] = partial(compare_values, operation)
        for name in ("divisibleby", "even", "odd", "lower", "upper"):
            tests[name] = checked_test(tests[name], numbers=name not in ("lower", "upper"))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once; Jinja would let a template print such an attribute as nothing."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join rendered pieces; Jinja calls it for macros and ``{% set %}`` blocks."""
        return join_texts("", parts)

    @staticmethod
    def join_values(parts: Iterable[Any]) -> str:
        """Join values as the ``~`` operator does."""
        return join_texts("", map(text_of, parts))

    @staticmethod
    def compare(left: Any, *rest: Any) -> Any:
        """``left op right op right ...`` as Python chains it, with Jinja's names of the operators."""
        result: Any = True
        for operation, right in zip(rest[::2], rest[1::2], strict=True):
            result = compare_values(operation, left, right)
            if not result:
                break
            left = right
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Measure a key, then look it up."""
        return super().getitem(obj, finalize(argument))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Measure an operation, then do it."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(b, int) and isinstance(a, Sequence):
                    # A list of big strings grows again when it is shown, so lists are held shorter.
                    check_size(len(a) * max(b, 0) * (1 if isinstance(a, (str, bytes)) else 100))
            if integers:
                check_size((left.bit_length() + right.bit_length()) * 1000)
        elif operator == "**":
            if integers:
                check_size(left.bit_length() * max(right, 0) * 1000)
        elif operator == "+":
            if isinstance(left, Sequence) and isinstance(right, Sequence):
                check_size(len(left) + len(right))
        elif integers:
            if operator != "-":
                check_steps(left.bit_length() * right.bit_length() // 100)
        elif operator == "%" and isinstance(left, (str, bytes)):
            check_percent_format(left, right)
        elif operator == "-" and isinstance(left, Set):
            raise TypeError("sets cannot be subtracted")  # the result has methods that hash what is chosen to collide
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Measure the fields of a ``str.format``."""
        if super().wrap_str_format(value) is None:
            return None
        form: str = value.__self__

        def wrapper(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            formatter = _EscapeFormatter(self, escape=form.escape) if isinstance(form, Markup) else _Formatter(self)
            return type(form)(formatter.vformat(form, args, kwargs))

        return wrapper

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure methods and what is given to functions, then call."""
        if isinstance(__obj, jinja2.runtime.Macro):
            return super().call(__context, __obj, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}  # Jinja's own
        if args or given:
            check_shown(*args, *given.values())
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        cost = METHOD_COSTS.get(name)
        if (cost is not None and isinstance(owner, (str, bytes, int, type))) or __obj is dict:
            if args and (name in ("join", "fromkeys") or __obj is dict) and not isinstance(args[0], (Mapping, str, bytes)):
                args = (list(args[0]), *args[1:])
                check_shown(args[0])
            (cost or entries_cost)(owner, *args, **given)
        elif isinstance(owner, (Sequence, Set)) and name in ("index", "count", "isdisjoint"):
            check_shown(owner)
        return checked_result(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    """``str.format`` within bounds."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._size = len(format_string)
        return super().vformat(format_string, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(finalize(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise TooBig("a format asks for a field that is wider than 9999 characters")
        text = super().format_field(finalize(value), format_spec)
        self._size += len(text)
        check_size(self._size)
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for text that is marked safe."""


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 1000 or re.search(r"%[^A-Za-z%]*\d{3}", form):
        raise TooBig("strftime_now takes up to 1000 characters, without wide fields")
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int):
        check_size(indent * 1000)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Only in pieces can be measured what is put between the values.
    return encoder.encode(value) if indent is None and separators is None else join_texts("", encoder.iterencode(value))
