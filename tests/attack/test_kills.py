"""Kills at any file operation: what is resumed ends as what was never stopped."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from .cases import withstands
from .conftest import SHAPE, compared, training
from .server import Server

VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("--train.accumulation", "2"),
    ("--train.optimizer", "orthoadam"),
    ("--train.optimizer", "muon", "--train.document-masks"),
)
SAVING = ("--train.save-every", "1")


def _trained(variant: tuple[str, ...]) -> list[str]:
    steps = 8 if "--train.accumulation" in variant else 4
    return ["train", "--set", *SHAPE, "--output", "new", *training(steps, *SAVING, *variant)]


COMMANDS = (*map(_trained, VARIANTS), compared(*SAVING))


def _steps(path: Path) -> list[Any]:
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return [(line.get("step"), line.get("loss")) for line in lines]


def _result(folder: Path) -> dict[str, Any]:
    """Weights and curves of every run."""
    weights = {path: path.read_bytes() for path in folder.glob("**/final/model.safetensors")}
    curves = {path: _steps(path) for path in folder.glob("**/metrics.jsonl")}
    return {str(path.relative_to(folder)): value for path, value in {**weights, **curves}.items()}


def _resumed(words: list[str], folder: Path) -> list[str]:
    """The command that goes on; `compare` is its own."""
    begun = words[0] == "train" and (folder / "new" / "run.json").exists()
    return [*words, "--resume", "new"] if begun else words


@pytest.fixture(scope="module")
def unbroken(made: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the commands that nothing stops."""
    found = []
    for words in COMMANDS:
        folder = tmp_path_factory.mktemp("unbroken")
        shutil.copytree(made / "text", folder / "text")
        shutil.copytree(made / "cache", folder / "cache")
        done = server.run(*words, cwd=folder)
        assert done.code == 0, done.line
        found.append(_result(folder))
    return found


def test_kills_change_nothing_that_is_resumed(made, unbroken, server, tmp_path):
    def attack(draw: random.Random) -> None:
        number = draw.randrange(len(COMMANDS))
        words, killed = COMMANDS[number], list[int]()
        folder = tmp_path / "case"
        folder.mkdir()
        shutil.copytree(made / "text", folder / "text")
        if draw.random() < 0.7:
            shutil.copytree(made / "cache", folder / "cache")
        try:
            for _ in range(draw.randint(1, 4)):
                killed.append(round(400 ** draw.random()))
                done = server.run(*_resumed(words, folder), cwd=folder, kill_at=killed[-1])
                if done.code != -signal.SIGKILL:
                    break
            if done.code == -signal.SIGKILL:
                done = server.run(*_resumed(words, folder), cwd=folder)
            assert done.code == 0, f"killed at {killed}: {done.line}"
            assert _result(folder) == unbroken[number], f"killed at {killed}: {done.line}"
            left = [path for path in folder.glob("**/.writing-*") if "cache" not in path.parts]
            assert not left, f"killed at {killed}, left {left}: {done.line}"
        finally:
            shutil.rmtree(folder)

    withstands("kills", attack)
