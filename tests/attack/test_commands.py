"""Command lines over all verbs, mutated from valid ones: done, or refused in one line."""

import dataclasses
import importlib
import os
import random
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from .conftest import ESC, SHAPE, TEXTS, Done, compared, data, training, withstands

# What no number may be, and no path: accepted, it would have no effect or a wrong one.
NO_INTEGER = ("9" * 23, "-" + "9" * 23, "nan", "inf", "1.5", "x", "", "0x10", ESC)
NO_NUMBER = ("nan", "inf", "-inf", "x", "")
INTEGERS = ("0", "1", "2", "3", "-1", "-2147483648")
NUMBERS = ("0", "0.5", "1", "-1", "1e-320", "1e-45", "1e-9", "2", "-0.0")
PATHS = ("missing/x", "text", "text/00.txt", "pipe.txt", "x" * 300, ESC, "é.jsonl")
SOURCES = (
    *("text@0.5", "text@nan", "text@", "hf:", "hf:no/such", "python-stdlbi", "binary.txt"),
    *("synthetic:passkey:documents=3", "synthetic:recall:pairs=x", "synthetic:x", "empty.txt"),
    *("broken.parquet", "broken.jsonl.gz", "rows.jsonl", *PATHS),
)
TEMPLATES: tuple[list[str], ...] = (
    ["train", "transformer", "--set", *SHAPE, "--output", "new", *training(1)],
    ["train", "bert", "--set", *SHAPE, "--output", "new", *training(8)],
    [*compared(), "--seeds", "0"],
    ["generate", "run", "noise", "--tokens", "3"],
    ["eval", "run", "--lengths", "16", "--tokens", "64", "--records", "new.jsonl", *data()],
    ["eval", "run", "--tasks", "recall", "--lengths", "300", "--recall.samples", "1", *data()],
    ["diagnose", "run", "--length", "8", "--windows", "1", "--output", "new", *data()],
    ["diagnose", "init:gpt2", "--set", *SHAPE, "--windows", "1", "--output", "new", *data()],
    ["quantize", "run", "--scheme", "w8a8-fine", "--length", "8", "--tokens", "16", *data()],
    ["report", "compared/records.jsonl", "--output", "new.html"],
    ["report", "diagnosed/diagnosis.jsonl", "--output", "new.html"],
    ["convert", "run", "new"],
    ["plan", "transformer", "sas", "--size", "tiny"],
    ["reproduce", "blocks", "--list"],
    ["bench", "kernel", "--rounds", "0"],
    [
        *("finetune", "run", "--train-file", "rows.jsonl", "--validation-file", "rows.jsonl"),
        *("--output", "new", "--train.epochs", "1", "--train.max-length", "16"),
    ],
)
VALUES = {"--size": ("tiny", "tinny", "", ESC), "--data.data": SOURCES}
# Of no effect on what is printed or written, or of one that takes too long here.
LEFT_OUT = {"track", "compile", "deploy", "jobs", "list", "scale"}


def _options(kind: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a command and its type, nested ones by their dotted name."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _options(hint, f"{place}{field.name}.")
        elif field.name not in LEFT_OUT:
            yield f"--{place}{field.name}".replace("_", "-"), hint


def _kinds(hint: Any) -> set[Any]:
    """The plain types, and words of literals, in a type."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    if get_origin(hint) in (Annotated, Union, UnionType, tuple):
        inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
        return set().union(*map(_kinds, inner))
    return {hint} - {NoneType, ...}


def _value(draw: random.Random, name: str, hint: Any) -> tuple[list[str], bool]:
    """Words for an option, and whether they must be refused."""
    kinds = _kinds(hint)
    if kinds == {bool}:
        return [], False
    if name in VALUES:
        return [draw.choice(VALUES[name])], False
    for kind, bad, good in ((int, NO_INTEGER, INTEGERS), (float, NO_NUMBER, NUMBERS)):
        if kind in kinds:
            refused = draw.random() < 0.5
            # An empty list of numbers is one: it is left out.
            value = draw.choice(bad if refused else good)
            return [value], refused and value != "" and "," not in value
    if Path in kinds:
        empty = draw.random() < 0.2
        return ["" if empty else draw.choice(PATHS)], empty
    words = sorted(kind for kind in kinds if isinstance(kind, str))
    return [draw.choice(words if words and draw.random() < 0.6 else TEXTS)], False


def _mutated(draw: random.Random) -> tuple[list[str], bool]:
    """A valid command line with options added, or words lost, doubled or misspelt."""
    words = list(draw.choice(TEMPLATES))
    module = importlib.import_module(f"clearhead.cli.{words[0]}")
    options = list(_options(module.Command))
    refused = False
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.randrange(1, len(words))
        if draw.random() < 0.15:
            words[place] = draw.choice((*TEXTS, words[place][:-1], words[0]))
            return words, False
        name, hint = draw.choice(options)
        value, bad = _value(draw, name, hint)
        words += [name, *value]
        refused |= bad
    return words, refused


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to work in, with files that are no data."""
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    os.mkfifo(folder / "pipe.txt")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.txt").touch()
    (folder / "broken.parquet").write_bytes(b"PAR1 but not really")
    (folder / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 but not really")
    rows = (f'{{"text": "noise {n} sink", "label": {n % 2}}}\n' for n in range(12))
    (folder / "rows.jsonl").write_text("".join(rows))
    return folder


def _fresh(folder: Path, made: Path) -> None:
    """Undo what a command wrote."""
    for path in folder.iterdir():
        if path.name.startswith("new"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("run", "compared"):
        shutil.rmtree(folder / name)
        shutil.copytree(made / name, folder / name)


def _wrote(done: Done, folder: Path) -> bool:
    """True if it printed a result, or wrote what it was told to, under a mutated name perhaps."""
    named = [after for word, after in pairwise(done.words) if word == "--output"]
    written = any(path.name.startswith("new") or path.name in named for path in folder.iterdir())
    return bool(done.out.strip()) or written


@pytest.mark.parametrize("words", TEMPLATES, ids=lambda words: words[0])
def test_the_commands_that_are_mutated_are_valid(words, folder, clearhead):
    done = clearhead(*words, cwd=folder)
    assert done.code == (2 if words[0] == "bench" else 0), done.line


def test_commands_do_what_they_say_or_refuse_it(folder, made, clearhead):
    def attack(draw: random.Random) -> None:
        words, refused = _mutated(draw)
        done = clearhead(*words, cwd=folder)
        try:
            done.check()
            assert done.code == 2 or not refused, f"accepted: {done.line}"
            assert done.code == 2 or _wrote(done, folder), f"nothing done: {done.line}"
        finally:
            _fresh(folder, made)

    withstands("commands", attack)
