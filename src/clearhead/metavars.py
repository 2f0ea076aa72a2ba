"""Types of text settings by what they hold: the names that a command line's help gives them."""

import os
import re
from collections.abc import Callable
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from clearhead.errors import ClearheadError


def in_utf8(word: str) -> str:
    """A word of UTF-8, also where the locale has another encoding; other bytes are refused.

    Python holds them as lone surrogates, which paths alone may have.
    """
    if not re.search("[\ud800-\udfff]", word):
        return word
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ClearheadError(f"{word!r} is not UTF-8 (byte {byte:#04x}): give UTF-8") from error


def place(word: str) -> str:
    """A path with the home folder for ~, as also in init:~/model; another word as it is."""
    start = word[: len("init:") * word.startswith("init:")]
    return start + os.path.expanduser(word[len(start) :])


def _called(metavar: str, read: Callable[[str], str] = in_utf8) -> PrimitiveConstructorSpec[str]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda text: [text],
    )


Benchmark = Annotated[str, _called("BENCHMARK")]
Change = Annotated[str, _called("PRESET|KEY=VALUE")]
Experiment = Annotated[str, _called("EXPERIMENT")]
Field = Annotated[str, _called("FIELD")]
File = Annotated[str, _called("FILE", place)]
Folder = Annotated[str, _called("FOLDER", place)]
Grid = Annotated[str, _called("NxR")]
Model = Annotated[str, _called("MODEL", place)]
Name = Annotated[str, _called("NAME")]
Number = Annotated[str, _called("NUMBER")]
Passage = Annotated[str, _called("TEXT", place)]
Pattern = Annotated[str, _called("PATTERN")]
Preset = Annotated[str, _called("PRESET")]
Scaling = Annotated[str, _called("SCALING")]
SchemeName = Annotated[str, _called("SCHEME")]
Size = Annotated[str, _called("SIZE")]
Source = Annotated[str, _called("SOURCE", place)]
TaskName = Annotated[str, _called("TASK")]
Text = Annotated[str, _called("TEXT")]
Url = Annotated[str, _called("URL")]
Variable = Annotated[str, _called("VARIABLE")]
