"""Parsing of a command line into a dataclass, for all verbs."""

import contextlib
import dataclasses
import io
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
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
    kind = get_origin(info.type)
    if kind is tuple:
        return _list(*get_args(info.type))
    if kind in (Union, UnionType):
        return _optional(get_args(info.type), info.markers)
    return _PATH if info.type is Path else None


def _list(kind: Any = None, *rest: Any) -> Any:
    """Commas separate numbers as spaces do; in texts they belong to the text."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if rest != (...,) or bare not in (int, float, str, Path):
        return None
    called = [one for one in getattr(kind, "__metadata__", ()) if hasattr(one, "metavar")]
    item = called[0] if called else _PATH if bare is Path else None

    def read(words: list[str]) -> tuple[Any, ...]:
        if bare in (int, float):
            return tuple(bare(one) for word in words for one in word.split(",") if one)
        return tuple(item.instance_from_str([word]) if item else word for word in words)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{item.metavar if item else bare.__name__.upper()} ...",
        instance_from_str=read,
        is_instance=lambda value: (
            isinstance(value, tuple) and all(isinstance(x, bare) for x in value)
        ),
        str_from_instance=lambda value: list(map(str, value)),
    )


def _optional(kinds: tuple[Any, ...], markers: Any) -> Any:
    """The word None still means None; help names the other type only."""
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) != 1 or len(kinds) == 1 or get_origin(others[0]) is Literal:
        return None
    spec: Any = tyro.constructors.ConstructorRegistry.get_primitive_spec(
        tyro.constructors.PrimitiveTypeInfo.make(others[0], markers)
    )
    if getattr(spec, "nargs", None) != 1:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=spec.metavar,
        instance_from_str=lambda words: (
            None if words == ["None"] else spec.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda one: ["None"] if one is None else spec.str_from_instance(one),
    )


def parse(verb: Any, words: list[str], *, default: Any = None) -> Any:
    """Parse the `words` after a verb into the `Command` of its module, whose docstring opens the
    help; `default` is an instance whose values replace the Command's defaults."""
    name = verb.__name__.rpartition(".")[2]
    options = list(takewhile(lambda word: word != "--", words))  # texts alone follow
    _check_once(options)
    about, _, examples = (verb.__doc__ or "").partition("\n\n")
    description = [" ".join(about.split()), "", examples.rstrip()]
    if name in _LISTING_PRESETS:
        from clearhead.named_models import PRESETS, SIZES

        for title, names in {"presets": PRESETS, "sizes": SIZES}.items():
            lines = textwrap.wrap(" ".join(names), 90, break_on_hyphens=False)
            description += ["", f"{title}:", *(f"  {line}" for line in lines)]
    if not {"-h", "--help"} & {*options}:
        extensions.load()  # settings name presets of theirs
    said = io.StringIO()
    shown: Any = {"prog": f"clearhead {name}", "description": "\n".join(description)}
    start = tyro.MISSING_NONPROP if default is None else default
    try:
        with _RULES, contextlib.redirect_stderr(said):
            command: Any = tyro.cli(verb.Command, args=words, default=start, **shown)
    except SystemExit as stop:
        if not stop.code:  # help, on standard output
            raise
        raise ClearheadError(f"{_one_line(said.getvalue())}; see clearhead {name} --help") from None
    check(command)
    require_extras(vars(command))
    _check_values(options, command)
    for field in dataclasses.fields(verb.Command):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and getattr(command, field.name) == ():
            raise ClearheadError(f"{name} needs one or more {field.name}: none is given")
    return command


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Let every process of torchrun fail on an error that all of them find, but only the first one
    of each machine print it."""
    try:
        yield
    except ClearheadError as error:
        error.printed_elsewhere = os.environ.get("LOCAL_RANK", "0") != "0"
        raise


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


def _check_once(words: Sequence[str]) -> None:
    """Refuse an option given twice, since only its last values would count."""
    seen = set[str]()
    for word in (word for word in words if word.startswith("--")):
        # --no-x and --train.no-x set the same as --x and --train.x.
        if (name := re.sub(r"(--|\.)no-", r"\1", _spelt(word))) in seen:
            raise ClearheadError(f"{_spelt(word)} is given twice: give it once")
        seen.add(name)


def _check_values(words: Sequence[str], command: Any) -> None:
    """Refuse an option of several values that stands without any, where that changes nothing."""
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--") and following.startswith("--"):
            *places, name = _spelt(word)[2:].replace("-", "_").split(".")
            owner = reduce(getattr, places, command)
            if getattr(owner, name, None) in ((), {}) and not getattr(type(owner), name, ()):
                raise ClearheadError(f"{word} is given without a value: give one or leave it out")


def _spelt(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
