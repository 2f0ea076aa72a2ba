"""Arguments that verbs share: KEY=VALUE words, and consent to code that a model brings."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class OpensModels:
    """The option of every verb that opens a model."""

    trust_remote_code: bool = False
    """Run Python code that the model's folder or repository brings. Read it first."""

    def given(self, *names: str) -> list[str]:
        """The options among `names` that are not at their defaults, as "--option" words."""
        defaults = type(self)
        return [
            f"--{name.replace('_', '-')}"
            for name in names
            if getattr(self, name) != getattr(defaults, name)
        ]


def pairs(words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as {KEY: VALUE}.

    Raises:
        ClearheadError: a word of another form, or a key given twice.
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise ClearheadError(f"{word!r} is not KEY=VALUE: for example maps=differential")
        if key in values:
            raise ClearheadError(f"{key} is given twice: {values[key]} and {value}")
        values[key] = value
    return values


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words for a configuration; a value is JSON, or else plain text."""
    return {key: value_of(text) for key, text in pairs(words).items()}


def value_of(text: str) -> Any:
    """A value that is JSON, or else plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def variations(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """KEY=VALUE,VALUE… words; each value is JSON, or else plain text."""
    varied: dict[str, tuple[Any, ...]] = {}
    for key, text in pairs(words).items():
        try:
            varied[key] = tuple(json.loads(f"[{text}]"))  # whose own commas separate nothing
        except (ValueError, RecursionError):
            varied[key] = tuple(map(value_of, text.split(",")))
    return varied


def _words(read: Callable[[Sequence[str]], dict[str, Any]], metavar: str) -> Any:
    """A field for tyro that `read` parses."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda found: [f"{key}={value}" for key, value in found.items()],
    )


Overrides = Annotated[dict[str, Any], _words(overrides, "KEY=VALUE ...")]
Variations = Annotated[dict[str, tuple[Any, ...]], _words(variations, "KEY=VALUE,VALUE ...")]
