"""Runs of a comparison made at once, each in a process of its own."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from clearhead.errors import ClearheadError
from clearhead.experiments.arms import Arm
from clearhead.experiments.configs import CompareConfig, OneRun
from clearhead.experiments.forks import Template
from clearhead.experiments.job_runner import gpus, run
from clearhead.experiments.jobs import Job
from clearhead.progress import Work


class Planned(Protocol):
    """A run of the comparison that is still to make."""

    arm: Arm
    seed: int
    folder: Path
    records: Path


def make_at_once(
    config: CompareConfig, planned: Sequence[Planned], say: Callable[[str], None], work: Work
) -> None:
    """Make runs, `config.jobs` at a time; the folder of the comparison is held by this process.

    Raises:
        ClearheadError: where some failed, once the others are made.
        Stopped: as `job_runner.run`.
    """
    whole = CompareConfig(**{one.name: getattr(config, one.name) for one in fields(CompareConfig)})
    jobs = [
        Job(
            name=one.folder.name,
            config=OneRun(comparison=whole, arm=one.arm.name, seed=one.seed),
            records=one.records,
            arm=one.arm.name,
            label=config.label,
        )
        for one in planned
    ]
    if not jobs:
        return
    logs, count = config.output / "logs", min(config.jobs, len(jobs))
    say(f"{count} of {len(jobs)} runs at once, with logs in {logs}")
    with Template(count) as template:
        start, devices = template.start, gpus()
        failed = run(jobs, logs=logs, jobs=count, start=start, say=say, work=work, devices=devices)
    if failed:
        names = ", ".join(one.name for one in failed)
        raise ClearheadError(
            f"{len(failed)} of {len(jobs)} runs failed ({names}): {logs} says why, and the same "
            "command tries them again"
        )
