"""A small text of its own for the command line's tests, and a cache that no other test sees."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

WORDS = ("attention", "noise", "sink", "query", "key", "value", "head", "token", "layer", "norm")


def changed(words: Sequence[str], *options: str) -> list[str]:
    """A command line with these options in place of its own of the same names."""
    given = {word for word in options if word.startswith("--")}
    kept, dropped = list[str](), False
    for word in words:
        dropped = word in given or (dropped and not word.startswith("--"))
        if not dropped:
            kept.append(word)
    return [*kept, *options]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sixty short documents."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for index in range(60):
        lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(30)]
        (folder / f"{index:02}.txt").write_text("\n".join(lines), "utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a job of two steps."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    return [
        *("--data.data", str(text), "--data.vocabulary", "300", "--data.validation", "0.1"),
        *("--train.tokens", "64", "--train.sequence-length", "16", "--train.batch-size", "2"),
        *("--train.precision", "fp32"),
    ]
