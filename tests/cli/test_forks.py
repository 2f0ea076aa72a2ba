"""Processes of jobs that are forked from one template."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clearhead.data import DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import CompareConfig
from clearhead.experiments.forks import Fork, Template
from clearhead.experiments.jobs import Job
from clearhead.records.loading import load
from clearhead.train import TrainConfig


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[Template]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with Template(jobs=1) as made:
        yield made


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
    return Job(name="", config=config, records=folder / "records.jsonl", arm="", label="")


def _end(process: Fork) -> int:
    while (code := process.poll()) is None:
        time.sleep(0.05)
    return code


def test_jobs_run_side_by_side_and_each_ends_in_its_own_way(template, text, tmp_path):
    jobs = [_job(text, tmp_path / name, tokens) for name, tokens in (("a", 10**8), ("b", 96))]
    logs = [tmp_path / f"{name}.log" for name in "abc"]
    stopped, killed = (template.start(jobs[0], log, None) for log in logs[:2])
    done = template.start(jobs[1], logs[2], None)
    assert stopped.poll() is None
    assert os.getpgid(stopped.pid) == stopped.pid  # a terminal's Ctrl-C does not reach it
    stopped.terminate()
    killed.kill()
    assert _end(stopped) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert _end(killed) == -signal.SIGKILL
    killed.terminate()  # has ended: nothing happens
    assert _end(done) == 0
    assert len(load([tmp_path / "b/records.jsonl"]).runs) == 1
    assert "step 3/3" in logs[2].read_text()


def test_a_template_that_has_ended_is_said(template, text, tmp_path):
    job = _job(text, tmp_path / "a", 96)
    running = template.start(job, tmp_path / "a.log", None)
    status = Path(f"/proc/{running.pid}/status").read_text()
    os.kill(int(status.split("PPid:")[1].split()[0]), signal.SIGKILL)
    with pytest.raises(ClearheadError, match="the process that starts the jobs has ended"):
        template.start(job, tmp_path / "b.log", None)
