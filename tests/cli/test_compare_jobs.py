"""A comparison whose runs are made side by side, each in a process."""

import json
import os
import sys
from pathlib import Path

import pytest

from .conftest import call, changed

# What the clock, the process and its number of threads decide.
OF_THE_PROCESS = {*("date", "command", "threads", "seconds", "tokens_per_second", "batch_stall")}


@pytest.fixture
def words(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    shape = ["--set", "num_hidden_layers=1", "hidden_size=48"]
    arms = ["compare", "transformer", "--vary", "train.learning_rate=1e-3,1e30", *shape]
    steep = ["--train.clip", "0", "--train.warmup", "0", "--lengths", "1"]
    return [*arms, *steep, "--evaluation-tokens", "64", *settings, "--output", str(tmp_path / "a")]


def _records(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    timed = ("train_seconds", "tokens_per_second", "peak_memory_bytes")
    text = str(folder)
    return [
        {
            key: value.replace(text, "") if isinstance(value, str) else value
            for key, value in line.items()
            if key not in OF_THE_PROCESS
        }
        for line in lines
        if line.get("metric") not in timed
    ]


def test_runs_side_by_side_have_the_records_of_runs_in_turn(words, tmp_path, capsys):
    assert call(*words) == 0
    capsys.readouterr()
    other = changed(words, "--output", str(tmp_path / "b"), "--jobs", "2")
    assert call(*other) == 0
    told = capsys.readouterr()
    assert f"2 of 2 runs at once, with logs in {tmp_path}/b/logs" in told.err
    assert "learning_rate 1e+30, seed 0: stopped at step 2" in told.err  # a result, no failure
    assert "already done" not in told.err
    assert _records(tmp_path / "b") == _records(tmp_path / "a")
    (header, *_) = _records(tmp_path / "b")
    assert header["seed"] == 0
    assert (tmp_path / "b/report.html").exists()
    assert call(*other) == 0
    assert "learning_rate 0.001, seed 0: already done" in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_the_same_command_makes_it(words, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    blocked = tmp_path / "a/transformer+learning_rate=1e+30-seed0"
    blocked.write_text("where a folder should be")
    assert call(*words, "--jobs", "2") == 2
    told = capsys.readouterr().err
    assert f"{blocked.name}: failed with 1: clearhead: " in told
    assert f"1 of 2 runs failed ({blocked.name}): {tmp_path}/a/logs says why" in told
    assert "Traceback" not in told
    blocked.unlink()
    assert call(*words, "--jobs", "2") == 0
    told = capsys.readouterr().err
    assert "learning_rate 0.001, seed 0: already done" in told
    assert "1 of 1 runs at once" in told
    assert (blocked / "records.jsonl").exists()
