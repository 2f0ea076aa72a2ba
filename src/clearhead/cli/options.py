"""Parsing of a command line into a dataclass, for all verbs."""

import contextlib
import dataclasses
import io
import os
import re
import textwrap
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro

from clearhead import extensions
from clearhead.errors import ClearheadError, require_extras
from clearhead.metavars import called
from clearhead.ranges import check

_LISTING_PRESETS = ("train", "compare", "diagnose", "check", "convert", "plan")
_RULES = tyro.constructors.ConstructorRegistry()


def _path(word: str) -> Path:
    if not word:  # Path("") would be the current folder
        raise ClearheadError("'' is no path: name a file or folder, the current one as .")
    return Path(os.path.expanduser(word))


_PATH = called("PATH", _path, Path)


@_RULES.primitive_rule
def _rule(info: Any) -> Any:
    """Paths, lists and optional values for tyro; None for all else, which it knows itself."""
    kind, kinds = get_origin(info.type), get_args(info.type)
    if kind is tuple and len(kinds) == 2 and kinds[1] is ...:
        return _list(kinds[0], info.markers)
    if kind in (Union, UnionType) and NoneType in kinds and len(kinds) == 2:
        return _optional(next(one for one in kinds if one is not NoneType), info.markers)
    return _PATH if info.type is Path else None


def _spec(kind: Any, markers: Any) -> Any:
    make = tyro.constructors.PrimitiveTypeInfo.make
    return tyro.constructors.ConstructorRegistry.get_primitive_spec(make(kind, markers))


def _list(kind: Any, markers: Any) -> Any:
    """Commas separate numbers as spaces do; in texts they belong to the text."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if bare not in (int, float, str, Path):
        return None
    item = _spec(kind, markers)

    def read(words: list[str]) -> tuple[Any, ...]:
        if bare in (int, float):
            words = [one for word in words for one in word.split(",") if one]
        return tuple(item.instance_from_str([word]) for word in words)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{item.metavar} ...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple) and all(map(item.is_instance, value)),
        str_from_instance=lambda value: list(map(str, value)),
    )


def _optional(kind: Any, markers: Any) -> Any:
    """The word None still means None; help names the other type only."""
    spec: Any = None if get_origin(kind) is Literal else _spec(kind, markers)
    if getattr(spec, "nargs", None) != 1:
        return None
    read = spec.instance_from_str
    return dataclasses.replace(
        spec,
        instance_from_str=lambda words: None if words == ["None"] else read(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda one: ["None"] if one is None else spec.str_from_instance(one),
    )


def parse(verb: Any, words: list[str], *, default: Any = None) -> Any:
    """Parse the `words` after a verb into the `Command` of its module, whose docstring opens the
    help; `default` is an instance whose values replace the Command's defaults."""
    name = verb.__name__.rpartition(".")[2]
    about, _, examples = (verb.__doc__ or "").partition("\n\n")
    description = [" ".join(about.split()), "", examples.rstrip()]
    if name in _LISTING_PRESETS:
        from clearhead.named_models import PRESETS, SIZES

        for title, names in {"presets": PRESETS, "sizes": SIZES}.items():
            lines = textwrap.wrap(" ".join(names), 90, break_on_hyphens=False)
            description += ["", f"{title}:", *(f"  {line}" for line in lines)]
    options = list(takewhile(lambda word: word != "--", words))  # texts alone follow
    if not {"-h", "--help"} & {*options}:
        extensions.load()  # settings name presets of theirs
    box = io.StringIO()  # of tyro's error
    shown: Any = {"prog": f"clearhead {name}", "description": "\n".join(description)}
    start = tyro.MISSING_NONPROP if default is None else default
    try:
        with _RULES, contextlib.redirect_stderr(box):
            command: Any = tyro.cli(verb.Command, args=words, default=start, **shown)
    except SystemExit as stop:
        if not stop.code:  # help, on standard output
            raise
        raise ClearheadError(f"{_one_line(box.getvalue())}; see clearhead {name} --help") from None
    _check_options(options, command)
    check(command)
    require_extras(vars(command))
    for field in dataclasses.fields(verb.Command):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and getattr(command, field.name) == ():
            raise ClearheadError(f"{name} needs one or more {field.name}: none is given")
    return command


def given(words: list[str], option: str) -> str | None:
    """The value of an option among the words, as `--option=VALUE` or `--option VALUE`."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else next(iter(words[place + 1 :]), None)
    return None


def _one_line(box: str) -> str:
    """The first part of tyro's box as one line, with the options that its other parts propose."""
    lines = [line.strip("│ ") for line in box.splitlines() if line[:1] not in ("╭", "╰")]
    parts = re.split("^[─-]{3,}$", "\n".join(lines), flags=re.MULTILINE)
    # Where the output's encoding has no boxes, the title is a part of its own.
    message, *others = parts if "╭" in box or len(parts) == 1 else parts[1:]
    words = message.split()
    near = re.findall(r"^(--\S+)", "".join(others), flags=re.MULTILINE)
    hint = f": did you mean {' or '.join(near)}?" if near and "Unrecognized" in words else ""
    line, _, _ = " ".join(words).partition(" Got errors:")  # of each type of a union
    return line.rstrip(".") + hint


def _check_options(words: Sequence[str], command: Any) -> None:
    """Refuse an option given twice, since only its last values would count, and one of several
    values that stands without any where that changes nothing."""
    seen = set[str]()
    for word, following in pairwise([*words, "--"]):
        if not word.startswith("--"):
            continue
        option = word.partition("=")[0].replace("_", "-")
        # --no-x and --train.no-x set the same as --x and --train.x.
        if (name := re.sub(r"(--|\.)no-", r"\1", option)) in seen:
            raise ClearheadError(f"{option} is given twice: give it once")
        seen.add(name)
        *places, last = name.removeprefix("--").replace("-", "_").split(".")
        owner = reduce(getattr, places, command)
        idle = getattr(owner, last, None) in ((), {}) and not getattr(type(owner), last, ())
        if following.startswith("--") and idle:
            raise ClearheadError(f"{word} is given without a value: give one or leave it out")
