"""The stages of an experiment: sweeps of rates, runs of all seeds at the best, evaluations."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from clearhead.data import prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.compare import SEAL
from clearhead.experiments.configs import RECORDS
from clearhead.experiments.job_runner import gpus, run
from clearhead.experiments.jobs import Job
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import read_json, write_json, write_text
from clearhead.records.lock import hold_folder
from clearhead.reproduce.trials import Trial, written

RATES = "rates.json"


def sweeps(trials: Iterable[Trial]) -> list[Job]:
    """Every arm with each of its rates, where it has several."""
    return [job for one in trials for job in one.sweep().values()]


def rates(trials: Iterable[Trial], output: Path) -> dict[str, float]:
    """{table/arm: rate}: those of rates.json, and the best of every other complete sweep."""
    found = settled(output)
    for one in trials:
        if one.key not in found and (best := one.best()) is not None:
            found[one.key] = best
    return found


def settled(output: Path) -> dict[str, float]:
    """{table/arm: rate} of rates.json; these arms are not swept again."""
    path = output / RATES
    chosen: dict[str, str] = {}
    if path.exists():
        chosen = read_json(path, "delete it to choose the rates from the sweeps again")
    return {key: float(rate) for key, rate in chosen.items()}


def runs(trials: Sequence[Trial], rates: dict[str, float]) -> dict[Job, list[Job]]:
    """{training: its evaluations}, of every arm whose rate is known, with every seed; one seed of
    all arms comes before the next."""
    seeds = sorted({seed for one in trials for seed in one.config.seeds})
    return {
        one.training(rates[one.key], seed): [*one.evaluations(seed)]
        for seed in seeds
        for one in trials
        if seed in one.config.seeds and one.key in rates
    }


def reproduce(
    trials: Sequence[Trial],
    output: Path,
    *,
    jobs: int,
    say: Callable[[str], None],
    work: Work | None = None,
) -> tuple[Path, int]:
    """Run every stage; what is finished is not run again, and what fails is left out.

    Args:
        work: shows how many jobs of all stages are done.

    Returns:
        The records of all runs and evaluations, OUTPUT/records.jsonl, and how many jobs failed.

    Raises:
        ClearheadError: for texts that cannot be had, and where nothing was finished.
        Stopped: after SIGINT or SIGTERM.
    """
    for text in {one.config.data: None for one in trials}:
        prepare(text, progress=say)  # once, before the jobs would each
    with hold_folder(output):
        return _reproduce(trials, output, jobs, say, Work("job") if work is None else work)


def _reproduce(
    trials: Sequence[Trial], output: Path, jobs: int, say: Callable[[str], None], work: Work
) -> tuple[Path, int]:
    failed = 0

    def stage(name: str, listed: list[Job]) -> None:
        nonlocal failed
        say(f"{name}: {len(listed)} jobs")
        logs = output / "logs"
        failed += len(run(listed, logs=logs, jobs=jobs, say=say, work=work, devices=gpus()))

    known = settled(output)
    swept = sweeps(one for one in trials if one.key not in known)
    later = sum(len(one.config.seeds) * (1 + len(one.table.questions)) for one in trials)
    work.start(len(swept) + later)
    stage("rates", swept)
    chosen = rates(trials, output)
    write_json(output / RATES, {key: written(rate) for key, rate in chosen.items()})
    for one in trials:
        if one.key not in chosen:
            say(f"{one.key}: left out, since its sweep gave no rate")
    asked = runs(trials, chosen)
    each = [job for trained, questions in asked.items() for job in (trained, *questions)]
    stage("runs and evaluations", each)
    return collect([*chain.from_iterable(asked.values()), *asked], output / RECORDS), failed


def collect(jobs: Iterable[Job], target: Path) -> Path:
    """Join the records of jobs, each under its arm and label.

    Of two headers of a run the later counts: let the training's come last, which says more.

    Raises:
        ClearheadError: where there are none.
    """
    lines = list[str]()
    for job in jobs:
        if not job.records.exists():
            continue
        for line in jsonl.read(job.records):
            line["run"] = f"{job.label}/{line['run']}"
            if line["kind"] == "run":
                line |= {"arm": job.arm, "label": job.label}
                line.pop(SEAL, None)  # of these lines by their own names
            lines.append(jsonl.encode(line))
    if not lines:
        raise ClearheadError(f"nothing was finished: {target.parent / 'logs'} says why")
    write_text(target, "".join(lines))
    return target
