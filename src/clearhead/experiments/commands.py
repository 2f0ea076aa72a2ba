"""Settings as the words of a command line."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import chain
from typing import Any, get_args, get_type_hints

from tyro.conf import Positional

_POSITIONAL = get_args(Positional[int])[1]


def words_of(settings: Any, usual: Any = None, place: str = "") -> dict[str, list[str]]:
    """The words that make `settings`, by option; first the positional ones, by name.

    Args:
        usual: settings of the same class, which need no word; the defaults of its fields where
            they are not given.
        place: before the names of a nested setting.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    positional, found = dict[str, list[str]](), dict[str, list[str]]()
    for field in fields(settings):
        value = getattr(settings, field.name)
        other = _default(field) if usual is None else getattr(usual, field.name)
        if value == other:
            continue
        marks = getattr(hints[field.name], "__metadata__", ())
        called = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name)
        called = called.replace("_", "-")
        option = f"--{place}{called}"
        if is_dataclass(value):
            found |= words_of(value, other, f"{place}{called}.")
        elif isinstance(value, bool):
            found[option] = [option if value else f"--{place}no-{called}"]
        elif _POSITIONAL in marks:
            positional[called] = texts(value)
        elif field.name == "rates":  # read as KEY VALUE, where other mappings are KEY=VALUE
            found[option] = [option, *map(str, chain.from_iterable(value.items()))]
        else:
            found[option] = [option, *texts(value)]
    return positional | found


def texts(value: Any) -> list[str]:
    """The words of a value: several for those that hold several."""
    if isinstance(value, Mapping):
        return [f"{key}={_paired(one)}" for key, one in value.items()]
    return [str(one) for one in (value if isinstance(value, tuple) else (value,))]


def _paired(value: Any) -> str:
    """The value of KEY=VALUE: text as it is where it is read as text, and else JSON."""
    if isinstance(value, tuple):
        plain = all(isinstance(one, str) and _is_text(one) and "," not in one for one in value)
        return ",".join(value) if plain else json.dumps(list(value))[1:-1]
    return value if isinstance(value, str) and _is_text(value) else json.dumps(value)


def _is_text(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return True
    return False


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
