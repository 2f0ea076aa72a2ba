"""Configurations as JSON values; the identity of a job is their digest."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def canonical(settings: Any) -> Any:
    """Settings as JSON values: a dataclass is an object, a tuple a list, a path its text."""
    values: Any = asdict(settings) if is_dataclass(type(settings)) else settings
    return json.loads(json.dumps(values, default=str))


def restored(kind: type[T], values: Mapping[str, Any]) -> T:
    """The settings whose canonical form is `values`; raises as `kind` does."""
    hints, settings = get_type_hints(kind), dict(values)
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(value, list):
            settings[name] = tuple(value)
        elif isinstance(hint, type) and is_dataclass(hint):
            settings[name] = restored(hint, value)
        elif isinstance(value, str) and Path in (hint, *get_args(hint)):
            settings[name] = Path(value)
    return kind(**settings)


def digest_of(values: Any) -> str:
    """SHA-256, in hexadecimal, of JSON values with their keys in order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Each setting that differs: its dotted name, its value before and its value now."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{place}{key}.")
        elif old != new:
            yield f"{place}{key}", old, new
