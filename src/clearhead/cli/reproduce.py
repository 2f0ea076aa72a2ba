"""clearhead reproduce: a paper's experiment, at a scale."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.cli.report import publish
from clearhead.errors import ClearheadError, choose
from clearhead.experiments.reproduce import EXPERIMENTS, stages
from clearhead.experiments.reproduce.runner import Stopped
from clearhead.experiments.reproduce.study import Series, Study
from clearhead.ranges import Count, Natural
from clearhead.terminal import say, write


@dataclass(frozen=True, kw_only=True)
class Command:
    """An experiment, and how much of it."""

    experiment: Positional[str]
    """blocks, long-context, encoders or outliers."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny runs on two CPU cores, small takes minutes a model on one GPU, paper is the published
    recipe, for a cluster."""
    output: Path | None = None
    """Folder of everything made; runs/EXPERIMENT-SCALE unless given. The same command goes on."""
    jobs: Count = 1
    """Commands that run at once, each with its share of the CPU's threads."""
    seeds: tuple[Natural, ...] = ()
    """Instead of the experiment's own."""
    only: tuple[str, ...] = ()
    """Arms, by name or pattern, such as "sas*"; all unless given."""
    data: tuple[str, ...] = ()
    """Sources to learn from, instead of the experiment's own."""
    test_data: tuple[str, ...] = ()
    """Sources of the evaluations, read whole, instead of the experiment's own."""
    dry_run: bool = False
    """Print the commands that are known so far, and run nothing."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="reproduce",
        description="Run a paper's experiment: sweep the rates of each arm, train every seed at "
        "the best, evaluate, report.",
    )
    output = command.output or Path("runs") / f"{command.experiment}-{command.scale}"
    series = _series(command, output)
    if command.dry_run:
        _print(series, output)
        return 0
    try:
        records, failed = stages.reproduce(series, output, jobs=command.jobs, say=say)
    except Stopped as stop:
        say("stopped: the same command goes on from here")
        return stop.code
    title = f"clearhead reproduce {command.experiment}, {command.scale}"
    publish([records], output / "report.html", title=title)
    if failed:
        say(f"{failed} commands failed: the same command tries them again")
    return 1 if failed else 0


def _series(command: Command, output: Path) -> list[Series]:
    name = choose("experiment", command.experiment, EXPERIMENTS)
    studies = [_changed(study, command) for study in EXPERIMENTS[name][command.scale]]
    series = [
        Series(study=study, arm=arm, output=output) for study in studies for arm in study.arms
    ]
    names = dict.fromkeys(one.arm.compared.name for one in series)
    for pattern in command.only:
        if not any(fnmatchcase(arm, pattern) for arm in names):
            raise ClearheadError(f"only names {pattern!r}: arms are {', '.join(names)}")
    patterns = command.only or ("*",)
    return [one for one in series if any(fnmatchcase(one.arm.compared.name, p) for p in patterns)]


def _changed(study: Study, command: Command) -> Study:
    if command.seeds:
        study = replace(study, seeds=command.seeds)
    if command.data:
        study = replace(study, text=replace(study.text, data=command.data))
    if command.test_data and not study.test:
        raise ClearheadError(f"test_data has no effect on {command.experiment}: leave it out")
    if command.test_data:
        study = replace(study, test=("--data.data", *command.test_data, "--split", "all"))
    return study


def _print(series: list[Series], output: Path) -> None:
    rates = stages.rates(series, output)
    runs = stages.runs(series, rates)
    known = {
        "rates": stages.sweeps(series),
        "runs": runs,
        "evaluations": chain.from_iterable(runs.values()),
    }
    for name, commands in known.items():
        write("\n".join([f"# {name}", *map(str, commands)]))
    if later := [one.key for one in series if one.key not in rates]:
        write(f"# not known yet, for want of a rate: {', '.join(later)}")
