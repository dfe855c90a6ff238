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
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from datetime import datetime
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from calmnb.errors import TemplateError

__all__ = ["MAX_CHARS", "MAX_SECONDS", "compile_template", "render"]

#: Characters that any intermediate string and the result may have, on top of what is put in.
MAX_CHARS = 4_000_000
#: Seconds that rendering may take.
MAX_SECONDS = 1.5

#: Character comparisons that one search may need at worst: text times needle. str.rfind really takes so many.
_MAX_STEPS = 10**8
#: Digits of a number in a text, whatever its base; Python's own limit holds for some bases only.
_MAX_DIGITS = 4300
#: Entries of a dict that is made in one call: integers can be chosen so that all of them collide.
_MAX_ENTRIES = 2000

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


class _Raised(Exception):
    """The template called raise_exception."""


class _TooBig(Exception):
    """An operation would exceed MAX_CHARS."""


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
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)
    except _TimeUp:
        raise TemplateError(
            f"the chat template was still running after {max_seconds:g} s and was stopped: it loops. Use another one, or none"
        ) from None
    except _Raised as error:
        raise TemplateError(f"the chat template refuses these messages: {_shortened(error)}") from None
    except (_TooBig, MemoryError, OverflowError) as error:
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
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters |= {"tojson": _tojson, "sum": _sum, "join": _join_filter}
        for name, function in self.filters.items():
            self.filters[name] = _measured(function, name)
        tests: dict[str, Any] = self.tests
        for name, operation in _COMPARING_TESTS.items():
            tests[name] = partial(_compare, operation)
        for name in ("divisibleby", "even", "odd", "lower", "upper"):
            tests[name] = _checked_test(tests[name], numbers=name not in ("lower", "upper"))

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
        return _join("", map(_text_of, parts))

    @staticmethod
    def compare(left: Any, *rest: Any) -> Any:
        """``left op right op right ...`` as Python chains it, with Jinja's names of the operators."""
        result: Any = True
        for operation, right in zip(rest[::2], rest[1::2], strict=True):
            result = _compare(operation, left, right)
            if not result:
                break
            left = right
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Measure a key, then look it up."""
        return super().getitem(obj, _finalize(argument))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Measure an operation, then do it."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(b, int) and isinstance(a, Sequence):
                    # A list of big strings grows again when it is shown, so lists are held shorter.
                    _check_size(len(a) * max(b, 0) * (1 if isinstance(a, (str, bytes)) else 100))
            if integers:
                _check_size((left.bit_length() + right.bit_length()) * 1000)
        elif operator == "**":
            if integers:
                _check_size(left.bit_length() * max(right, 0) * 1000)
        elif operator == "+":
            if isinstance(left, Sequence) and isinstance(right, Sequence):
                _check_size(len(left) + len(right))
        elif integers:
            if operator != "-":
                _check_steps(left.bit_length() * right.bit_length() // 100)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent_format(left, right)
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
            _check_shown(*args, *given.values())
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        cost = _METHOD_COSTS.get(name)
        if (cost is not None and isinstance(owner, (str, bytes, int, type))) or __obj is dict:
            if args and (name in ("join", "fromkeys") or __obj is dict) and not isinstance(args[0], (Mapping, str, bytes)):
                args = (list(args[0]), *args[1:])
                _check_shown(args[0])
            (cost or _entries_cost)(owner, *args, **given)
        elif isinstance(owner, (Sequence, Set)) and name in ("index", "count", "isdisjoint"):
            _check_shown(owner)
        return _checked_result(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    """``str.format`` within bounds."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._size = len(format_string)
        return super().vformat(format_string, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_finalize(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise _TooBig("a format asks for a field that is wider than 9999 characters")
        text = super().format_field(_finalize(value), format_spec)
        self._size += len(text)
        _check_size(self._size)
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for text that is marked safe."""


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 1000 or re.search(r"%[^A-Za-z%]*\d{3}", form):
        raise _TooBig("strftime_now takes up to 1000 characters, without wide fields")
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int):
        _check_size(indent * 1000)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Only in pieces can be measured what is put between the values.
    return encoder.encode(value) if indent is None and separators is None else _join("", encoder.iterencode(value))


# --- the cost of an operation, before it is done ---------------------------------------------------------------------


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise _TooBig(f"it makes something larger than {MAX_CHARS:,} characters")


def _check_steps(steps: float) -> None:
    if steps > _MAX_STEPS:
        raise _TooBig("an operation takes too long; search for shorter texts and calculate with smaller numbers")


def _check_shown(*values: Any) -> int:
    """Characters that `values` have when shown, which bounds the work of comparing and hashing them too.

    A list that holds a list twice shows it twice, so the count doubles with each level: it stops at MAX_CHARS.
    """
    size, left = 0, list(values)
    while left:
        value = left.pop()
        inside: Iterable[Any] = ()
        if isinstance(value, (str, bytes)):
            size += len(value)
        elif isinstance(value, int):
            size += value.bit_length() // 3
        elif isinstance(value, Mapping):
            size += 4 * len(value)
            inside = (*value.keys(), *value.values())
        elif isinstance(value, (list, tuple, Set, ValuesView)):
            size += 2 * len(value)
            inside = value
        elif isinstance(value, Namespace):
            inside = (value._Namespace__attrs,)
        elif isinstance(value, MethodType):
            inside = (value.__self__,)
        size += 2
        _check_size(size)
        left.extend(inside)
    return size


_PLAIN = (str, bytes, int, float, type(None))


def _finalize(value: Any) -> Any:
    """`value`, which is about to be shown or hashed."""
    if not isinstance(value, _PLAIN):
        _check_shown(value)
    return value


def _text_of(value: Any) -> str:
    return str(_finalize(value))


def _checked_result(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        _check_size(len(value))
    return value


def _join(glue: str, parts: Iterable[str]) -> str:
    kept, size = [], 0
    for part in parts:
        size += len(part) + len(glue)
        _check_size(size)
        kept.append(part)
    return glue.join(kept)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le},
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
_COMPARING_TESTS = {
    **{"==": "eq", "eq": "eq", "equalto": "eq", "!=": "ne", "ne": "ne", "in": "in"},
    **{">": "gt", "gt": "gt", "greaterthan": "gt", ">=": "gteq", "ge": "gteq"},
    **{"<": "lt", "lt": "lt", "lessthan": "lt", "<=": "lteq", "le": "lteq"},
}


def _compare(operation: str, left: Any, right: Any) -> Any:
    if operation in ("in", "notin"):
        if isinstance(right, (str, bytes)):
            _search_cost(right, left)
        elif isinstance(right, Mapping):
            _finalize(left)
        else:
            _check_shown(left, right)
    elif not isinstance(left, _PLAIN) and not isinstance(right, _PLAIN):
        _check_shown(left, right)
    return _COMPARISONS[operation](left, right)


def _checked_test(function: Callable[..., Any], *, numbers: bool) -> Callable[..., Any]:
    """A test that takes numbers only, or shows what it is given."""

    def test(*values: Any) -> Any:
        if not numbers:
            _check_shown(*values)
        elif not all(isinstance(value, (int, float)) for value in values):
            raise TypeError("even, odd and divisibleby take numbers")
        else:
            _check_steps(sum(value.bit_length() for value in values if isinstance(value, int)) * 1000)
        return function(*values)

    return test


def _check_percent_format(form: str | bytes, values: Any) -> None:
    """A ``%`` format may not ask for wide fields."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    fields = text.count("%")
    _check_steps(fields * len(text))
    size = len(text) + _check_shown(values)
    for number in (number for match in _PERCENT_FIELD.finditer(text) for number in match.groups()):
        if number == "*" or len(number or "") > 4:
            raise _TooBig("a format asks for a field that is wider than 9999 characters, or takes its width from a value")
        size += int(number or 0)
    if isinstance(values, Mapping):
        size += fields * max(map(_check_shown, values.values()), default=0)
    _check_size(size)


def _search_cost(text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(sep, (str, bytes)):
        _check_steps((max(len(text) - len(sep), 0) + 1) * len(sep))


def _strip_cost(text: Any, chars: Any = None, *_: Any) -> None:
    if isinstance(chars, (str, bytes)):
        _check_steps(len(text) * len(chars))


def _replace_cost(text: Any, old: Any, new: Any, *_: Any) -> None:
    _search_cost(text, old)
    if isinstance(old, (str, bytes)) and isinstance(new, (str, bytes)):
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _width_cost(text: Any, width: Any, *_: Any) -> None:
    del text
    _check_size(width if isinstance(width, int) else 0)


def _expandtabs_cost(text: Any, tabsize: Any = 8) -> None:
    _check_size(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * (tabsize if isinstance(tabsize, int) else 8))


def _join_cost(glue: Any, parts: Any = ()) -> None:
    _check_size(sum(len(part) + len(glue) for part in parts if isinstance(part, (str, bytes))))


def _entries_cost(owner: object, entries: Any = (), *_: Any, **__: Any) -> None:
    del owner
    if not isinstance(entries, Mapping) and len(entries) > _MAX_ENTRIES:
        raise _TooBig(f"it makes a dict of more than {_MAX_ENTRIES} entries at once")


def _to_bytes_cost(number: object, length: Any = 1, *_: Any, **__: Any) -> None:
    del number
    _check_size(length if isinstance(length, int) else 0)


def _from_text_cost(owner: object, text: Any = (), *_: Any, **__: Any) -> None:
    del owner
    _number_cost(text)


def _number_cost(text: Any, *_: Any, **__: Any) -> None:
    if not isinstance(text, (int, float)) and hasattr(text, "__len__") and len(text) > _MAX_DIGITS:
        raise _TooBig(f"a number has more than {_MAX_DIGITS} digits")


def _codec_cost(text: object, encoding: str = "utf-8", *_: Any, **__: Any) -> None:
    del text
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8", "ascii", "latin-1"):
        raise SecurityError(f"the encoding {encoding[:50]!r}")


def _no_translate(*_: object) -> NoReturn:
    raise SecurityError("str.translate; use replace")


_METHOD_COSTS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("find", "rfind", "index", "rindex", "count", "split", "rsplit", "partition", "rpartition"), _search_cost),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip_cost),
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _width_cost),
    **dict.fromkeys(("encode", "decode"), _codec_cost),
    **dict.fromkeys(("from_bytes", "fromhex"), _from_text_cost),
    "expandtabs": _expandtabs_cost,
    "fromkeys": _entries_cost,
    "join": _join_cost,
    "replace": _replace_cost,
    "to_bytes": _to_bytes_cost,
    "translate": _no_translate,
}


