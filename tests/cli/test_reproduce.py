"""The papers' experiments: commands that the verbs accept, run, stopped, resumed, reported."""

import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clearhead.cli import VERBS, main
from clearhead.cli.options import parse
from clearhead.data import DataConfig
from clearhead.experiments.reproduce import EXPERIMENTS, runner
from clearhead.experiments.reproduce.runner import Command, Stopped
from clearhead.experiments.reproduce.stages import collect
from clearhead.experiments.reproduce.study import Arm, Series, Study
from clearhead.report import load

ALL = [(name, scale) for name, scales in EXPERIMENTS.items() for scale in scales]


def _call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", *words])
    return stop.value.code


def _series(name: str, scale: str, output: Path) -> list[Series]:
    return [
        Series(study=study, arm=arm, output=output)
        for study in EXPERIMENTS[name][scale]
        for arm in study.arms
    ]


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_a_dry_run_prints_commands_that_the_verbs_accept(name, scale, tmp_path, capsys):
    series = _series(name, scale, tmp_path)
    chosen = {one.key: one.arm.rates[-1] for one in series}
    (tmp_path / "rates.json").write_text(json.dumps(chosen))
    words = ["--scale", scale, "--output", str(tmp_path), "--seeds", "1", "--dry-run"]
    assert _call(name, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert len({*map(tuple, commands)}) == len(commands)
    swept = sum(len(one.arm.rates) for one in series if len(one.arm.rates) > 1)
    assert sum(words[1] == "compare" for words in commands) == swept + len(series)
    outputs = set()
    for program, verb, *words in commands:
        assert program == "clearhead"
        command = parse(
            importlib.import_module(VERBS[verb][0]).Command, words, verb=verb, description=""
        )
        outputs.add(command.records if verb == "eval" else command.output)
        if verb == "compare":  # what was asked for is one run, of the arm that the study names
            (arm,) = command.arms
            (one,) = (one for one in series if one.key == f"{command.label}/{arm.name}")
            assert command.train.learning_rate in map(float, one.arm.rates)
            final = command.output / f"{arm.folder}-seed{command.seeds[0]}" / "final"
            models = {words[2] for words in commands if words[1] != "compare"}
            assert not models or "rates" in final.parts or str(final) in models
    assert len(outputs) == len(commands)  # so that any of them can run side by side
    assert list(tmp_path.iterdir()) == [tmp_path / "rates.json"]


def test_without_rates_a_dry_run_says_what_waits_for_them(tmp_path, capsys):
    words = ["blocks", "--output", str(tmp_path / "none"), "--dry-run"]
    assert _call(*words, "--only", "sas · mlp_gain*", "--seeds", "3") == 0
    out = capsys.readouterr().out
    assert out.count("\nclearhead compare sas --vary mlp_gain=") == 9
    assert "for want of a rate: 6 layers/sas · mlp_gain 0.05, " in out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("encodes",), "did you mean encoders"),
        (("blocks", "--only", "sass"), "only names 'sass': arms are transformer, parallel,"),
        (("blocks", "--test-data", "x"), "test_data has no effect on blocks"),
        (("blocks", "--jobs", "0"), "jobs is 0: give a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(words, said, capsys):
    assert _call(*words, "--dry-run") == 2
    assert said in capsys.readouterr().err


def test_own_text_takes_the_place_of_both(tmp_path, capsys):
    words = ["--data", "a.txt", "b.txt", "--test-data", "c.txt", "--scale", "paper", "--dry-run"]
    assert _call("long-context", *words) == 0
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("clearhead compare"):
            assert "--data.data a.txt b.txt --data.vocabulary 50000" in line
        if line.startswith("clearhead eval"):
            assert "--data.data c.txt --split all" in line


# The whole of it


@pytest.fixture
def toy(text: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment of two arms, two rates and one seed: three steps a run."""

    def questions(series: Series, seed: int) -> list[Command]:
        asked = ("--lengths", "16", "--tokens", "64", "--data.data", str(text))
        return [series.eval(seed, "text", *asked)] if series.arm.preset == "sas" else []

    study = Study(
        name="toy blocks",
        arms=(Arm("transformer", ("1e-2",)), Arm("sas", ("1e-3", "1e-2"), {"mlp_gain": 0.5})),
        tokens=96,
        sweep_tokens=96,
        options=(
            *("--train.sequence-length", "16", "--train.batch-size", "2", "--lengths", "1"),
            *("--train.precision", "fp32", "--evaluation-tokens", "64"),
            *("--set", "num_hidden_layers=1", "hidden_size=48"),
        ),
        text=DataConfig(data=(str(text),), vocabulary=300, validation=0.1),
        seeds=(0,),
        questions=questions,
    )
    monkeypatch.setitem(EXPERIMENTS, "toy", {"tiny": (study,)})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_a_killed_command_is_told_and_made_up_for(toy, tmp_path, capsys, monkeypatch):
    started = []

    class Killing(subprocess.Popen):
        def __init__(self, words, **options):
            super().__init__(words, **options)
            started.append(words)
            if len(started) == 1:
                self.kill()

    monkeypatch.setattr(runner.subprocess, "Popen", Killing)
    words = ["toy", "--output", str(tmp_path / "out"), "--jobs", "2"]
    assert _call(*words) == 1
    told = capsys.readouterr().err
    log = tmp_path / "out/logs/rates/toy-blocks/sas+mlp_gain=0.5-1e-3.log"
    assert f"[1/2] rates/toy-blocks/sas+mlp_gain=0.5-1e-3: failed with -9:  (all of it: {log})" in (
        told
    )
    assert "toy blocks/sas · mlp_gain 0.5: left out" in told
    assert len(started) == 2 + 1  # the sweep, the other arm's run
    assert load(tmp_path / "out/records.jsonl").arms() == ["transformer"]

    assert _call(*words) == 0
    assert len(started) == 3 + 1 + 2  # the killed one, the arm's run, its evaluation
    table = capsys.readouterr().out
    assert "sas · mlp_gain 0.5" in table
    assert "transformer" in table
    losses = {}  # read here anew
    for path in (tmp_path / "out/rates").glob("*/*/records.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "measure" and line["metric"] == "loss":
                losses["1e-" + path.parent.name.rpartition("-")[2]] = line["value"]
    assert len(losses) == 2
    best = min(losses, key=losses.get)
    assert json.loads((tmp_path / "out/rates.json").read_text()) == {
        "toy blocks/transformer": "1e-2",
        "toy blocks/sas · mlp_gain 0.5": best,
    }
    records = load(tmp_path / "out/records.jsonl")
    assert records.labels() == ["toy blocks"]
    assert records.arms() == ["transformer", "sas · mlp_gain 0.5"]
    (sas,) = records.of("sas · mlp_gain 0.5")
    assert sas.header["train"]["learning_rate"] == float(best)
    assert [cell["task"] for cell in sas.cells] == ["perplexity"]
    assert (tmp_path / "out/report.html").exists()


# The runner by itself, on commands that take no time


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Python a shell, whose script is the command's first word."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift 2\neval "$1"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(shell))


def _commands(tmp_path: Path, *scripts: str) -> list[Command]:
    return [
        Command(name=f"one/{n}", words=(script,), records=tmp_path / f"{n}.jsonl", arm="", label="")
        for n, script in enumerate(scripts)
    ]


def test_failures_do_not_stop_the_others_and_are_tried_again(quick, tmp_path):
    said: list[str] = []
    commands = _commands(tmp_path, "echo no room; exit 3", f"echo x >> {tmp_path}/ran", "exit 4")
    failed = runner.run(commands, logs=tmp_path / "logs", jobs=1, say=said.append)
    assert [command.name for command in failed] == ["one/0", "one/2"]
    assert said[0] == f"[1/3] one/0: failed with 3: no room (all of it: {tmp_path}/logs/one/0.log)"
    assert said[2].startswith("[3/3] one/2: failed with 4")
    failed = runner.run(commands, logs=tmp_path / "logs", jobs=2, say=said.append)
    assert len(failed) == 2
    assert (tmp_path / "ran").read_text() == "x\n"  # the finished one ran once
    changed = _commands(tmp_path, "true", f"echo y >> {tmp_path}/ran", "true")
    assert runner.run(changed, logs=tmp_path / "logs", jobs=1, say=said.append) == []
    assert (tmp_path / "ran").read_text() == "x\ny\n"  # but with other words it is another


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_a_model_is_asked_as_soon_as_it_is_there_and_not_before(quick, tmp_path, jobs):
    done = tmp_path / "done"

    def command(name: str, script: str, model: str = "") -> Command:
        return Command(
            name=name,
            words=(f"{script} && echo {name} >> {done}",),
            records=tmp_path / name / "records.jsonl",
            model=tmp_path / model if model else None,
            arm="",
            label="",
        )

    commands = [
        command("a", f"sleep 0.5; mkdir -p {tmp_path}/a/final"),
        command("of-a", f"test -d {tmp_path}/a/final", "a/final"),
        command("b", f"mkdir -p {tmp_path}/b/final; sleep 1.5"),  # there, but not yet whole
        command("of-b", f"grep -qx b {done}", "b/final"),
        command("c", "exit 3"),
        command("of-c", "true", "c/final"),
    ]
    said: list[str] = []
    failed = runner.run(commands, logs=tmp_path / "logs", jobs=jobs, say=said.append)
    assert [one.name for one in failed] == ["c"]
    assert sum("of-c: left out, for want of its model" in line for line in said) == 1
    assert len(said) == 6
    assert {line.split("/")[0] for line in said} == {f"[{n}" for n in range(1, 7)}
    order = done.read_text().split()
    assert order == ["a", "of-a", "b", "of-b"]  # of a before b has ended, with any number of jobs
    runner.run(commands, logs=tmp_path / "logs", jobs=jobs, say=str)
    assert done.read_text().split() == order


def _record(*, diverged: str | None = None, loss: float | None = None, of: str = "loss") -> str:
    """A run of 8 tokens a window, its loss there and at another length."""
    train = {"sequence_length": 8}
    lines = [
        {"kind": "run", "run": "a", "preset": "a", "seed": 0, "train": train, "diverged": diverged},
        {"kind": "measure", "run": "a", "metric": of, "length": 8, "value": loss},
        {"kind": "measure", "run": "a", "metric": of, "length": 16, "value": 0.0},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_divergence_is_a_result(quick, tmp_path):
    said: list[str] = []
    (command,) = _commands(tmp_path, "exit 2")
    command.records.write_text(_record(diverged="at step 2"))
    assert runner.run([command], logs=tmp_path / "logs", jobs=1, say=said.append) == []
    assert runner.run([command], logs=tmp_path / "logs", jobs=1, say=said.append) == []
    assert len(said) == 1


@pytest.mark.parametrize("of", ["loss", "masked loss"])
@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((3.0, 2.5, 2.75), "2e-3"),
        ((3.0, None, 2.75), None),  # one is still to come
        ((3.0, math.inf, 3.5), "1e-3"),
        ((math.inf,) * 3, None),
    ],
)
def test_the_best_rate_has_the_lowest_loss_at_the_training_length(losses, best, of, tmp_path):
    arm = Arm("sas", ("1e-3", "2e-3", "4e-3"))
    one = Series(study=Study(name="x", arms=(arm,), tokens=1), arm=arm, output=tmp_path)
    for loss, command in zip(losses, one.sweep().values(), strict=True):
        if loss is not None:
            command.records.parent.mkdir(parents=True)
            diverged = "at step 2" if math.isinf(loss) else None
            value = None if diverged else loss
            command.records.write_text(_record(diverged=diverged, loss=value, of=of))
    assert one.best() == best


def test_nothing_to_sweep_and_nothing_finished(toy, quick, tmp_path, capsys):
    assert _call("toy", "--only", "transformer", "--output", str(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert "[1/1] runs/toy-blocks/transformer-seed0: failed with 127: " in told
    assert f"nothing was finished: {tmp_path}/out/logs says why" in told
    assert json.loads((tmp_path / "out/rates.json").read_text()) == {
        "toy blocks/transformer": "1e-2"
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_commands_save_and_starts_no_more(quick, tmp_path, number):
    saving = (
        f"trap 'echo saved >> {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/up$$; "
        "while true; do sleep 0.05; done"
    )
    said: list[str] = []
    commands = _commands(tmp_path, saving, saving, "true")

    def interrupt() -> None:
        while len([*tmp_path.glob("up*")]) < 2:
            threading.Event().wait(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Stopped) as stop:
        runner.run(commands, logs=tmp_path / "logs", jobs=2, say=said.append)
    assert stop.value.code == 128 + number
    assert (tmp_path / "saved").read_text() == "saved\nsaved\n"
    assert said == ["stopping 2, which save first; Ctrl-C again kills them"]
    assert not [*tmp_path.glob("logs/one/*.done")]


def test_threads_are_shared(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.torch, "get_num_threads", lambda: 7)
    commands = _commands(tmp_path, "echo $OMP_NUM_THREADS")
    runner.run(commands, logs=tmp_path / "logs", jobs=3, say=str)
    assert (tmp_path / "logs/one/0.log").read_text() == "2\n"


def test_records_are_joined_under_their_arm_and_label(tmp_path):
    measure = {"kind": "measure", "run": "a/seed0", "metric": "loss", "value": 2.0}
    files = {
        "6": [{"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0}, measure],
        "24": [
            {"kind": "run", "run": "a/seed0", "preset": "a", "seed": 0},
            {**measure, "value": 3.0},
        ],
    }
    commands = []
    for label, lines in files.items():
        path = tmp_path / f"{label}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "me')
        commands.append(Command(name=label, words=(), records=path, arm="a · b", label=label))
    commands.append(Command(name="", words=(), records=tmp_path / "none", arm="", label=""))
    records = load(collect(commands, tmp_path / "records.jsonl"))
    for label, loss in (("6", 2.0), ("24", 3.0)):
        assert records.labelled(label).values("a · b", "loss") == {0: loss}
