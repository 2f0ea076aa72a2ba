"""The stages of an experiment: rates swept; seeds at each arm's best; what these are asked."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from clearhead.data import prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.compare import RECORDS, SEAL
from clearhead.experiments.reproduce.runner import Command, run
from clearhead.experiments.reproduce.study import Series
from clearhead.records import jsonl
from clearhead.records.files import read_json, write_json, write_text
from clearhead.records.lock import hold_folder

RATES = "rates.json"


def sweeps(series: Iterable[Series]) -> list[Command]:
    """Every arm with each of its rates, where it has a choice."""
    return [command for one in series for command in one.sweep().values()]


def rates(series: Iterable[Series], output: Path) -> dict[str, str]:
    """{study/arm: rate}: what rates.json has, and the best of every other sweep that is whole."""
    path = output / RATES
    found: dict[str, str] = {}
    if path.exists():
        found = read_json(path, "delete it to choose the rates from the sweeps again")
    for one in series:
        if one.key not in found and (best := one.best()) is not None:
            found[one.key] = best
    return found


def runs(series: Sequence[Series], rates: dict[str, str]) -> dict[Command, list[Command]]:
    """{training: what its model is asked}, of every arm whose rate is known, with every seed; a
    seed of all arms before the next."""
    seeds = sorted({seed for one in series for seed in one.study.seeds})
    return {
        one.training(rates[one.key], seed): one.evaluations(seed)
        for seed in seeds
        for one in series
        if seed in one.study.seeds and one.key in rates
    }


def reproduce(
    series: Sequence[Series], output: Path, *, jobs: int, say: Callable[[str], None]
) -> tuple[Path, int]:
    """Run every stage; what is finished is not run again, and what fails is left out.

    Returns:
        The records of all runs and evaluations, OUTPUT/records.jsonl, and how many commands failed.

    Raises:
        ClearheadError: for texts that cannot be had, and where nothing was finished.
        Stopped: after SIGINT or SIGTERM.
    """
    for text in {one.study.text: None for one in series}:
        prepare(text, progress=say)  # once, before the commands would each
    with hold_folder(output):
        return _reproduce(series, output, jobs, say)


def _reproduce(
    series: Sequence[Series], output: Path, jobs: int, say: Callable[[str], None]
) -> tuple[Path, int]:
    failed = 0

    def stage(name: str, commands: list[Command]) -> None:
        nonlocal failed
        say(f"{name}: {len(commands)} commands")
        failed += len(run(commands, logs=output / "logs", jobs=jobs, say=say))

    stage("rates", sweeps(series))
    chosen = rates(series, output)
    write_json(output / RATES, chosen)
    for one in series:
        if one.key not in chosen:
            say(f"{one.key}: left out, since its sweep gave no rate")
    asked = runs(series, chosen)
    each = [command for trained, questions in asked.items() for command in (trained, *questions)]
    stage("runs and evaluations", each)
    return collect([*chain.from_iterable(asked.values()), *asked], output / RECORDS), failed


def collect(commands: Iterable[Command], target: Path) -> Path:
    """Join the records of commands, each under its arm and label.

    Of two headers of a run the later counts: let the training's come last, which says more.

    Raises:
        ClearheadError: where there are none.
    """
    lines = list[str]()
    for command in commands:
        if not command.records.exists():
            continue
        for line in jsonl.read(command.records):
            line["run"] = f"{command.label}/{line['run']}"
            if line["kind"] == "run":
                line |= {"arm": command.arm, "label": command.label}
                line.pop(SEAL, None)  # of these lines by their own names
            lines.append(jsonl.encode(line))
    if not lines:
        raise ClearheadError(f"nothing was finished: {target.parent / 'logs'} says why")
    write_text(target, "".join(lines))
    return target