def _filter_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _replace_cost(str(text), str(old), str(new))


def _filter_trim(text: Any, chars: Any = None) -> None:
    _strip_cost(str(text), chars)


def _filter_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    step = width if isinstance(width, int) else len(str(width))
    _check_size(len(str(text)) + (len(str(text).splitlines()) + 1) * step)


def _filter_format(form: Any, *values: Any, **kwargs: Any) -> None:
    _check_percent_format(str(form), kwargs or values)


def _filter_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"round takes a number, not a {type(value).__name__}")
    _check_size(abs(precision) * 10_000 if isinstance(precision, int) else 0)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter, one addition at a time."""
    total = start
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    for value in values:
        if isinstance(total, Sequence) and isinstance(value, Sequence):
            _check_size(len(total) + len(value))
        total = total + value
    return total


@jinja2.pass_environment
def _join_filter(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    """Jinja's filter, one text at a time."""
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return _join(str(d), map(_text_of, value))


_FILTER_COSTS: dict[str, Callable[..., None]] = {
    "replace": _filter_replace,
    "trim": _filter_trim,
    "indent": _filter_indent,
    "format": _filter_format,
    "round": _filter_round,
    "int": _number_cost,
    "float": _number_cost,
}
#: Filters that compare values with each other, inside C.
_COMPARING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
#: Filters that neither show nor compare what they filter. All others show it.
_PASSING_FILTERS = frozenset(
    {"attr", "count", "d", "default", "first", "items", "join", "last", "length", "list", "map", "reject", "rejectattr"}
    | {"reverse", "select", "selectattr", "sum"}
)


def _measured(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter `name`, after asking what it would cost."""
    passed = getattr(function, "jinja_pass_arg", None)
    cost = _FILTER_COSTS.get(name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        own, args = ((), args) if passed is None else (args[:1], args[1:])
        if name in _COMPARING_FILTERS and args and not isinstance(args[0], (Sequence, Mapping)):
            args = (list(args[0]), *args[1:])
        _check_shown(*(args[1:] if name in _PASSING_FILTERS else args), *kwargs.values())
        if cost is not None:
            cost(*args, **kwargs)
        return _checked_result(function(*own, *args, **kwargs))

    if passed is not None:
        measured.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return measured
