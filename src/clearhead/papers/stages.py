"""Execution of an experiment: its missing models, sweeps, runs and evaluations."""

from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead.data import DataConfig, prepare
from clearhead.errors import ClearheadError
from clearhead.lab.configs import RECORDS, Job
from clearhead.lab.processes import is_finished, run
from clearhead.lab.sweep_configs import DiagnoseConfig, SweepConfig
from clearhead.papers.study import BEYOND, Study, best, beyond, loss, written
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import hold_folder, write_text
from clearhead.records.runs import COMPARISON, DIAGNOSIS
from clearhead.terminal import say

# Measures of a diagnosis that are kept for every layer.
BY_LAYER = ("similarity", "effective_rank", "beta_over_alpha_values", "beta_over_alpha_projections")


def known_jobs(
    one: Study, logs: Path, tried: Container[str] = ()
) -> tuple[float | None, list[Job], list[Job]]:
    """An arm's rate, the jobs of its sweep, and its trainings and evaluations, as far as known. A
    sweep is over if its best rate lies inside, the next rate failed (it is among the jobs that this
    command has `tried`), or a run at its best rate exists."""

    def known(job: Job) -> float | None:
        return loss(job.records) if is_finished(job, logs) else None

    rate, sweep, swept = next(iter(one.tries), None), list[Job](), tuple[float, ...]()
    if one.is_swept:
        losses = {rate: known(one.attempt(rate)) for rate in one.tries}
        for _ in range(BEYOND):
            if (further := beyond(losses)) is not None:
                losses[further] = known(one.attempt(further))
        swept = tuple(sorted(rate for rate, value in losses.items() if value is not None))
        rate = best(losses) if {*swept} >= {*one.tries} else None
        runs = [] if rate is None else [one.runs(rate, seed)[0] for seed in one.seeds]
        if not any(is_finished(job, logs) for job in runs):
            sweep = [one.attempt(at) for at in losses]
            if any(one.attempt(at).name not in tried for at in losses.keys() - {*swept}):
                rate = None
    if one.tries and rate is None:
        return None, sweep, []
    return rate, sweep, [job for seed in one.seeds for job in one.runs(rate, seed, swept)]


def reproduce(arms: Sequence[Study], output: Path, *, jobs: int, work: Work) -> tuple[Path, int]:
    """Run the missing jobs of every arm, sweeps first, then seed by seed; return OUTPUT's
    records.jsonl and the number of failed jobs, but for rates that a sweep can do without."""
    texts = dict[DataConfig, None]()  # that an arm's own tokenizer reads, to train or to measure on
    for one in arms:
        measured = any(isinstance(question, SweepConfig) for question in one.questions.values())
        if one.base is None and (one.tries or measured):
            texts[one.data] = None
    for text in texts:
        prepare(text, progress=say)  # once, before the jobs would each
    logs = output / "logs"
    work.start(0)
    with hold_folder(output):
        tried, failed = set[str](), list[Job]()
        while True:
            known = {one.key: known_jobs(one, logs, tried) for one in arms}
            sweeps = [job for _, sweep, _ in known.values() for job in sweep]
            runs = [job for _, _, some in known.values() for job in some]
            runs.sort(key=lambda job: job.seed)
            every = {job.name: job for one in (*sweeps, *runs) for job in one.chain}
            new = [job for name, job in every.items() if name not in tried]
            if not new:
                break
            say(f"{len(new)} jobs")
            work.extend(len(new))
            tried |= every.keys()
            failed += run(new, logs=logs, jobs=jobs, work=work)
        rates = {key: rate for key, (rate, _, _) in known.items() if rate is not None}
        for one in arms:
            if one.tries and one.key not in rates:
                say(f"{one.key}: left out, since its sweep gave no rate")
        overcome = [job for job in failed if job.name.startswith("sweeps/") and job.key in rates]
        for job in overcome:
            rate = written(rates[job.key])
            say(f"{job.key}: goes on at {rate}, since {job.name} did not finish")
        finished = (job for job in runs if is_finished(job, logs))
        return collect(finished, output / RECORDS), len(failed) - len(overcome)


def collect(jobs: Iterable[Job], target: Path) -> Path:
    """Join the records of jobs, each under its arm, label and seed; a run's first header counts."""
    lines, headed = list[str](), set[str]()
    for line in (line for job in jobs if job.records.exists() for line in _lines(job)):
        if line["kind"] != "run" or line["run"] not in headed:
            lines.append(jsonl.encode(line))
        headed.add(line["run"])
    if not lines:
        raise ClearheadError(f"nothing was finished: {target.parent / 'logs'} says why")
    write_text(target, "".join(lines))
    return target


def _lines(job: Job) -> Iterator[dict[str, Any]]:
    """A job's records as lines of its arm's run; of a diagnosis mostly those over all layers."""
    study, config = COMPARISON, job.config
    untrained: dict[str, Any] = {}
    if isinstance(config, SweepConfig):  # its header names neither training nor model
        changes = config.set if isinstance(config, DiagnoseConfig) else {}
        untrained = {"train": {"tokens": 0}, "model": {"from": config.models[0], **changes}}
    for line in jsonl.read(job.records):
        line["run"] = f"{job.key}/seed{job.seed}"
        if line["kind"] == "run":
            study = line.pop("study", COMPARISON)
            named = {"arm": job.arm, "label": job.label, "seed": job.seed}
            line = {"preset": job.arm, **untrained, **line, **named}
            line |= {"swept": job.swept} if job.swept else {}
        elif study == DIAGNOSIS:
            by_layer = "layer" in line and line["metric"] not in BY_LAYER
            if line["kind"] != "measure" or "head" in line or by_layer:
                continue
            del line["cell"]  # of which this is a part
            if config.at != "anywhere":  # where training measures too
                line["at"] = config.at
        yield line
