"""What is attacked: a small text, and what every verb makes of it, made once."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server

SHAPE = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2")
WORDS = ("attention", "noise", "sink", "query", "key", "value", "head", "token", "layer", "norm")


def data(*more: str) -> list[str]:
    """Options of the text."""
    return ["--data.data", "text", "--data.validation", "0.2", "--data.cache", "cache", *more]


def training(steps: int = 2, *more: str) -> list[str]:
    """Options of a training of so many steps."""
    return [
        *data("--data.vocabulary", "280", "--train.tokens", str(32 * steps)),
        *("--train.sequence-length", "16", "--train.batch-size", "2"),
        *("--train.precision", "fp32", *more),
    ]


def compared(*more: str) -> list[str]:
    """A comparison of two models."""
    return [
        *("compare", "transformer", "softmax1", "--set", *SHAPE, "--output", "compared"),
        *("--lengths", "1", "2", "--evaluation-tokens", "64", "--measure-every", "1"),
        *training(2, *more),
    ]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs command lines, each in a process of its own."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def made(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a trained model in run/, a comparison, and records of other verbs."""
    folder = tmp_path_factory.mktemp("made")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(30):
        lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(12)]
        (folder / "text" / f"{number:02}.txt").write_text("\n".join(lines), "utf-8")
    few = ["--length", "16", *data()]
    for words in (
        ["train", "transformer", "--set", *SHAPE, "--output", "run", *training(4)],
        compared(),
        ["eval", "run", "--lengths", "16", "--tokens", "64", "--records", "eval.jsonl", *data()],
        ["diagnose", "run", "--output", "diagnosed", "--windows", "2", *few],
        [
            *("quantize", "run", "--scheme", "w8a8-coarse", "--tokens", "64"),
            *("--records", "quantized.jsonl", *few),
        ],
    ):
        done = server.run(*words, cwd=folder)
        assert done.code == 0, done.line
    return folder
