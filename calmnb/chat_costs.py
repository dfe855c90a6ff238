"""What an operation of a template costs, found before it is done: sizes of results, steps of searches, digits of numbers.

`calmnb.chat_sandbox` asks here. An operation that costs too much raises `TooBig`, which says why.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from types import MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.filters
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = [
    "COMPARING_TESTS",
    "MAX_CHARS",
    "METHOD_COSTS",
    "TooBig",
    "check_percent_format",
    "check_shown",
    "check_size",
    "check_steps",
    "checked_result",
    "checked_test",
    "compare_values",
    "entries_cost",
    "finalize",
    "join_filter",
    "join_texts",
    "measured_filter",
    "sum_values",
    "text_of",
]

#: Characters that any intermediate string and the result may have, on top of what is put in.
MAX_CHARS = 4_000_000

#: Character comparisons that one search may need at worst: text times needle. str.rfind really takes so many.
_MAX_STEPS = 10**8
#: Digits of a number in a text, whatever its base; Python's own limit holds for some bases only.
_MAX_DIGITS = 4300
#: Entries of a dict that is made in one call: integers can be chosen so that all of them collide.
_MAX_ENTRIES = 2000

_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


class TooBig(Exception):
    """An operation would exceed MAX_CHARS."""


def check_size(size: float) -> None:
    """Refuse a result of so many characters."""
    if size > MAX_CHARS:
        raise TooBig(f"it makes something larger than {MAX_CHARS:,} characters")


def check_steps(steps: float) -> None:
    """Refuse an operation of so many steps."""
    if steps > _MAX_STEPS:
        raise TooBig("an operation takes too long; search for shorter texts and calculate with smaller numbers")


def check_shown(*values: Any) -> int:
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
        check_size(size)
        left.extend(inside)
    return size


_PLAIN = (str, bytes, int, float, type(None))


def finalize(value: Any) -> Any:
    """`value`, which is about to be shown or hashed."""
    if not isinstance(value, _PLAIN):
        check_shown(value)
    return value


def text_of(value: Any) -> str:
    """What a value looks like in the output."""
    return str(finalize(value))


def checked_result(value: Any) -> Any:
    """`value`, unless it is too large to go on with."""
    if isinstance(value, (str, bytes)):
        check_size(len(value))
    return value


def join_texts(glue: str, parts: Iterable[str]) -> str:
    """``glue.join(parts)``, measured as it grows."""
    kept, size = [], 0
    for part in parts:
        size += len(part) + len(glue)
        check_size(size)
        kept.append(part)
    return glue.join(kept)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le},
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
COMPARING_TESTS = {
    **{"==": "eq", "eq": "eq", "equalto": "eq", "!=": "ne", "ne": "ne", "in": "in"},
    **{">": "gt", "gt": "gt", "greaterthan": "gt", ">=": "gteq", "ge": "gteq"},
    **{"<": "lt", "lt": "lt", "lessthan": "lt", "<=": "lteq", "le": "lteq"},
}


def compare_values(operation: str, left: Any, right: Any) -> Any:
    """One comparison of a template, measured before it is made."""
    if operation in ("in", "notin"):
        if isinstance(right, (str, bytes)):
            _search_cost(right, left)
        elif isinstance(right, Mapping):
            finalize(left)
        else:
            check_shown(left, right)
    elif not isinstance(left, _PLAIN) and not isinstance(right, _PLAIN):
        check_shown(left, right)
    return _COMPARISONS[operation](left, right)


def checked_test(function: Callable[..., Any], *, numbers: bool) -> Callable[..., Any]:
    """A test that takes numbers only, or shows what it is given."""

    def test(*values: Any) -> Any:
        if not numbers:
            check_shown(*values)
        elif not all(isinstance(value, (int, float)) for value in values):
            raise TypeError("even, odd and divisibleby take numbers")
        else:
            check_steps(sum(value.bit_length() for value in values if isinstance(value, int)) * 1000)
        return function(*values)

    return test


def check_percent_format(form: str | bytes, values: Any) -> None:
    """A ``%`` format may not ask for wide fields."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    fields = text.count("%")
    check_steps(fields * len(text))
    size = len(text) + check_shown(values)
    for number in (number for match in _PERCENT_FIELD.finditer(text) for number in match.groups()):
        if number == "*" or len(number or "") > 4:
            raise TooBig("a format asks for a field that is wider than 9999 characters, or takes its width from a value")
        size += int(number or 0)
    if isinstance(values, Mapping):
        size += fields * max(map(check_shown, values.values()), default=0)
    check_size(size)


