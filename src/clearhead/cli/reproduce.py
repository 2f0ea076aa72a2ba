"""clearhead reproduce: a paper's experiment at one of three scales."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError, choose
from clearhead.experiments.configs import EvaluateSettings, FinetuneJob
from clearhead.metavars import Experiment, Pattern, Source
from clearhead.ranges import Count, Natural
from clearhead.reproduce import EXPERIMENTS
from clearhead.reproduce.trials import Table, Trial
from clearhead.terminal import say, write
from clearhead.train.config import Tracker


@dataclass(frozen=True, kw_only=True)
class Command:
    """An experiment and its scale."""

    experiment: Positional[Experiment] = ""
    """Experiment to run; --list prints them."""
    list: bool = False
    """Print the experiments, each with its paper, its question and its scales."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny runs on two CPU cores, small takes minutes a model on one GPU, paper is the published
    recipe, for a cluster."""
    output: Path | None = None
    """Folder for everything that is made; runs/EXPERIMENT-SCALE where not given. The same command
    goes on where it stopped."""
    jobs: Count = 1
    """Jobs that run at once, each with its share of the CPU's threads."""
    seeds: tuple[Natural, ...] = ()
    """Seeds, in place of the experiment's own."""
    only: tuple[Pattern, ...] = ()
    """Arms to run, by name or pattern, such as "sas*"; all where none is given."""
    data: tuple[Source, ...] = ()
    """Sources of the training text, in place of the experiment's own."""
    test_data: tuple[Source, ...] = ()
    """Sources of the evaluations' text, read whole, in place of the experiment's own."""
    track: tuple[Tracker, ...] = ()
    """Trackers to log every training to, beside metrics.jsonl; each needs its extra."""
    dry_run: bool = False
    """Print the commands that are known so far, and run nothing."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="reproduce",
        description="Run a paper's experiment: sweep the rates of each arm, train every seed at "
        "the best, evaluate, report.",
        examples=("--list", 'blocks --jobs 2 --only transformer "sas*"'),
    )
    if command.list:
        for one in EXPERIMENTS.values():
            write(f"{one.name}: {one.question} {one.paper}; {', '.join(one.scales)}")
        return 0
    from clearhead.cli.publishing import publish
    from clearhead.progress import Line
    from clearhead.reproduce import stages
    from clearhead.reproduce.runner import Stopped
    from clearhead.train import make_trackers

    output = command.output or Path("runs") / f"{command.experiment}-{command.scale}"
    trials = _trials(command, output)
    if command.dry_run:
        _print(trials, output)
        return 0
    make_trackers(command.track)  # refuses one that is not installed
    try:
        with Line(unit="job") as work:
            records, failed = stages.reproduce(
                trials, output, jobs=command.jobs, say=say, work=work
            )
    except Stopped as stop:
        say("stopped: the same command goes on from here")
        return stop.code
    title = f"clearhead reproduce {command.experiment}, {command.scale}"
    publish([records], output / "report.html", title=title)
    if failed:
        say(f"{failed} jobs failed: the same command tries them again")
    return 1 if failed else 0


def _trials(command: Command, output: Path) -> Sequence[Trial]:
    experiment = EXPERIMENTS[choose("experiment", command.experiment, EXPERIMENTS)]
    scale = choose(f"scale of {experiment.name}", command.scale, experiment.scales)
    trials = [
        replace(one, output=output, table=_changed(one.table, command))
        for one in experiment.trials(scale)
    ]
    names = dict.fromkeys(one.arm.name for one in trials)
    for pattern in command.only:
        if not any(fnmatchcase(arm, pattern) for arm in names):
            raise ClearheadError(f"only names {pattern!r}: arms are {', '.join(names)}")
    patterns = command.only or ("*",)
    return [one for one in trials if any(fnmatchcase(one.arm.name, p) for p in patterns)]


def _changed(table: Table, command: Command) -> Table:
    """The table with the seeds and texts of the command in place of its own."""
    config = replace(table.config, track=command.track)
    questions = {
        name: replace(one, track=command.track) if isinstance(one, FinetuneJob) else one
        for name, one in table.questions.items()
    }
    if command.seeds:
        config = replace(config, seeds=command.seeds)
    if command.data:
        config = replace(config, data=replace(config.data, data=command.data))
    if command.test_data:
        asked = {n: q for n, q in questions.items() if isinstance(q, EvaluateSettings)}
        if not asked:
            raise ClearheadError(f"test_data has no effect on {command.experiment}: leave it out")
        for name, question in asked.items():
            text = replace(question.data, data=command.test_data)
            questions[name] = replace(question, data=text, split="all")
    return replace(table, config=config, questions=questions)


def _print(trials: Sequence[Trial], output: Path) -> None:
    from clearhead.reproduce import stages

    rates = stages.rates(trials, output)
    runs = stages.runs(trials, rates)
    known = {
        "rates": stages.sweeps(trials),
        "runs": runs,
        "evaluations": chain.from_iterable(runs.values()),
    }
    for name, jobs in known.items():
        write("\n".join([f"# {name}", *map(str, jobs)]))
    if later := [one.key for one in trials if one.key not in rates]:
        write(f"# not known yet, for want of a rate: {', '.join(later)}")
