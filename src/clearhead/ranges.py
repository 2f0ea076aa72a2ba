"""Types of values with their ranges: one check of settings, configurations and records."""

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from clearhead.errors import ClearheadError, choose

_WIDEST = 2**63  # integers below it, and above its negative, fit every library below us


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have, and their description for people."""

    words: str
    holds: Callable[[Any], bool] = lambda number: True


Natural = Annotated[int, Range("a whole number of at least 0", lambda n: n >= 0)]
Count = Annotated[int, Range("a whole number of at least 1", lambda n: n >= 1)]
Length = Annotated[int, Range("a whole number of at least 2", lambda n: n >= 2)]
Positive = Annotated[float, Range("a number above 0", lambda x: x > 0)]
NotNegative = Annotated[float, Range("a number of at least 0", lambda x: x >= 0)]
Fraction = Annotated[float, Range("a fraction between 0 and 1", lambda x: 0 <= x <= 1)]
Part = Annotated[float, Range("a share between 0 and 1", lambda x: 0 < x < 1)]
Share = Annotated[float, Range("a number from 0 to below 1", lambda x: 0 <= x < 1)]
Temperature = Annotated[float, Range("0 or at least 0.0001", lambda x: x == 0 or x >= 1e-4)]
Betas = Annotated[
    tuple[float, float],
    Range("two numbers from 0 to below 1, such as 0.9 0.95", lambda x: 0 <= x < 1),
]
_WORDS = {
    int: "a whole number of at most 18 digits",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
    list: "a list",
}


def check(settings: Any, place: str = "") -> None:
    """Refuse a value of a dataclass, or of one within, that its field's type does not allow.
    Numbers without a `Range` must fit 64 bits and be finite."""
    kind: Any = type(settings)
    for name, hint, usual in _fields(kind):
        value = getattr(settings, name)
        if is_dataclass(value):
            check(value, f"{place}{name}.")
        elif value is not usual:
            check_value(f"{place}{name}", value, hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that its hint, a type with a range or a Literal, does not allow."""
    if _fits(value, hint):
        return
    items = value if isinstance(value, tuple | list) else (value,)
    literals = (one for one in (hint, *get_args(hint)) if get_origin(one) is Literal)
    if words := [word for one in literals for word in get_args(one)]:
        for word in (one for one in items if isinstance(one, str)):
            choose(name, word, words)
    wide = any(isinstance(one, int) and abs(one) >= _WIDEST for one in items)
    wanted = _WORDS[int] if wide else _wanted(hint)
    raise ClearheadError(f"{name} is {reprlib.repr(value)}: give {wanted}")


def check_distinct(settings: Any, *names: str) -> None:
    """Refuse lists that are empty, or hold something twice."""
    for name in names:
        values = getattr(settings, name)
        if not values or len(set(values)) != len(values):
            found = " ".join(map(str, values)) or "none"
            raise ClearheadError(f"{name} must be one or more, each once; found {found}")


@cache
def _fields(settings: Any) -> list[tuple[str, Any, Any]]:
    """Name, hint and default of each field."""
    hints = get_type_hints(settings, include_extras=True)
    return [(field.name, hints[field.name], field.default) for field in fields(settings)]


def _fits(value: Any, hint: Any, within: Callable[[Any], bool] = lambda number: True) -> bool:
    kind, kinds = get_origin(hint), get_args(hint)
    if kind is Annotated:
        ranges = [one.holds for one in hint.__metadata__ if isinstance(one, Range)]
        return _fits(value, kinds[0], ranges[0] if ranges else within)
    if kind is Literal:
        return value in kinds
    if kind in (Union, UnionType):
        return any(_fits(value, one, within) for one in kinds)
    if kind is tuple:
        if not isinstance(value, tuple | list):
            return False
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return len(value) == len(kinds) and all(map(_fits, value, kinds, [within] * len(kinds)))
    if kind is dict:
        return isinstance(value, dict) and all(_fits(x, kinds[1], within) for x in value.values())
    if kind is list or hint in (bool, str, NoneType):
        return isinstance(value, kind or hint)
    if hint not in (int, float):
        return True
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        return False
    finite = abs(value) < _WIDEST if isinstance(value, int) else math.isfinite(value)
    return finite and within(value)


def _wanted(hint: Any) -> str:
    """The words of the first range in a hint, or of its types."""
    kind, kinds = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        ranges = [one.words for one in hint.__metadata__ if isinstance(one, Range)]
        return ranges[0] if ranges else _wanted(kinds[0])
    if kind is Literal:
        return f"one of {', '.join(map(str, kinds))}"
    return _WORDS.get(kind) or " or ".join(filter(None, dict.fromkeys(map(_wanted, kinds))))
