"""Sweeps of learning rates that go on beyond an edge, by jobs that take no time."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.lab import processes
from clearhead.lab.configs import Job
from clearhead.lab.sweep_configs import ConvertConfig
from clearhead.papers import stages
from clearhead.papers.study import Study, beyond
from clearhead.progress import Work
from clearhead.records.jsonl import append
from clearhead.records.loading import load
from clearhead.records.runs import Run

# A model to start from has a tokenizer of its own, so that no text is prepared.
STUDY = Study(base="model", seeds=(0,), label="toy", sweep_tokens=4096)


@dataclass
class Lab:
    """A folder whose jobs are recorded, each at a loss that hangs on its rate."""

    folder: Path
    best: dict[str, float]
    """{arm: its best rate}; twice or half of it has a loss 1 higher."""
    diverging: float = math.inf
    """Rates from here on diverge."""
    failing: tuple[float, ...] = ()
    stopping: tuple[float, ...] = ()
    """Rates at which the whole command is stopped."""
    swept: list[tuple[str, float]] = field(default_factory=list)
    """Every (arm, rate) of a sweep that was started."""
    said: list[str] = field(default_factory=list)
    work: Work = field(default_factory=lambda: Work("job"))

    def trial(self, arm: str, *rates: float) -> Study:
        return replace(STUDY.arm("transformer", *rates), called=arm, output=self.folder)

    def reproduce(self, *trials: Study) -> int:
        """The number of failed jobs."""
        self.work = Work("job")
        return stages.reproduce(trials, self.folder, jobs=9, work=self.work)[1]

    def runs(self) -> dict[str, Run]:
        return {run.arm: run for run in load(self.folder / "records.jsonl").runs}

    def _start(self, job: Job, log: Path, *_: Any) -> SimpleNamespace:
        done, failed = (SimpleNamespace(exitcode=code, kill=lambda: None) for code in (0, 1))
        lines: list[dict[str, Any]] = []
        if not isinstance(job.config, ConvertConfig):
            rate = job.config.train.learning_rate
            if job.name.startswith("sweeps/"):
                self.swept.append((job.arm, rate))
                if rate in self.stopping:
                    raise ClearheadError("stopped")
                if rate in self.failing:
                    log.write_text("no space left")
                    return failed
            train = {"learning_rate": rate, "tokens": job.config.train.tokens, "sequence_length": 8}
            if job.records.exists():  # refused, as by compare
                before = load(job.records).runs[0].header["train"]
                log.write_text(f"{before} was asked for")
                return done if before == train else failed
            lines = [{"kind": "run", "run": "one", "preset": "transformer", "train": train}]
            lines[0] |= {"seed": 0, "diverged": "at step 3" if rate >= self.diverging else None}
            if rate < self.diverging:
                loss = 2 + abs(math.log2(rate / self.best[job.arm]))
                measure = {"metric": "loss", "length": 8, "value": loss}
                lines.append({"kind": "measure", "run": "one", **measure})
        append(job.records, *lines or [{}])
        if job.model is not None:
            job.model.mkdir(parents=True, exist_ok=True)
        return done


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lab]:
    said: list[str] = []
    for module in (stages, processes):
        monkeypatch.setattr(module, "say", said.append)

    def made(**settings: Any) -> Lab:
        lab = Lab(tmp_path / "out", said=said, **settings)
        monkeypatch.setattr(processes, "start", lab._start)
        return lab

    return made


def _chosen(run: Run) -> tuple[float, list[float], bool]:
    return run.header["train"]["learning_rate"], run.header["swept"], run.at_edge


def test_the_next_rate_is_to_the_edge_as_the_edge_is_to_its_neighbour():
    for rates, best, further in (
        ((1e-5, 3e-5), 1e-5, 3.3e-6),
        ((1e-5, 3e-5), 3e-5, 9e-5),
        ((1e-3, 2e-3, 6e-3), 6e-3, 1.8e-2),
        ((6e-3, 1e-3, 2e-3), 2e-3, None),
    ):
        losses = {rate: abs(math.log(rate / best)) for rate in rates}
        assert beyond(losses) == further
        assert beyond({**losses, rates[1]: None}) is None
        assert beyond(dict.fromkeys(rates, math.inf)) is None


@pytest.mark.parametrize(
    ("best", "further", "edge"),
    [
        (1e-3, [5e-4], False),
        (2e-3, [], False),
        (4e-3, [8e-3], False),
        (8e-3, [8e-3, 1.6e-2], False),
        (1e-5, [5e-4, 2.5e-4, 1.3e-4], True),  # three at most
    ],
)
def test_a_sweep_goes_on_until_its_best_rate_lies_inside(best, further, edge, lab):
    lab = lab(best={"arm": best})
    given = [1e-3, 2e-3, 4e-3]
    assert lab.reproduce(lab.trial("arm", *given)) == 0
    assert lab.swept == [("arm", rate) for rate in given + further]
    rate = min(given + further, key=lambda one: abs(math.log(one / best)))
    assert _chosen(lab.runs()["arm"]) == (rate, sorted(given + further), edge)


def test_the_next_rates_of_several_arms_are_one_stage(lab):
    lab = lab(best={"low": 1e-3, "high": 8e-3, "inside": 2e-3})
    lab.reproduce(*(lab.trial(arm, 1e-3, 2e-3, 4e-3) for arm in lab.best))
    assert [line for line in lab.said if line.endswith(" jobs")] == [
        "9 jobs",  # the sweeps
        "3 jobs",  # the next rates of two, and the run of the third
        "2 jobs",
        "1 jobs",
    ]
    assert lab.work.place.startswith("job 15 of 15")


def test_a_rate_that_diverges_is_an_edge_and_an_arm_whose_rates_all_do_is_left_out(lab):
    some = lab(best={"arm": 1e-1}, diverging=8e-3)
    some.reproduce(some.trial("arm", 2e-3, 4e-3))
    assert _chosen(some.runs()["arm"]) == (4e-3, [2e-3, 4e-3, 8e-3], False)
    shutil.rmtree(some.folder)
    every = lab(best={"arm": 1e-3}, diverging=0)
    with pytest.raises(ClearheadError, match="nothing was finished"):
        every.reproduce(every.trial("arm", 2e-3, 4e-3))
    assert "toy/arm: left out, since its sweep gave no rate" in every.said
    assert len(every.swept) == 2


@pytest.mark.parametrize("at", [2e-3, 1e-3, 5e-4])
def test_a_sweep_that_was_stopped_goes_on_where_it_was(at, lab):
    lab = lab(best={"arm": 5e-4}, stopping=(at,))
    trial = lab.trial("arm", 1e-3, 2e-3)
    with pytest.raises(ClearheadError, match="stopped"):
        lab.reproduce(trial)
    lab.stopping = ()
    lab.reproduce(trial)
    assert {*lab.swept} == {("arm", rate) for rate in (1e-3, 2e-3, 5e-4, 2.5e-4)}
    assert _chosen(lab.runs()["arm"]) == (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3], False)
    lab.swept = []
    (lab.folder / "records.jsonl").unlink()  # what was swept is known from the sweeps
    lab.reproduce(trial)
    assert lab.swept == []
    assert _chosen(lab.runs()["arm"]) == (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3], False)


def test_a_failed_rate_beyond_the_edge_leaves_the_best_before_it(lab):
    lab = lab(best={"arm": 1e-4}, failing=(2.5e-4,))
    trial = lab.trial("arm", 1e-3, 2e-3)
    assert lab.reproduce(trial) == 0  # nothing that the same command would try again
    assert "toy/arm: goes on at 5e-4, since sweeps/toy/arm-2.5e-4 did not finish" in lab.said
    assert _chosen(lab.runs()["arm"]) == (5e-4, [5e-4, 1e-3, 2e-3], True)
    assert lab.reproduce(trial) == 0
    assert lab.swept.count(("arm", 2.5e-4)) == 1


def test_an_arm_without_one_of_its_own_rates_is_left_out_beside_one_that_goes_on(lab):
    lab = lab(best={"arm": 1e-3, "other": 1e-3}, failing=(2e-3,))
    assert lab.reproduce(lab.trial("arm", 1e-3, 2e-3), lab.trial("other", 1e-3, 4e-3)) == 1
    assert {*lab.runs()} == {"other"}
    assert ("other", 2.5e-4) in lab.swept
    assert ("arm", 5e-4) not in lab.swept


def test_a_run_of_another_rate_does_not_count(lab):
    lab = lab(best={"arm": 5e-4, "other": 2e-3})
    other = lab.trial("other", 2e-3)
    assert lab.reproduce(lab.trial("arm", 2e-3), other) == 0
    assert lab.swept == []  # an arm with one rate
    assert "swept" not in lab.runs()["arm"].header
    assert {*lab.runs()} == {"arm", "other"}
    assert lab.reproduce(lab.trial("arm", 1e-3), other) == 1
    assert any(line.startswith("runs/toy/arm-seed0: failed with 1") for line in lab.said)
    assert {*lab.runs()} == {"other"}


def test_losses_of_a_sweep_with_other_settings_choose_no_rate(lab):
    lab = lab(best={"arm": 1e-3, "other": 2e-3}, stopping=(2e-3,))
    trial, other = lab.trial("arm", 4e-4, 1e-3, 3e-3), lab.trial("other", 2e-3)
    with pytest.raises(ClearheadError, match="stopped"):
        lab.reproduce(trial, lab.trial("other", 2e-3, 4e-3))
    longer = replace(trial, sweep_tokens=8192)
    assert lab.reproduce(longer, other) == 3  # every rate of the sweep
    assert "toy/arm: left out, since its sweep gave no rate" in lab.said
    assert {*lab.runs()} == {"other"}
    assert lab.reproduce(trial, other) == 0
    assert {*lab.runs()} == {"arm", "other"}


def _without_runs(lab: Lab) -> None:
    """The folder as a command leaves it that was stopped before its first run."""
    shutil.rmtree(lab.folder / "runs")
    for mark in lab.folder.glob("logs/runs/toy/arm-*"):
        mark.unlink()
    lab.swept = []


def test_rates_are_those_of_their_sweeps_wherever_the_folder_is(lab, tmp_path):
    lab = lab(best={"arm": 2e-3})

    def within(words: str) -> Study:
        by = ConvertConfig(model="", output=Path(), to=(words,))
        return replace(lab.trial("arm", 1e-3, 2e-3, 4e-3), conversion=by)

    lab.reproduce(within("sink"))
    _without_runs(lab)
    lab.folder = lab.folder.rename(tmp_path / "moved")
    assert lab.reproduce(replace(within("sink"), track=("wandb",))) == 0
    assert {*lab.runs()} == {"arm"}
    assert not lab.swept
    _without_runs(lab)
    lab.reproduce(within("gated"))
    assert len(lab.swept) == 3  # losses of another start choose no rate
