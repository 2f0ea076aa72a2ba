"""Damaged files: refused in one line, or of no effect on what comes out."""

import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from .conftest import SHAPE, Clearhead, compared, data, training, withstands

TIMED = re.compile(r"second|date|command|resumed|peak_memory|versions|probes_hold")
SAVING = training(4, "--train.save-every", "1")
EVAL = ["eval", "run", "--lengths", "16", "--tokens", "64", *data()]
BEGIN = ["train", "transformer", "--set", *SHAPE, "--output", "stopped", *SAVING]
TRAIN = ["train", "--resume", "stopped"]
NEW = ["train", "--output", "new", "--set", *SHAPE, *training(1)]
MEASURED = [word.replace("compared", "measured") for word in compared()]


@dataclass(frozen=True)
class Target:
    """A pattern of files to damage, the command that reads them, and patterns of its results.

    Without results a sealed target's result is what the command prints. In a file that is not
    sealed a changed byte may go unnoticed: a text then reads otherwise.
    """

    files: str
    words: list[str]
    results: tuple[str, ...] = ()
    sealed: bool = True


TARGETS = (
    Target("stopped/**/*", TRAIN, ("stopped/final/*",)),
    Target("cache/corpora/**/*", TRAIN, ("stopped/final/*",)),
    Target("compared/**/*", compared(), sealed=False),
    Target("run/final/*", ["generate", "run", "noise", "--temperature", "0"]),
    Target("run/final/*", [*EVAL, "--records", "new.jsonl"], ("new.jsonl",)),
    Target(
        "run/final/*",
        ["diagnose", "run", "--output", "new", "--windows", "1", "--length", "16", *data()],
        ("new/*.jsonl",),
    ),
    Target("measured/*/final/*", MEASURED, ("measured/records.jsonl",)),
    Target("eval.jsonl", [*EVAL, "--records", "eval.jsonl"], ("eval.jsonl",), sealed=False),
    Target("compared/records.jsonl", ["report", "compared/records.jsonl"], sealed=False),
    Target("diagnosed/*.jsonl", ["report", "diagnosed/diagnosis.jsonl"], sealed=False),
    Target("quantized.jsonl", ["report", "quantized.jsonl"], sealed=False),
    Target("text/*", NEW, sealed=False),
    Target("packed/*", ["packed" if word == "text" else word for word in NEW], sealed=False),
)


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _line(path: Path, draw: random.Random) -> None:
    """A line of something else, as another program may leave it."""
    lines = path.read_bytes().split(b"\n")
    other = (b"null", b"[]", b"{}", b'{"step": "a"}', b'{"kind": "run"}', b"\xff\xfe", b'"x"')
    lines[draw.randrange(len(lines))] = draw.choice(other)
    path.write_bytes(b"\n".join(lines))


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": _flip,
    "cut": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "empty": lambda path, draw: path.write_bytes(b""),
    "delete": lambda path, draw: path.unlink(),
    "folder": lambda path, draw: (path.unlink(), path.mkdir()),
    "loop": lambda path, draw: (path.unlink(), path.symlink_to(path)),
    "line": _line,
}


@pytest.fixture(scope="session")
def base(made: Path, clearhead: Clearhead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is there, and beside it a run that was stopped after two of four steps."""
    folder = tmp_path_factory.mktemp("base") / "base"
    shutil.copytree(made, folder)
    shutil.copytree(folder / "compared", folder / "measured")
    for path in folder.glob("measured/**/records.jsonl"):
        path.unlink()  # trained, and not yet measured
    for kill_at in range(20, 400, 20):  # until it has two checkpoints, wherever that is
        done = clearhead(*BEGIN, cwd=folder, kill_at=kill_at)
        if len(list(folder.glob("stopped/checkpoints/step-*"))) == 2 or done.code == 0:
            break
        shutil.rmtree(folder / "stopped", ignore_errors=True)
    assert done.code == -9, done.line
    texts = [path.read_text() for path in sorted((folder / "text").iterdir())]
    (folder / "packed").mkdir()
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "packed" / "rows.jsonl").write_text(rows)
    (folder / "packed" / "packed.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    sealed = folder / "packed" / "sealed.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), sealed, write_page_checksum=True)
    return folder


def _untimed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: one for key, one in pairs if not TIMED.search(key)}


def _content(path: Path) -> Any:
    """The bytes of a file, or the records in it without times."""
    if path.suffix != ".jsonl":
        return path.read_bytes()
    text = path.read_text("utf-8").splitlines()
    lines = (json.loads(line, object_pairs_hook=_untimed) for line in text)
    return [line for line in lines if not TIMED.search(str(line.get("metric")))]


def _results(folder: Path, target: Target) -> dict[Path, Any]:
    return {
        path.relative_to(folder): _content(path)
        for pattern in target.results
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def expected(
    base: Path, clearhead: Clearhead, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """The results without damage."""
    found = []
    for target in TARGETS:
        folder = tmp_path_factory.mktemp("expected") / "case"
        shutil.copytree(base, folder)
        done = clearhead(*target.words, cwd=folder)
        assert done.code == 0, done.line
        found.append((_results(folder, target), done.out))
    return found


def test_damaged_files_are_refused_or_change_nothing(base, expected, clearhead, tmp_path):
    def attack(draw: random.Random) -> None:
        number = draw.randrange(len(TARGETS))
        target, (results, out) = TARGETS[number], expected[number]
        folder = tmp_path / "case"
        shutil.copytree(base, folder)
        try:
            files = [path for path in sorted(folder.glob(target.files)) if path.stat().st_size]
            path, damage = draw.choice([p for p in files if p.is_file()]), draw.choice([*DAMAGES])
            what = f"{damage} {path.relative_to(folder)}: "
            DAMAGES[damage](path, draw)
            done = clearhead(*target.words, cwd=folder)
            try:
                done.check()
                found = _results(folder, target) if done.code == 0 else results
                same = found == results and (bool(target.results) or done.out == out)
                assert done.code or same or not target.sealed, f"other results: {done.line}"
                same = done.out == out or damage in ("flip", "line", "cut") or not target.results
                assert done.code or target.sealed or same, f"other words: {done.line}"
            except AssertionError as error:
                raise AssertionError(f"{what}{error}") from None
        finally:
            shutil.rmtree(folder)

    withstands("files", attack)
