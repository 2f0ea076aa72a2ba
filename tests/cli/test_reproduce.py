"""The papers' experiments: what is asked for, refused, run, stopped, resumed, reported."""

import dataclasses
import importlib
import json
import os
import pickle
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from clearhead.cli.options import parse
from clearhead.data import DataConfig
from clearhead.lab import processes
from clearhead.lab.configs import CompareConfig, Job
from clearhead.models import plan, preset
from clearhead.papers.claims import CLAIMS
from clearhead.papers.recipes import RATES, RUNS
from clearhead.papers.requests import EXPERIMENTS, chosen, parameters
from clearhead.papers.study import Experiment, Study, evaluate
from clearhead.report import load
from clearhead.train import TrainConfig

from .conftest import call, refusal

ALL = [(one.name, scale) for one in EXPERIMENTS.values() for scale in one.scales]


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_jobs_have_places_of_their_own_and_go_to_other_processes(name, scale, tmp_path):
    trials = [dataclasses.replace(one, output=tmp_path) for one in EXPERIMENTS[name].arms(scale)]
    if scale == "paper":  # recipes have their rates
        assert not any(one.is_swept for one in trials)
    attempts = [one.attempt(rate) for one in trials if one.is_swept for rate in one.tries]
    rated = [(one, next(iter(one.tries), None)) for one in trials]
    runs = [job for one, rate in rated for seed in one.seeds for job in one.runs(rate, seed)]
    starts = {job.after.name: job.after for job in (*attempts, *runs) if job.after}
    jobs = {job.name: job for job in (*attempts, *runs)} | starts
    assert len(jobs) == len({job.records for job in jobs.values()})
    for job in jobs.values():
        assert pickle.loads(pickle.dumps(job.config)) == job.config
        if isinstance(job.config, CompareConfig):  # one run, of the arm that the table names
            (arm,) = job.config.arms
            (seed,) = job.config.seeds
            final = job.config.output / f"{arm.folder}-seed{seed}" / "final"
            assert job.model in (None, final)
    assert not [*tmp_path.iterdir()]


def test_a_model_that_cannot_be_opened_is_refused_before_the_first_job(tmp_path, capsys):
    quantised = tmp_path / "fp8"
    LlamaConfig(quantization_config={"quant_method": "fp8"}).save_pretrained(quantised)
    words = ("reproduce", "retrofit", "--output", tmp_path / "out", "--from")
    assert "is already quantised (fp8): give the one" in refusal(capsys, *words, quantised)
    said = refusal(capsys, *words, "nobody/nothing")
    assert "cannot load a model from 'nobody/nothing'" in said
    assert not (tmp_path / "out").exists()


def test_the_list_says_what_each_experiment_asks(capsys):
    assert call("reproduce", "--list") == 0
    out = capsys.readouterr().out.splitlines()
    asked = "blocks: Figures 3, 6 and 13: every block at the depths of a scale, variants of SAS at "
    asked += "the smaller. arXiv 2311.01906; tiny, small, paper; "
    cost = "at tiny 72 runs, 14.7 M tokens, about 21 min of training on two cores"
    cost += ", sweeps may add up to 36 runs"
    assert asked + cost in out
    own = "blocks, at tiny 12 runs, 2.46 M tokens, about 3 min of training on two cores"
    own += ", sweeps may add up to 6 runs"
    says = "A small gain of the MLP branch is better than a gain of 1."
    assert f"sas/residual, sas/figure13: {says} [{own}]" in out
    assert len(out) == len(EXPERIMENTS) + len(CLAIMS)


@pytest.mark.parametrize(
    ("claim", "arms"),
    [
        ("sas/glue", ["encoders/bert", "encoders/bert-sas", "encoders/bert-sas-p"]),
        ("sas/residual", ["6 layers/sas", "6 layers/sas · mlp_gain 1.0"]),
    ],
)
def test_a_claim_asks_for_its_own_arms_only(claim, arms, tmp_path):
    ((_, studies),) = chosen([claim], "tiny", tmp_path).items()
    assert [one.key for one in studies] == arms
    assert {one.output for one in studies} == {tmp_path}


# The whole of it


