"""A comparison: every arm is trained on the same tokens in the same order and measured alike."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.data import Corpus, prepare, with_mask_token
from clearhead.errors import ClearheadError
from clearhead.experiments import processes
from clearhead.experiments.bases import ArmModel, Base, open_base
from clearhead.experiments.comparison_run import Run, folder_of, header_of
from clearhead.experiments.configs import RECORDS, CompareConfig, OneRun
from clearhead.experiments.run_setup import data_of
from clearhead.progress import Work
from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.records.lock import hold_folder
from clearhead.records.runs import Records
from clearhead.train import DivergedError, Progress, make_trackers
from clearhead.train.run_dir import require_no_run
from clearhead.train.world import World, joined


def compare(
    config: CompareConfig, *, say: Callable[[str], None], work: Work | None = None
) -> Records:
    """Train and measure every arm with every seed, and return the records.

    What is done is kept in `config.output`, a folder a run, so that a comparison that was stopped
    goes on with the run at hand. `records.jsonl` there holds the records of all runs. A run that
    diverges is recorded as such, and the others go on: in a sweep that is a result. Processes that
    torchrun started train every run together; the first measures and writes. A script that asks for
    several `jobs` has its code under `if __name__ == "__main__"`, as multiprocessing wants it.

    Args:
        work: shows which run is at hand and how far it is, a unit a run.

    Raises:
        ClearheadError: for settings or data that do not work, a folder of other settings, in use
            or damaged, or where every run diverged.
        InterruptedRun: after SIGINT or SIGTERM, once the run at hand has saved.
        Stopped: the same, of several runs at once.
    """
    config.check()
    with joined(config.train.timeout) as world, ExitStack() as stack:
        world.by_first(lambda: require_no_run(config.output))
        world.by_first(lambda: stack.enter_context(hold_folder(config.output)))
        return _compare(config, world, say, Work(say=say) if work is None else work)


def _compare(
    config: CompareConfig, world: World, say: Callable[[str], None], work: Work
) -> Records:
    with world.together():
        if config.jobs > 1 and world.size > 1:
            raise ClearheadError(
                "jobs gives every run a process, and torchrun gives one run several: leave one out"
            )
    base, corpus = world.in_turn(lambda: _opened(config, say))
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" * (len(unseen) > 3))
        say(f"nothing is held out of {named}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    with world.together():
        models = {arm.name: ArmModel.of(arm, config, corpus, base) for arm in config.arms}
        for remark in filter(None, (model.remark for model in models.values())):
            say(remark)
        jobs = [
            Run(config, corpus, arm, seed, models[arm.name])
            for seed in config.seeds
            for arm in config.arms
        ]

    def missing() -> list[int]:
        """The runs to be made; all are checked before the first, which may take hours."""
        for job in jobs:
            job.check()
        return [number for number, job in enumerate(jobs) if not job.records.exists()]

    waiting = world.by_first(missing)
    work.start(len(jobs))
    for job in (job for number, job in enumerate(jobs) if number not in waiting):
        work.skip()
        say(f"{job.called}: already done")
    if config.jobs > 1 and waiting:
        _side_by_side([jobs[number] for number in waiting], config, say, work)
    else:
        for number in waiting:
            _made(jobs[number], work, world.by_first)
            world.by_first(partial(_join, jobs, config.output / RECORDS))
            work.end()
    world.by_first(partial(_join, jobs, config.output / RECORDS))
    headers = world.by_first(lambda: [header_of(job.records) for job in jobs])
    diverged = [header.get("diverged") for header in headers]
    for job, reason in zip(jobs, diverged, strict=True):
        if reason:
            say(f"{job.called}: {reason}")
    with world.together():
        if all(diverged):
            raise DivergedError(f"no run stayed finite: {diverged[0]}")
    return load(config.output / RECORDS)


def _join(jobs: list[Run], records: Path) -> None:
    """Join the records of the runs that are done."""
    done = (job.records.read_bytes().decode() for job in jobs if job.records.exists())
    write_text(records, "".join(done))


def _made(job: Run, work: Work, first: Callable[[Any], Any]) -> None:
    """Train a run; `first` calls what measures and records it in the first process alone."""
    work.begin(f"{job.called}, {job.header['parameters']:,} parameters")
    trained = job.train([Progress(work=work), *make_trackers(job.config.track)])
    first(lambda: job.record(trained))


def _side_by_side(
    runs: list[Run], config: CompareConfig, say: Callable[[str], None], work: Work
) -> None:
    """Make runs in processes, so many at a time; refuse to go on without those that failed."""
    count, logs = min(config.jobs, len(runs)), config.output / "logs"
    say(f"{count} of {len(runs)} runs at once, with logs in {logs}")
    jobs = [one.of_a_process() for one in runs]
    if failed := processes.run(jobs, logs=logs, jobs=count, say=say, work=work):
        raise ClearheadError(
            f"{len(failed)} of {len(runs)} runs failed ({', '.join(one.name for one in failed)}): "
            f"{logs} says why, and the same command tries them again"
        )


def make_run(one: OneRun, *, say: Callable[[str], None], work: Work) -> None:
    """Train, measure and record one run of a comparison, whose folder another process holds.

    Raises:
        ClearheadError, InterruptedRun: as `compare`.
    """
    config = one.comparison
    base, corpus = _opened(config, say)
    arm = next(arm for arm in config.arms if arm.name == one.arm)
    job = Run(config, corpus, arm, one.seed, ArmModel.of(arm, config, corpus, base))
    work.start(1)
    _made(job, work, lambda do: do())


def _opened(config: CompareConfig, say: Callable[[str], None]) -> tuple[Base | None, Corpus]:
    """The trained model to start from, where one is named; and the text."""
    began, base = _began(config), None
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        corpus = with_mask_token(corpus) if config.objective == "mlm" else corpus
    else:
        longest = max(arm.train.sequence_length for arm in config.arms)
        trust = config.trust_remote_code
        base = open_base(
            *(config.base, config.data, longest), trust_remote_code=trust, began=began, alike=True
        )
        corpus = base.corpus
    return base, corpus.for_tuning() if config.held_out == "training" else corpus


def _began(config: CompareConfig) -> str | None:
    """The fingerprint of the data of a run that was begun in the output folder, if one was."""
    for arm, seed in itertools.product(config.arms, config.seeds):
        if (data := data_of(folder_of(config, arm, seed))) is not None:
            return data
    return None
