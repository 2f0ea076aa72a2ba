"""Jobs as processes, several at a time, each with a log; a finished job is not run again."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from clearhead.errors import ClearheadError, Stopped
from clearhead.experiments.jobs import Job
from clearhead.progress import Work
from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.train.interrupt import StopSignals

_POLL_SECONDS = 0.2


class Process(Protocol):
    """A started job, as `multiprocessing` has it; `exitcode` is None while it runs."""

    @property
    def exitcode(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Job, Path, str | None], Process]
"""Starts a job that writes to a log and sees one GPU, where it is named."""


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if not torch.cuda.is_available():
        return ()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(chosen.split(",") if chosen else map(str, range(torch.cuda.device_count())))


def run(
    tasks: Sequence[Job],
    *,
    logs: Path,
    jobs: int,
    start: Start,
    say: Callable[[str], None],
    work: Work | None = None,
    devices: Sequence[str] = (),
) -> list[Job]:
    """Run what is not finished, at most `jobs` at a time, and return those that failed.

    Jobs start in order, except that a job waits for the one that leaves its model. If that fails,
    or leaves no model, the job is left out. Each job has a log of its own. A failed job is reported
    in a line, and the others go on. A training that diverged has not failed: that is a result.

    Args:
        work: shows how many jobs of this call, or of several, are done.
        devices: GPUs; a job sees the one that the fewest others are on.

    Raises:
        Stopped: after SIGINT or SIGTERM, once every job has saved and ended. A second Ctrl-C
            kills them.
    """
    waiting = [job for job in tasks if not is_finished(job, logs)]
    work = Work("job") if work is None else work
    work.start(len(tasks))
    for _ in range(len(tasks) - len(waiting)):
        work.skip()
    failed = list[Job]()
    running, asked = list[_Running](), False
    with StopSignals() as stop:
        try:
            while running or (waiting and not stop.received):
                while len(running) < jobs and not stop.received:
                    job = _next(waiting, [one.job for one in running])
                    if job is None:
                        break
                    waiting.remove(job)
                    if _has_model(job, logs):
                        used = [one.device for one in running]
                        device = min(devices, key=used.count, default=None)
                        running.append(_Running(job, logs, start, device))
                        if device is not None:
                            say(f"{job.name}: on GPU {device}")
                        work.begin(", ".join(one.job.name for one in running))
                    else:
                        work.skip()
                        say(f"{job.name}: left out, for want of its model")
                time.sleep(_POLL_SECONDS)
                ended = [one for one in running if one.process.exitcode is not None]
                running = [one for one in running if one not in ended]
                for one in ended:
                    failure = one.end()
                    if failure and stop.received:
                        continue  # it was asked to stop
                    if failure:
                        failed.append(one.job)
                    work.end()
                    told = failure or f"{time.monotonic() - one.started:.0f} s"
                    say(f"{one.job.name}: {told}")
                if stop.received and not asked:
                    asked = True
                    say(f"stopping {len(running)}, which save first; Ctrl-C again kills them")
                    for one in running:
                        one.process.terminate()
        finally:
            for one in running:
                one.process.kill()
    if stop.received:
        raise Stopped(stop.received)
    return failed


def _next(waiting: Sequence[Job], running: Sequence[Job]) -> Job | None:
    """The first job whose model no waiting or running job has still to leave."""
    names = {one.name for one in (*waiting, *running)}
    return next((job for job in waiting if not job.after or job.after.name not in names), None)


def _has_model(job: Job, logs: Path) -> bool:
    """True if the model that it reads is there, by the settings asked for."""
    before = job.after
    return before is None or bool(
        is_finished(before, logs) and before.model and before.model.is_dir()
    )


class _Running:
    """A running job."""

    def __init__(self, job: Job, logs: Path, start: Start, device: str | None) -> None:
        self.job, self.device, self.started = job, device, time.monotonic()
        self._log, self._mark = logs / f"{job.name}.log", _mark(job, logs)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.process = start(job, self._log, device)

    def end(self) -> str:
        """Mark as finished, or else return why it failed."""
        if self.process.exitcode and not _diverged(self.job.records):
            lines = self._log.read_text("utf-8", errors="replace").strip().splitlines() or [""]
            said = f"{lines[-1].strip()} (all of it: {self._log})"
            return f"failed with {self.process.exitcode}: {said}"
        write_text(self._mark, f"{self.job}\n")
        return ""


def _mark(job: Job, logs: Path) -> Path:
    return logs / f"{job.name}.done"


def is_finished(job: Job, logs: Path) -> bool:
    """True if this job finished, with these settings, and its records are there; and before it, in
    the same way, the job that left its model."""
    if finished_as(job, logs) != str(job):
        return False
    return job.after is None or (
        is_finished(job.after, logs)
        and _mark(job.after, logs).stat().st_mtime_ns <= _mark(job, logs).stat().st_mtime_ns
    )


def finished_as(job: Job, logs: Path) -> str:
    """The command of the job of this name that finished; empty where none did, or its records are
    gone."""
    mark = _mark(job, logs)
    if not (mark.exists() and job.records.exists()):
        return ""
    return mark.read_text("utf-8").removesuffix("\n")


def _diverged(records: Path) -> bool:
    """True if a training wrote there that it diverged; a conversion's own record says nothing."""
    with suppress(ClearheadError):
        return records.exists() and any(run.header.get("diverged") for run in load(records).runs)
    return False
