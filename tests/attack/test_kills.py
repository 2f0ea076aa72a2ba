"""Kills at any file operation: what is resumed ends as what was never stopped."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import SHAPE, Clearhead, Done, compared, training, withstands

SAVING = ("--train.save-every", "1")
MUON = ("--train.optimizer", "muon", "--train.document-masks")
# Other optimizers, and accumulation: tests/train/test_resume.py.
COMMANDS = (
    ["train", "--set", *SHAPE, "--output", "new", *training(4, *SAVING, *MUON)],
    compared(*SAVING),
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


def _copied(made: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(made / name, folder / name)


@pytest.fixture(scope="module")
def unbroken(
    made: Path, clearhead: Clearhead, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """The results of the commands that nothing stops."""
    found = []
    for words in COMMANDS:
        folder = tmp_path_factory.mktemp("unbroken")
        _copied(made, folder, "text", "cache")
        done = clearhead(*words, cwd=folder)
        assert done.code == 0, done.line
        found.append(_result(folder))
    return found


def test_kills_change_nothing_that_is_resumed(made, unbroken, clearhead, tmp_path):
    def attack(draw: random.Random) -> None:
        number = draw.randrange(len(COMMANDS))
        words, killed = COMMANDS[number], list[int]()
        folder = tmp_path / "case"
        _copied(made, folder, "text", *["cache"] * (draw.random() < 0.7))

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
