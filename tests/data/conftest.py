"""Small corpora on disk."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clearhead.data import Corpus, DataConfig

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def _lines(seed: int, count: int = 40) -> str:
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(count))


def documents(corpus: Corpus, split: str) -> list[str]:
    """The texts of a split."""
    found = list[str]()
    for stream in corpus.split(split):
        for ids in np.split(stream.tokens, stream.starts[1:]):
            assert ids[0] == corpus.tokenizer.bos_token_id
            assert ids[-1] == corpus.tokenizer.eos_token_id
            found.append(corpus.tokenizer.decode(ids[1:-1].tolist()))
    return found


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
