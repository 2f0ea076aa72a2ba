"""Types of text settings, with the metavars that the command line's help shows for them."""

import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from clearhead.errors import ClearheadError


def in_utf8(word: str) -> str:
    """Decode a command-line word as UTF-8 whatever the locale; other bytes are refused.

    Python represents such bytes as lone surrogates, which only paths may contain.
    """
    if not re.search("[\ud800-\udfff]", word):
        return word
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ClearheadError(f"{word!r} is not UTF-8 (byte {byte:#04x}): give UTF-8") from error


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
