"""Damaged files, kills at any file operation, hostile words in records: refused, or no effect."""

import gzip
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests_chromium import browse

from .conftest import ESC, SHAPE, TEXTS, Clearhead, Done, compared, data, training, withstands

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


EACH = ("--train.save-every", "1")
MUON = ("--train.optimizer", "muon", "--train.document-masks")
# Other optimizers, and accumulation: tests/train/test_resume.py.
COMMANDS = (
    ["train", "--set", *SHAPE, "--output", "new", *training(4, *EACH, *MUON)],
    compared(*EACH),
)


def _result(folder: Path) -> dict[Path, Any]:
    """Weights and curves of every run."""
    found: dict[Path, Any] = {}
    for path in folder.glob("**/metrics.jsonl"):
        lines = map(json.loads, path.read_text("utf-8").splitlines())
        found[path.relative_to(folder)] = [(line.get("step"), line.get("loss")) for line in lines]
    for path in folder.glob("**/final/model.safetensors"):
        found[path.relative_to(folder)] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def unbroken(
    made: Path, clearhead: Clearhead, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """The results of the commands that nothing stops."""
    found = []
    for words in COMMANDS:
        folder = tmp_path_factory.mktemp("unbroken")
        for name in ("text", "cache"):
            shutil.copytree(made / name, folder / name)
        done = clearhead(*words, cwd=folder)
        assert done.code == 0, done.line
        found.append(_result(folder))
    return found


def test_kills_change_nothing_that_is_resumed(made, unbroken, clearhead, tmp_path):
    def attack(draw: random.Random) -> None:
        number = draw.randrange(len(COMMANDS))
        words, killed = COMMANDS[number], list[int]()
        folder = tmp_path / "case"
        for name in ("text", *["cache"] * (draw.random() < 0.7)):
            shutil.copytree(made / name, folder / name)

        def go_on(kill_at: int) -> Done:
            begun = words[0] == "train" and (folder / "new" / "run.json").exists()
            return clearhead(*words, *["--resume", "new"] * begun, cwd=folder, kill_at=kill_at)

        try:
            for _ in range(draw.randint(1, 4)):
                killed.append(round(400 ** draw.random()))
                done = go_on(killed[-1])
                if done.code != -signal.SIGKILL:
                    break
            if done.code == -signal.SIGKILL:
                done = go_on(0)
            assert done.code == 0, f"killed at {killed}: {done.line}"
            assert _result(folder) == unbroken[number], f"killed at {killed}: {done.line}"
            left = [path for path in folder.glob("**/.writing-*") if "cache" not in path.parts]
            assert not left, f"killed at {killed}, left {left}: {done.line}"
        finally:
            shutil.rmtree(folder)

    withstands("kills", attack)


# Words of the format itself; all others are a user's.
FORMAT = {"kind", "metric", "task", "date", "device", "dtype", "scaling", "map", "objective"}


def _replaced(value: Any, word: Callable[[str], str]) -> Any:
    """A record with `word` of each word of a user's in it."""
    if isinstance(value, dict):
        return {key: one if key in FORMAT else _replaced(one, word) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, word) for one in value]
    return word(value) if isinstance(value, str) else value


@pytest.mark.browser
def test_pages_run_no_script_of_a_record(made, clearhead, chromium, tmp_path):
    def attack(draw: random.Random) -> None:
        name = draw.choice(
            ("compared/records.jsonl", "eval.jsonl", "diagnosed/diagnosis.jsonl", "quantized.jsonl")
        )
        lines = [json.loads(line) for line in (made / name).read_text("utf-8").splitlines()]
        found, share = set[str](), draw.choice((0.05, 0.5))
        _replaced(lines, lambda word: found.add(word) or word)
        words = {word: draw.choice(TEXTS) for word in sorted(found) if draw.random() < share}
        records = tmp_path / f"{draw.choice((ESC[2:6], '<b onclick=alert(1)>', 'plain'))}.jsonl"
        text = "".join(
            json.dumps(_replaced(line, lambda word: words.get(word, word))) + "\n" for line in lines
        )
        records.write_text(text, "utf-8")
        title = draw.choice(TEXTS)
        done = clearhead(
            *("report", records.name, "--output", "page.html", f"--title={title}"), cwd=tmp_path
        )
        done.check()
        if done.code:
            return
        page = (tmp_path / "page.html").as_uri()
        dom = browse(chromium, tmp_path, page, "--dump-dom")
        assert "data-hacked" not in dom.split(">", 2)[1], f"a script ran: {name} {words} {title!r}"
        assert "data-drawn" in dom, f"never drawn: {name} {words} {title!r}"
        assert "data-errors" not in dom, f"an error on the page: {name} {words} {title!r}"

    withstands("pages", attack)
