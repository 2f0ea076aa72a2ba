"""The record that `clearhead reproduce` joins from a training and its evaluations."""

import json
from dataclasses import replace

from clearhead.experiments.sweep_configs import SweepConfig
from clearhead.records.loading import load
from clearhead.reproduce import stages
from clearhead.reproduce.requests import EXPERIMENTS


def test_the_header_of_the_training_counts_before_those_of_its_evaluations(tmp_path):
    """Both name a command, a commit and a training: an evaluation those of its own process."""
    (trial,) = (
        replace(one, output=tmp_path)
        for one in EXPERIMENTS["sink"].arms("tiny")
        if one.name == "softmax1"
    )
    jobs = stages.runs([trial], {trial.key: 3e-3})
    assert len(jobs) > len({job.seed for job in jobs})
    for job in jobs:
        evaluated = isinstance(job.config, SweepConfig)
        line = {"kind": "run", "run": job.arm, "commit": "b" if evaluated else "a"}
        line |= {"command": "clearhead eval" if evaluated else "clearhead compare"}
        line |= {"train": {"tokens": 0} if evaluated else {"tokens": 9, "learning_rate": 3e-3}}
        job.records.parent.mkdir(parents=True, exist_ok=True)
        job.records.write_text(json.dumps(line) + "\n")
    for run in load(stages.collect(jobs, tmp_path / "records.jsonl")).runs:
        assert (run.header["command"], run.header["commit"]) == ("clearhead compare", "a")
        assert run.header["train"] == {"tokens": 9, "learning_rate": 3e-3}