def _search_cost(text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(sep, (str, bytes)):
        check_steps((max(len(text) - len(sep), 0) + 1) * len(sep))


def _strip_cost(text: Any, chars: Any = None, *_: Any) -> None:
    if isinstance(chars, (str, bytes)):
        check_steps(len(text) * len(chars))


def _replace_cost(text: Any, old: Any, new: Any, *_: Any) -> None:
    _search_cost(text, old)
    if isinstance(old, (str, bytes)) and isinstance(new, (str, bytes)):
        check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _width_cost(text: Any, width: Any, *_: Any) -> None:
    del text
    check_size(width if isinstance(width, int) else 0)


def _expandtabs_cost(text: Any, tabsize: Any = 8) -> None:
    check_size(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * (tabsize if isinstance(tabsize, int) else 8))


def _join_cost(glue: Any, parts: Any = ()) -> None:
    check_size(sum(len(part) + len(glue) for part in parts if isinstance(part, (str, bytes))))


def entries_cost(owner: object, entries: Any = (), *_: Any, **__: Any) -> None:
    """Refuse a dict with so many entries that all may collide."""
    del owner
    if not isinstance(entries, Mapping) and len(entries) > _MAX_ENTRIES:
        raise TooBig(f"it makes a dict of more than {_MAX_ENTRIES} entries at once")


def _to_bytes_cost(number: object, length: Any = 1, *_: Any, **__: Any) -> None:
    del number
    check_size(length if isinstance(length, int) else 0)


def _from_text_cost(owner: object, text: Any = (), *_: Any, **__: Any) -> None:
    del owner
    _number_cost(text)


def _number_cost(text: Any, *_: Any, **__: Any) -> None:
    if not isinstance(text, (int, float)) and hasattr(text, "__len__") and len(text) > _MAX_DIGITS:
        raise TooBig(f"a number has more than {_MAX_DIGITS} digits")


def _codec_cost(text: object, encoding: str = "utf-8", *_: Any, **__: Any) -> None:
    del text
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8", "ascii", "latin-1"):
        raise SecurityError(f"the encoding {encoding[:50]!r}")


def _no_translate(*_: object) -> NoReturn:
    raise SecurityError("str.translate; use replace")


METHOD_COSTS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("find", "rfind", "index", "rindex", "count", "split", "rsplit", "partition", "rpartition"), _search_cost),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip_cost),
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _width_cost),
    **dict.fromkeys(("encode", "decode"), _codec_cost),
    **dict.fromkeys(("from_bytes", "fromhex"), _from_text_cost),
    "expandtabs": _expandtabs_cost,
    "fromkeys": entries_cost,
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
    check_size(len(str(text)) + (len(str(text).splitlines()) + 1) * step)


def _filter_format(form: Any, *values: Any, **kwargs: Any) -> None:
    check_percent_format(str(form), kwargs or values)


def _filter_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"round takes a number, not a {type(value).__name__}")
    check_size(abs(precision) * 10_000 if isinstance(precision, int) else 0)


@jinja2.pass_environment
def sum_values(
    environment: jinja2.Environment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's filter, one addition at a time."""
    total = start
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    for value in values:
        if isinstance(total, Sequence) and isinstance(value, Sequence):
            check_size(len(total) + len(value))
        total = total + value
    return total


@jinja2.pass_environment
def join_filter(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    """Jinja's filter, one text at a time."""
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return join_texts(str(d), map(text_of, value))


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


def measured_filter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter `name`, after asking what it would cost."""
    passed = getattr(function, "jinja_pass_arg", None)
    cost = _FILTER_COSTS.get(name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        own, args = ((), args) if passed is None else (args[:1], args[1:])
        if name in _COMPARING_FILTERS and args and not isinstance(args[0], (Sequence, Mapping)):
            args = (list(args[0]), *args[1:])
        check_shown(*(args[1:] if name in _PASSING_FILTERS else args), *kwargs.values())
        if cost is not None:
            cost(*args, **kwargs)
        return checked_result(function(*own, *args, **kwargs))

    if passed is not None:
        measured.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return measured
