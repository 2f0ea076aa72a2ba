"""A comparison: every arm is trained on the same tokens in the same order and measured alike."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from clearhead.data import Corpus, prepare, with_mask_token
from clearhead.errors import ClearheadError, require_extras
from clearhead.experiments import processes
from clearhead.experiments.bases import ArmModel, Base, open_base
from clearhead.experiments.comparison_run import (
    Run,
    Trained,
    check_optimizer,
    check_same,
    check_text,
    folder_of,
    header_of,
    train_one,
    write_records,
)
from clearhead.experiments.configs import RECORDS, CompareConfig, OneRun
from clearhead.experiments.run_setup import data_of
from clearhead.progress import Work
from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.records.lock import Lock, hold_folder
from clearhead.records.runs import Records
from clearhead.train import DivergedError, Progress, make_trackers
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
        locks = list[Lock]()  # of the first process
        hold = hold_folder(config.output)
        world.by_first(lambda: locks.append(stack.enter_context(hold)))
        return _compare(config, locks, world, say, Work(say=say) if work is None else work)


def _compare(
    config: CompareConfig, locks: list[Lock], world: World, say: Callable[[str], None], work: Work
) -> Records:
    if config.jobs > 1 and world.size > 1:
        raise world.told(
            ClearheadError(
                "jobs gives every run a process, and torchrun gives one run several: leave one out"
            )
        )
    require_extras(config)
    base, corpus = world.in_turn(lambda: _opened(config, say))
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" * (len(unseen) > 3))
        say(f"nothing is held out of {named}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    with world.alike():
        models = {arm.name: ArmModel.of(arm, config, corpus, base) for arm in config.arms}
        for remark in filter(None, (model.remark for model in models.values())):
            say(remark)
        jobs = [
            Run(config, corpus, arm, seed, models[arm.name])
            for seed in config.seeds
            for arm in config.arms
        ]

    def check() -> None:
        for job in jobs:  # all before the first, which may take hours
            if job.records.exists():
                check_same(job.records, header_of(job.records), job.header)
            else:
                check_optimizer(job)
                check_text(job)

    world.by_first(check)
    written, diverged = list[Path](), list[str | None]()

    def publish(job: Run, made: Trained | None) -> str | None:
        """Measure and record a run, unless that was done before; returns how it diverged."""
        if made is not None:
            write_records(job, made, locks)
        written.append(job.records)
        text = "".join(path.read_bytes().decode() for path in written)
        write_text(config.output / RECORDS, text)
        return header_of(job.records).get("diverged")

    work.start(len(jobs))
    spread = list[Run]()
    if config.jobs > 1:
        spread = [job for job in jobs if not job.records.exists()]
        for _ in range(len(jobs) - len(spread)):
            work.skip()
        if spread:
            _side_by_side(spread, config, say, work)
    for job in jobs:
        done = None
        if job in spread:
            pass  # said when its process ended
        elif world.by_first(job.records.exists):
            if config.jobs == 1:
                work.skip()
            say(f"{job.called}: already done")
        else:
            work.begin(f"{job.called}, {job.header['parameters']:,} parameters")
            done = train_one(job, [Progress(work=work), *make_trackers(config.track)])
        diverged.append(world.by_first(partial(publish, job, done)))
        if done is not None:
            work.end()
        if diverged[-1]:
            say(f"{job.called}: {diverged[-1]}")
    if all(diverged):
        raise world.told(DivergedError(f"no run stayed finite: {diverged[0]}"))
    return load(config.output / RECORDS)


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
    work.begin(f"{job.called}, {job.header['parameters']:,} parameters")
    made = train_one(job, [Progress(work=work), *make_trackers(config.track)])
    write_records(job, made, [])


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
