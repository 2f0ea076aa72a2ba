"""Types of options: texts with the metavars of the command line's help, and KEY=VALUE words."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from clearhead.errors import ClearheadError


def in_utf8(word: str) -> str:
    """A command-line word as UTF-8 whatever the locale. Python represents bytes that the locale has
    not as lone surrogates."""
    if not re.search("[\ud800-\udfff]", word):
        return word
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClearheadError(f"{word!r} is not UTF-8") from error


def place(word: str) -> str:
    """Expand ~ in a path, also after "init:"; other words are returned unchanged."""
    start = word[: len("init:") * word.startswith("init:")]
    return start + os.path.expanduser(word[len(start) :])


def called(
    metavar: str, read: Callable[[str], Any] = in_utf8, kind: type = str
) -> PrimitiveConstructorSpec[Any]:
    """tyro's constructor of a one-word option, parsed by `read` into a value of type `kind`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


Benchmark = Annotated[str, called("BENCHMARK")]
Change = Annotated[str, called("PRESET|KEY=VALUE")]
Experiment = Annotated[str, called("EXPERIMENT")]
Field = Annotated[str, called("FIELD")]
File = Annotated[str, called("FILE", place)]
Folder = Annotated[str, called("FOLDER", place)]
Grid = Annotated[str, called("NxR")]
Model = Annotated[str, called("MODEL", place)]
Name = Annotated[str, called("NAME")]
Number = Annotated[str, called("NUMBER")]
Passage = Annotated[str, called("TEXT", place)]
Pattern = Annotated[str, called("PATTERN")]
Preset = Annotated[str, called("PRESET")]
Scaling = Annotated[str, called("SCALING")]
SchemeName = Annotated[str, called("SCHEME")]
Size = Annotated[str, called("SIZE")]
Source = Annotated[str, called("SOURCE", place)]
TaskName = Annotated[str, called("TASK")]
Text = Annotated[str, called("TEXT")]
Url = Annotated[str, called("URL")]
Variable = Annotated[str, called("VARIABLE")]


@dataclass(frozen=True, kw_only=True)
class OpensModels:
    """The option of every verb that opens a model."""

    trust_remote_code: bool = False
    """Run Python code that the model's folder or repository brings. Read it first."""

    def given(self, *names: str) -> list[str]:
        """The options among `names` that are not at their defaults, as "--option" words."""
        changed = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        return [f"--{name.replace('_', '-')}" for name in changed]


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words for a configuration; a value is JSON, or else plain text."""
    values: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not key or not value or key in values:
            again = "is given twice" if key in values else "is not KEY=VALUE"
            raise ClearheadError(f"{word!r} {again}: for example maps=differential")
        values[key] = value_of(value)
    return values


def value_of(text: str) -> Any:
    """A value that is JSON, or else plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def variations(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """KEY=VALUE,VALUE… words; each value is JSON, or else plain text."""
    overrides(words)
    varied: dict[str, tuple[Any, ...]] = {}
    for word in words:
        key, _, text = word.partition("=")
        several = value_of(f"[{text}]")  # whose own commas separate nothing
        whole = isinstance(several, list)
        varied[key] = tuple(several if whole else map(value_of, text.split(",")))
    return varied


def _words(read: Callable[[Sequence[str]], dict[str, Any]], metavar: str) -> Any:
    """A field for tyro that `read` parses."""
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda settings: [f"{key}={value}" for key, value in settings.items()],
    )


Overrides = Annotated[dict[str, Any], _words(overrides, "KEY=VALUE ...")]
Variations = Annotated[dict[str, tuple[Any, ...]], _words(variations, "KEY=VALUE,VALUE ...")]
