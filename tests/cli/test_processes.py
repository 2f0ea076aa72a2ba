"""Processes of jobs that are forked from one that has imported what they need."""

import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from clearhead.data import DataConfig
from clearhead.lab.configs import CompareConfig, Job
from clearhead.lab.processes import Start, starting
from clearhead.records.loading import load
from clearhead.train import TrainConfig


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return starting(1)


def _job(text: Path, folder: Path, tokens: int) -> Job:
    config = CompareConfig(
        presets=("transformer",),
        set={"num_hidden_layers": 1, "hidden_size": 48},
        lengths=(1,),
        evaluation_tokens=64,
        train=TrainConfig(tokens=tokens, sequence_length=16, batch_size=2, log_every=1),
        data=DataConfig(data=(str(text),), vocabulary=300, validation=0.1),
        output=folder,
    )
    return Job(name="", config=config, records=folder / "records.jsonl")


def _end(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


def test_jobs_run_side_by_side_and_each_ends_in_its_own_way(start, text, tmp_path):
    tokens = {"a": 10**8, "b": 10**8, "c": 96}
    logs = [tmp_path / f"{name}.log" for name in tokens]
    stopped, killed, done = (
        start(_job(text, tmp_path / name, number), log, None)
        for log, (name, number) in zip(logs, tokens.items(), strict=True)
    )
    killed.kill()
    while os.getpgid(stopped.pid) != stopped.pid:  # a terminal's Ctrl-C does not reach it
        time.sleep(0.01)
    assert stopped.exitcode is None
    stopped.terminate()
    assert _end(stopped) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert _end(killed) == -signal.SIGKILL
    killed.terminate()  # has ended: nothing happens
    assert _end(done) == 0
    assert len(load([tmp_path / "c/records.jsonl"]).runs) == 1
    assert "step 3/3" in logs[2].read_text()


def test_jobs_go_on_where_the_process_that_they_are_forked_from_was_killed(start, text, tmp_path):
    running = start(_job(text, tmp_path / "a", 10**8), tmp_path / "a.log", None)
    status = Path(f"/proc/{running.pid}/status").read_text()
    server = int(status.split("PPid:")[1].split()[0])
    os.kill(server, signal.SIGKILL)
    while "State:\tZ" not in Path(f"/proc/{server}/status").read_text():  # its memory is freed
        time.sleep(0.01)
    assert _end(running) not in (0, None)  # nobody is left to tell how it ends
    os.kill(running.pid, signal.SIGKILL)
    assert _end(start(_job(text, tmp_path / "b", 96), tmp_path / "b.log", None)) == 0
