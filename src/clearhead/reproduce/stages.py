"""The stages of an experiment: models to start from, sweeps of rates, runs of all seeds at the
best, evaluations."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from clearhead.data import prepare
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import RECORDS
from clearhead.experiments.jobs import Job
from clearhead.experiments.processes import Start, finished_as, is_finished, run
from clearhead.experiments.sweep_configs import DiagnoseConfig, SweepConfig
from clearhead.models.conversion import require_convertible
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import read_json, write_json, write_text
from clearhead.records.identity import differences
from clearhead.records.lock import hold_folder
from clearhead.records.runs import COMPARISON, DIAGNOSIS, DIMENSIONS, measure_key
from clearhead.reproduce.study import Study, written

RATES = "rates.json"
BY_LAYER = ("similarity", "effective_rank", "beta_over_alpha_values", "beta_over_alpha_projections")
"""Measures of a diagnosis that are kept for every layer."""


def preparations(trials: Iterable[Study]) -> list[Job]:
    """Jobs that make the models to start from, each once."""
    return [*{job.name: job for one in trials for job in one.preparations()}.values()]


def sweeps(
    trials: Iterable[Study], settled: Collection[str] = (), known: Iterable[Job] = ()
) -> list[Job]:
    """A run for each rate of every arm that has several: its own, and those beyond an edge that are
    known so far; of settled arms without those that were never tried, and none of a known name."""
    names = {job.name for job in known}
    rates = ((one, one.tried() if one.key in settled else one.losses()) for one in trials)
    jobs = (one.attempt(rate) for one, several in rates for rate in several)
    return [job for job in jobs if job.name not in names]


def rates(trials: Iterable[Study], output: Path) -> dict[str, float]:
    """{table/arm: rate}: those of rates.json, and the best of every other complete sweep."""
    found = settled(output)
    for one in trials:
        if one.key in found or None in one.losses().values():
            continue
        if (best := one.best()) is not None:
            found[one.key] = best
    return found


def settled(output: Path) -> dict[str, float]:
    """{table/arm: rate} of rates.json; these arms are not swept again."""
    path, advice = output / RATES, "delete it to choose the rates from the sweeps again"
    chosen = read_json(path, advice) if path.exists() else {}
    try:
        return {key: float(rate) for key, rate in chosen.items()}
    except (TypeError, ValueError) as error:
        raise ClearheadError(f"{path} is damaged, for {error}: {advice}") from error


def check_rates(trials: Iterable[Study], output: Path) -> None:
    """Refuse a rate of rates.json that a sweep with other settings chose, before its first run.

    A rate that is not the sweep's best was given by hand, and counts. Runs that are there are
    compared with the settings asked for as they start.

    Raises:
        ClearheadError: naming the first such arm, and what differs.
    """
    known = settled(output)
    for one in trials:
        best = one.best() if one.is_swept and one.key in known else None
        if best is None or written(best) != written(known[one.key]):
            continue
        if any(one.training(best, seed).records.exists() for seed in one.seeds):
            continue
        for attempt in map(one.attempt, one.tries):
            before = finished_as(attempt, output / "logs")
            if before.get("identity", attempt.identity) == attempt.identity:
                continue
            found = differences(before["settings"], attempt.settings)
            told = "; ".join(f"{name} was {old!r} and is now {new!r}" for name, old, new in found)
            raise ClearheadError(
                f"{output / RATES}: the rate of {one.key} was chosen by a sweep of other settings "
                f"({told or 'of the model to start from'}): choose another --output, and copy "
                "rates.json there to keep its rates"
            )


def check_models(trials: Iterable[Study]) -> None:
    """Refuse models that no job could build or open, before the first job."""
    bases = list[str]()
    for one in trials:
        one.check()
        bases += [one.base] if one.base and one.start is None else []
    for name in dict.fromkeys(bases):
        require_convertible(name)


def runs(trials: Sequence[Study], rates: dict[str, float]) -> list[Job]:
    """Trainings, each followed by its evaluations, of every arm whose rate is known or that is not
    trained, with every seed; one seed of all arms comes before the next."""
    seeds = sorted({seed for one in trials for seed in one.seeds})
    return [
        job
        for seed in seeds
        for one in trials
        if seed in one.seeds and (one.key in rates or not one.tries)
        for job in one.runs(rates.get(one.key), seed)
    ]


def reproduce(
    trials: Sequence[Study],
    output: Path,
    *,
    jobs: int,
    say: Callable[[str], None],
    work: Work | None = None,
    start: Start | None = None,
) -> tuple[Path, int]:
    """Run every stage; what is finished is not run again, and what fails is left out.

    Sweeps whose best rate is the lowest or the highest go on beyond it, those of all arms at once.

    Args:
        work: shows how many jobs of all stages are done.

    Returns:
        The records of all runs and evaluations, OUTPUT/records.jsonl, and how many jobs failed
        that the same call tries again.

    Raises:
        ClearheadError: for texts that cannot be had, for rates of other sweeps (`check_rates`), and
            where nothing was finished.
        Stopped: after SIGINT or SIGTERM.
    """
    check_rates(trials, output)
    # A trained model reads by its own tokenizer.
    fresh = (one.start or one for one in trials if one.reads)
    for text in {one.data: None for one in fresh if one.base is None}:
        prepare(text, progress=say)  # once, before the jobs would each
    work, logs = work or Work("job"), output / "logs"

    def stage(name: str, listed: list[Job]) -> list[Job]:
        say(f"{name}: {len(listed)} jobs")
        return run(listed, logs=logs, jobs=jobs, start=start, say=say, work=work)

    with hold_folder(output):
        known = settled(output)
        unsettled = [one for one in trials if one.key not in known]
        prepared, swept = preparations(trials), sweeps(unsettled)
        later = sum(len(one.seeds) * (bool(one.tries) + len(one.questions)) for one in trials)
        work.start(len(prepared) + len(swept) + later)
        failed = stage("models to start from", prepared) if prepared else []
        without = stage("rates", swept)
        lost = {
            one.key
            for one in unsettled
            for rate in one.tries
            if one.is_swept and not is_finished(one.attempt(rate), logs)
        }
        going = [one for one in unsettled if one.key not in lost]
        while more := sweeps(going, known=swept):
            swept += more
            work.extend(len(more))
            without += stage("rates beyond an edge", more)
        chosen = _settle(trials, output, lost, say)
        failed += [job for job in without if f"{job.label}/{job.arm}" not in chosen]
        each = runs(trials, chosen)
        failed += stage("runs and evaluations", each)
        finished = [job for job in each if is_finished(job, logs)]
        return collect(finished, output / RECORDS), len(failed)


def _settle(
    trials: Iterable[Study], output: Path, lost: Collection[str], say: Callable[[str], None]
) -> dict[str, float]:
    """Choose every rate that can be chosen, and keep them in rates.json.

    An arm whose run beyond an edge did not finish has the best of the others; a lost one has none.
    """
    chosen = rates((one for one in trials if one.key not in lost), output)
    for one in trials:
        if not one.tries or one.key in chosen:
            continue
        if one.key in lost or (best := one.best()) is None:
            say(f"{one.key}: left out, since its sweep gave no rate")
        else:
            say(f"{one.key}: goes on at {written(best)}, since the run beyond it did not finish")
            chosen[one.key] = best
    write_json(output / RATES, {key: written(rate) for key, rate in chosen.items()})
    return chosen


def collect(jobs: Iterable[Job], target: Path) -> Path:
    """Join the records of jobs, each under its arm, label and seed.

    The first header of a run counts, so that of a training comes before its evaluations'. Of a
    diagnosis the numbers over all layers and heads are kept. Where two jobs measured the same, the
    later counts: a question asked on purpose, after what the training measured.

    Raises:
        ClearheadError: where there are none.
    """
    groups, headed = dict[Any, tuple[Job, list[str]]](), set[str]()
    for job in jobs:
        if not job.records.exists():
            continue
        run, study = f"{job.label}/{job.arm}/seed{job.seed}", COMPARISON
        for line in jsonl.read(job.records):
            line["run"] = run
            if line["kind"] == "run":
                study = line.pop("study", COMPARISON)
                if run in headed:
                    continue
                headed.add(run)
                line = {
                    "preset": job.arm,
                    **_untrained(job),
                    **line,
                    "arm": job.arm,
                    "label": job.label,
                }
                line |= {"swept": job.swept} if job.swept else {}
                line["seed"] = job.seed
            elif study == DIAGNOSIS:
                if line["kind"] != "measure" or "head" in line:
                    continue
                if "layer" in line and line["metric"] not in BY_LAYER:
                    continue
                del line["cell"]  # of which this is a part
                if job.config.at != "anywhere":  # where training measures too
                    line["at"] = job.config.at
            key: Any = len(groups)
            if line["kind"] == "measure":
                given = {name: line.get(name) for name in DIMENSIONS}
                key = run, measure_key(line["metric"], given)
            if key not in groups or groups[key][0] is not job:
                groups[key] = job, []
            groups[key][1].append(jsonl.encode(line))
    lines = list(chain.from_iterable(group for _, group in groups.values()))
    if not lines:
        raise ClearheadError(f"nothing was finished: {target.parent / 'logs'} says why")
    write_text(target, "".join(lines))
    return target


def _untrained(job: Job) -> dict[str, Any]:
    """Header of a model that is measured as it is, which names neither training nor model."""
    if not isinstance(job.config, SweepConfig):
        return {}
    changes = job.config.set if isinstance(job.config, DiagnoseConfig) else {}
    return {"train": {"tokens": 0}, "model": {"from": job.config.models[0], **changes}}
