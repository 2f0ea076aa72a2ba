"""What several verbs share: parsing into a dataclass, and KEY=VALUE overrides."""

import json
from typing import Any, TypeVar

import tyro

from clearhead.errors import ClearheadError

T = TypeVar("T")


def parse(
    kind: type[T], words: list[str], *, verb: str, description: str, default: T | None = None
) -> T:
    """Read `words` into the dataclass `kind`; tyro prints help and its own errors.

    A list follows one flag, `--presets transformer softmax1`; a nested setting has a dotted one,
    `--train.tokens 1000000`. `default` stands in for the defaults of `kind`.
    """
    start: Any = tyro.MISSING_NONPROP if default is None else default
    prog = f"clearhead {verb}"
    return tyro.cli(kind, prog=prog, description=description, args=words, default=start)


def overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE pairs for a configuration; a value is JSON, or else plain text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ClearheadError(f"{pair!r} is not KEY=VALUE: for example maps=differential")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
