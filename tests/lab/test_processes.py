"""Jobs in processes, several at a time, that take no time."""

import json
import math
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from clearhead.lab import processes as runner
from clearhead.lab.configs import Job
from clearhead.lab.processes import Stopped, run
from clearhead.lab.sweep_configs import DiagnoseConfig
from clearhead.papers.stages import collect
from clearhead.papers.study import loss
from clearhead.records.jsonl import append
from clearhead.report import load, page_of


@dataclass(frozen=True)
class Script:
    words: str


class Shell(subprocess.Popen):
    """A process with the name that `multiprocessing` has for its end."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()


def _shell(job: Job, log: Path, device: str | None, threads: int) -> Shell:
    seen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    with log.open("ab") as written:
        return Shell(
            ["sh", "-c", job.config.words],
            stdout=written,
            stderr=written,
            env={**os.environ, **seen},
            process_group=0,
        )


@pytest.fixture(autouse=True)
def _shells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are scripts of a shell, without a GPU, and ask often whether they have ended."""
    monkeypatch.setattr(runner, "start", _shell)
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(runner, "gpus", tuple)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the runner prints."""
    lines: list[str] = []
    monkeypatch.setattr(runner, "say", lines.append)
    return lines


def _scripts(tmp_path: Path, *scripts: str) -> list[Job]:
    return [
        Job(name=f"one/{n}", config=Script(words), records=tmp_path / f"{n}.jsonl")
        for n, words in enumerate(scripts)
    ]


def test_failures_do_not_stop_the_others_and_are_tried_again(tmp_path, said):
    ran = f"touch {tmp_path}/1.jsonl; echo %s >> {tmp_path}/ran"
    commands = _scripts(tmp_path, "echo no room; exit 3", ran % "x", "exit 4")
    failed = run(commands, logs=tmp_path / "logs", jobs=1)
    assert [command.name for command in failed] == ["one/0", "one/2"]
    assert said[0] == f"one/0: failed with 3: no room (all of it: {tmp_path}/logs/one/0.log)"
    assert said[2].startswith("one/2: failed with 4")
    failed = run(commands, logs=tmp_path / "logs", jobs=2)
    assert len(failed) == 2
    assert (tmp_path / "ran").read_text() == "x\n"  # the finished one ran once
    changed = _scripts(tmp_path, "true", ran % "y", "true")
    assert run(changed, logs=tmp_path / "logs", jobs=1) == []
    assert (tmp_path / "ran").read_text() == "x\ny\n"  # but with other words it is another


def _model(tmp_path: Path, name: str, script: str, after: Job | None = None) -> Job:
    """A job with a folder of its own, which writes its name to tmp_path/done."""
    folder = tmp_path / name
    return Job(
        name=name,
        config=Script(
            f"mkdir -p {folder} && {script} && echo {name} >> {tmp_path}/done && "
            f"touch {folder}/records.jsonl"
        ),
        records=folder / "records.jsonl",
        model=folder / "final",
        after=after,
    )


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_model_is_asked_as_soon_as_it_is_there_and_not_before(tmp_path, jobs, said):
    done = tmp_path / "done"
    a = _model(tmp_path, "a", f"sleep 0.2; mkdir -p {tmp_path}/a/final")
    b = _model(tmp_path, "b", f"mkdir -p {tmp_path}/b/final; sleep 0.6")  # there, not yet whole
    c = _model(tmp_path, "c", "exit 3")
    commands = [
        a,
        _model(tmp_path, "of-a", f"test -d {tmp_path}/a/final", after=a),
        b,
        _model(tmp_path, "of-b", f"grep -qx b {done}", after=b),
        c,
        _model(tmp_path, "of-c", "true", after=c),
    ]
    failed = run(commands, logs=tmp_path / "logs", jobs=jobs)
    assert [one.name for one in failed] == ["c"]
    assert sum("of-c: left out, for want of its model" in line for line in said) == 1
    assert len(said) == 6
    assert {line.split(":")[0] for line in said} == {"a", "of-a", "b", "of-b", "c", "of-c"}
    order = done.read_text().split()
    assert order == ["a", "of-a", "b", "of-b"]  # of a before b has ended, with any number of jobs
    run(commands, logs=tmp_path / "logs", jobs=jobs)
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


def test_a_divergence_is_a_result_and_a_failed_conversion_is_none(tmp_path, said):
    """Whatever a killed command left in its folder: a record that is no list of lines."""
    conversion, command = _scripts(tmp_path, "echo it exists; exit 1", "exit 2")
    conversion.records.write_text(json.dumps({"kind": "conversion"}, indent=2))
    command.records.write_text(_record(diverged="at step 2"))
    assert run([conversion, command], logs=tmp_path / "logs", jobs=1) == [conversion]
    assert said[0].startswith("one/0: failed with 1: it exists (all of it: ")
    assert said[1].startswith("one/1: 0 s")
    assert run([command], logs=tmp_path / "logs", jobs=1) == []
    assert len(said) == 2


@pytest.mark.parametrize("of", ["loss", "masked loss"])
def test_the_loss_of_a_sweep_s_run_is_at_the_training_length(of, tmp_path):
    (tmp_path / "a").write_text(_record(loss=2.5, of=of))
    (tmp_path / "b").write_text(_record(diverged="at step 2", of=of))
    assert (loss(tmp_path / "a"), loss(tmp_path / "b")) == (2.5, math.inf)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_commands_save_and_starts_no_more(tmp_path, number, said):
    saving = (
        f"trap 'echo saved >> {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/up$$; "
        "while true; do sleep 0.05; done"
    )
    commands = _scripts(tmp_path, saving, saving, "true")

    def interrupt() -> None:
        while len([*tmp_path.glob("up*")]) < 2:
            threading.Event().wait(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Stopped) as stop:
        run(commands, logs=tmp_path / "logs", jobs=2)
    assert stop.value.code == 128 + number
    assert (tmp_path / "saved").read_text() == "saved\nsaved\n"
    assert said == ["stopping 2, which save first; Ctrl-C again kills them"]
    assert not [*tmp_path.glob("logs/one/*.done")]


def test_jobs_are_spread_over_the_gpus_and_it_is_said_where(tmp_path, said, monkeypatch):
    commands = _scripts(tmp_path, *["echo $CUDA_VISIBLE_DEVICES; sleep 0.3"] * 5)
    monkeypatch.setattr(runner, "gpus", lambda: ("0", "MIG-a"))
    run(commands, logs=tmp_path / "logs", jobs=4)
    seen = [(tmp_path / f"logs/one/{number}.log").read_text().strip() for number in range(5)]
    assert seen[:4] == ["0", "MIG-a", "0", "MIG-a"]  # two on each
    told = [line for line in said if "on GPU" in line]
    assert told == [f"one/{number}: on GPU {device}" for number, device in enumerate(seen)]


def test_questions_to_a_model_that_is_made_anew_are_asked_again(tmp_path, said):
    """Their commands name its folder, and are the same as before."""
    done = tmp_path / "done"

    def trained(script: str) -> list[str]:
        model = _model(tmp_path, "run", f"mkdir -p {tmp_path}/run/final && {script}")
        commands = [model, _model(tmp_path, "question", "true", model)]
        done.write_text("")
        run(commands, logs=tmp_path / "logs", jobs=2)
        return done.read_text().split()

    assert trained("true") == ["run", "question"]
    assert trained("true") == []
    assert trained("sleep 0") == ["run", "question"]  # with other settings
    (tmp_path / "run/records.jsonl").unlink()
    assert trained("sleep 0") == ["run", "question"]
    assert trained("exit 3") == []  # and the model of before is not the one asked for
    assert said[-1] == "question: left out, for want of its model"


def test_a_diagnosis_and_a_quantisation_are_joined_to_the_run_of_their_model(tmp_path):
    train = {"sequence_length": 8}
    head = {"kind": "run", "run": "t/seed0", "preset": "t", "seed": 0, "train": train}
    final = {"kind": "run", "run": "final"}
    share = {"kind": "measure", "run": "final", "metric": "kurtosis", "tokens": "rest", "cell": "c"}
    cost = {"kind": "measure", "run": "final", "metric": "perplexity", "cell": "c"}
    closing = {"kind": "cell", "run": "final", "cell": "c", "task": "x", "at": {}, "options": {}}
    closing["made"] = {}
    files = {
        "run": [head, {**share, "run": "t/seed0", "value": 9.0}],
        "inside": [
            final | {"study": "diagnosis"},
            share | {"value": 5.0},
            share | {"value": 6.0, "layer": 3},
            {"kind": "curve", "run": "final", "x": [], "y": [], "cell": "c"},
            closing | {"lines": 3},
        ],
        "bits": [
            final | {"study": "quantization"},
            cost | {"value": 20.0, "items": [19.0, 21.0]},
            cost | {"value": 30.0, "scheme": "w8a8-coarse", "items": [29.0, 31.0]},
            closing | {"lines": 2},
        ],
    }
    files["run"][1].pop("cell")
    asked, jobs = DiagnoseConfig(models=("final",)), []
    for name, lines in files.items():
        path = tmp_path / f"{name}.jsonl"
        append(path, *lines)
        with path.open("a") as file:
            file.write('{"kind": "me')  # as a kill leaves it
        jobs.append(Job(name=name, config=asked, records=path, arm="dense", label="r", seed=3))
    records = load(collect(jobs, tmp_path / "records.jsonl"))
    (run,) = records.of("dense")
    assert (run.seed, run.study, run.label) == (3, "comparison", "r")
    assert run.value("kurtosis", tokens="rest") == 5.0  # of the question, asked on its own text
    assert not run.select("kurtosis", layer=3)
    assert run.value("perplexity", scheme="w8a8-coarse") == 30.0
    assert run.sequence_length == 8  # the training's header says more
    assert "What few bits cost" in [one.title for one in page_of(records).sections]