def test_a_killed_command_is_told_and_made_up_for(text, tmp_path, capsys, monkeypatch):
    """Of an experiment of two arms, one of them with two rates: three steps a run.

    The lower rate is better than 1, and than the next beyond it, 1e-4.
    """
    study = Study(seeds=(0,), evaluation_tokens=64, label="toy blocks").changed(
        **{"layers": 1, "width": 48, "tokens": 96, "sweep_tokens": 96, "sequence_length": 16},
        **{"batch_size": 2, "log_every": 1, "precision": "fp32"},
        **{"data": (str(text),), "vocabulary": 300, "validation": 0.1},
    )
    asked = evaluate(lengths=(16,), tokens=64, data=DataConfig(data=(str(text),)))
    swept = study.changed(questions={"text": asked}).arm("sas", 1e-2, 1.0, mlp_gain=0.5)
    arms = (study.arm("transformer", 1e-2), swept)
    monkeypatch.setitem(EXPERIMENTS, "toy", Experiment("toy", "", "", lambda scale: arms))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    started = []
    start = processes.start

    def killing(*order):
        started.append(start(*order))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(processes, "start", killing)
    words = ["toy", "--output", str(tmp_path / "out"), "--jobs", "2"]
    assert call("reproduce", *words) == 1
    told = capsys.readouterr().err
    log = tmp_path / "out/logs/sweeps/toy-blocks/sas+mlp_gain=0.5-1e-2.log"
    assert f"sweeps/toy-blocks/sas+mlp_gain=0.5-1e-2: failed with -9:  (all of it: {log})" in (told)
    assert "toy blocks/sas · mlp_gain 0.5: left out" in told
    assert len(started) == 2 + 1  # the sweep, the other arm's run
    assert load(tmp_path / "out/records.jsonl").arms() == ["transformer"]

    assert call("reproduce", *words) == 0
    assert len(started) == 3 + 2 + 2  # the killed one, that beyond, the arm's run, its evaluation
    table = capsys.readouterr().out
    assert "sas · mlp_gain 0.5" in table
    assert "transformer" in table
    losses = {}  # read here anew
    for path in (tmp_path / "out/sweeps").glob("*/*/records.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "measure" and line["metric"] == "loss":
                losses[path.parent.name.removeprefix("sas+mlp_gain=0.5-")] = line["value"]
    assert {*losses} == {"1e-4", "1e-2", "1e0"}
    best = min(losses, key=losses.get)
    records = load(tmp_path / "out/records.jsonl")
    assert records.labels() == ["toy blocks"]
    assert records.arms() == ["transformer", "sas · mlp_gain 0.5"]
    (sas,) = records.of("sas · mlp_gain 0.5")
    assert sas.header["train"]["learning_rate"] == float(best) == 1e-2
    assert sas.header["swept"] == [1e-4, 1e-2, 1.0]
    assert not sas.at_edge
    assert [cell["task"] for cell in sas.cells] == ["perplexity"]
    assert (tmp_path / "out/report.html").exists()


# Processes of jobs that are forked from one that has imported what they need


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return partial(processes.start, threads=1)


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
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # all of its threads have ended
    assert _end(running) not in (0, None)  # nobody is left to tell how it ends
    os.kill(running.pid, signal.SIGKILL)
    assert _end(start(_job(text, tmp_path / "b", 96), tmp_path / "b.log", None)) == 0


# By the papers' names; where a paper contradicts its own name, see docs/recipes.md.
PUBLISHED = {
    "diff-830m": 833.6,
    "diff-1.4b": 1415.0,
    "diff-2.8b": 2778.7,
    "diff-6.8b": 6861.9,
    "diff-13.1b": 13103.4,
    "diff-3b": 3479.2,
    "diff-3b-64k": 3479.2,
    "coca-350m": 508.8,
    "codeparrot": 166.6,
    "codeparrot-72": 379.0,
    "crammed": 119.6,
    "gpt2-60m": 64.0,
    "gpt2-130m": 124.3,
    "gpt2-350m": 354.5,
    "gpt2-1.4b": 1415.9,
    "llama-130m": 134.1,
}


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_the_parameters_of_a_cost_are_counted_without_a_model(name, scale):
    for one in {one.label: one for one in reversed([*EXPERIMENTS[name].arms(scale)])}.values():
        if one.base is None:
            shape = {key: one.side.model[key] for key in one.set}
            counted = plan(preset(one.side.preset, one.size, **shape)).parameters
            assert parameters(one) == pytest.approx(counted, rel=0.04)


def test_published_runs_have_the_sizes_of_their_papers():
    for size, published in RUNS.items():
        arm = published.arms[0]
        count = plan(preset(arm.preset, size, **arm.model)).parameters
        assert round(count / 1e6, 1) == PUBLISHED[size], size
        if size.startswith("diff"):
            layer = preset("differential", size).layer(0)
            assert layer.num_attention_heads // 2 >= 8
            assert layer.head_dim >= 64
    assert {*RUNS} == {*PUBLISHED}
    assert RUNS["diff-3b-64k"].train.tokens_per_step == 2**22
    assert preset("differential", "large").num_attention_heads == 16


def test_published_runs_are_listed_as_commands_that_train_reads(capsys):
    assert call("plan", "--recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    arms = [(published, arm) for published in RUNS.values() for arm in published.arms]
    for (_, verb, *words), (published, arm) in zip(commands, arms, strict=True):
        read = parse(importlib.import_module(f"clearhead.cli.{verb}"), words)
        assert (read.preset, read.size, read.set) == (arm.preset, published.size, arm.model)
        rate = RATES.get(arm.preset, arm.train.learning_rate)
        train = dataclasses.replace(arm.train, learning_rate=rate)
        assert (read.train, read.data) == (train, published.data)
