"""Small corpora on disk."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.data import DataConfig

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def _lines(seed: int, count: int = 40) -> str:
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(count))


@pytest.fixture(scope="session")
def lines() -> Callable[..., str]:
    """Makes a text of `count` lines that is a function of `seed`."""
    return _lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 30 different texts."""
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(30):
        (root / f"{number:02}.txt").write_text(_lines(number), encoding="utf-8")
    return root


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., DataConfig]:
    """Makes configs with a small vocabulary and a cache of the test's own."""

    def make(*data: object, **options: object) -> DataConfig:
        defaults: dict = {"validation": 0.2, "cache": tmp_path / "cache"}
        if "tokenizer" not in options:
            defaults["vocabulary"] = 280
        return DataConfig(data=tuple(map(str, data)), **(defaults | options))

    return make
