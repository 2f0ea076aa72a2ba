"""Jobs as processes, several at a time, each with a log; a finished job is not run again. They are
forked from multiprocessing's fork server, which has imported what every job needs, without a GPU.
"""

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead import extensions
from clearhead.allocator import keep_freed_memory
from clearhead.errors import ClearheadError, Stopped
from clearhead.lab import sweep_configs
from clearhead.lab.configs import CompareConfig, FinetuneJob, Job
from clearhead.progress import Line, Work
from clearhead.records.files import read_json, write_json
from clearhead.records.loading import load
from clearhead.terminal import open_streams, say
from clearhead.train.interrupt import StopSignals

# Kind of configuration → module and function that run it, and the unit of their work.
RUN = {
    CompareConfig: ("compare", "compare", "run"),
    FinetuneJob: ("finetune", "run_finetune", "seed"),
    sweep_configs.ConvertConfig: ("converting", "run_conversion", "model"),
    sweep_configs.PlanConfig: ("bill", "record_memory", "model"),
    sweep_configs.DiagnoseConfig: ("measuring", "measure", "cell"),
    sweep_configs.QuantizeConfig: ("measuring", "measure", "cell"),
    sweep_configs.EvaluateConfig: ("measuring", "measure", "cell"),
}
_POLL_SECONDS = 0.2


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if not torch.cuda.is_available():
        return ()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(chosen.split(",") if chosen else map(str, range(torch.cuda.device_count())))


def start(job: Job, log: Path, device: str | None, threads: int) -> Any:
    """Start a job that writes to a log and sees the GPU named; return its process."""
    modules = dict.fromkeys(f"{__package__}.{module}" for module, _, _ in RUN.values())
    context = multiprocessing.get_context("forkserver")
    # The first silences libraries that the others import.
    context.set_forkserver_preload(["clearhead.cli", *modules])
    log.touch()  # there to be told, should the job be killed before it opens it
    process = context.Process(target=_perform, args=(job.config, log, device, threads))
    # A terminal's Ctrl-C is for the runner alone, not for the process that jobs are forked from.
    resource_tracker.ensure_running()  # which starts with that process, and would let it through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    except (EOFError, OSError) as error:
        raise ClearheadError(
            "the process that starts the jobs has ended; the same command goes on from here"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _perform(config: Any, log: Path, device: str | None, threads: int) -> None:
    """Perform a job in a process of its own: its group, its log, its GPU, no input."""
    os.setpgid(0, 0)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    with log.open("ab") as written, open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, written, written)):
            os.dup2(file.fileno(), number)
    torch.set_num_threads(threads)
    keep_freed_memory()  # as the command does; a process of the fork server has not inherited it
    open_streams()
    extensions.load()
    module, function, unit = RUN[type(config)]
    run_one = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    try:
        run_one(config, work=Line(unit=unit))
    except Stopped as stop:
        raise SystemExit(stop.code) from stop
    except ClearheadError as error:
        raise SystemExit(f"clearhead: {error}") from error


class _Running(NamedTuple):
    job: Job
    log: Path
    device: str | None
    process: Any
    started: float


def run(tasks: Sequence[Job], *, logs: Path, jobs: int, work: Work | None = None) -> list[Job]:
    """Run the unfinished tasks, at most `jobs` at a time, in order, each on the GPU with the fewest
    others, after the one that makes its model; return those that failed. After SIGINT or SIGTERM
    every job saves and ends, and `Stopped` is raised; a second Ctrl-C kills them."""
    waiting = [job for job in tasks if not is_finished(job, logs)]
    threads, devices = max(1, torch.get_num_threads() // jobs), gpus()
    work = work or Work("job")
    work.start(len(tasks))
    for _ in range(len(tasks) - len(waiting)):
        work.skip()
    failed, running, stopping = list[Job](), list[_Running](), False
    with StopSignals() as stop:
        try:
            while running or (waiting and not stop.received):
                while len(running) < jobs and not stop.received:
                    # The first whose model no waiting or running job has still to leave.
                    names = {job.name for job in (*waiting, *(one.job for one in running))}
                    ready = (job for job in waiting if not job.after or job.after.name not in names)
                    if (job := next(ready, None)) is None:
                        break
                    waiting.remove(job)
                    before = job.after
                    there = before and before.model and before.model.is_dir()
                    if before and not (there and is_finished(before, logs)):
                        work.skip()
                        say(f"{job.name}: left out, for want of its model")
                        continue
                    device = min(devices, key=[one.device for one in running].count, default=None)
                    log = logs / f"{job.name}.log"
                    log.parent.mkdir(parents=True, exist_ok=True)
                    process = start(job, log, device, threads)
                    running.append(_Running(job, log, device, process, time.monotonic()))
                    if device is not None:
                        say(f"{job.name}: on GPU {device}")
                    work.begin(", ".join(one.job.name for one in running))
                time.sleep(_POLL_SECONDS)
                for one in [one for one in running if one.process.exitcode is not None]:
                    running.remove(one)
                    failure = _failure(one)
                    if failure and stop.received:
                        continue  # it was asked to stop
                    if failure:
                        failed.append(one.job)
                    else:
                        write_json(_mark(one.job, logs), {"identity": one.job.identity})
                    work.end()
                    say(f"{one.job.name}: {failure or f'{time.monotonic() - one.started:.0f} s'}")
                if stop.received and not stopping:
                    stopping = True
                    say(f"stopping {len(running)}, which save first; Ctrl-C again kills them")
                    for one in running:
                        one.process.terminate()
        finally:
            for one in running:
                one.process.kill()
    if stop.received:
        raise Stopped(stop.received)
    return failed


def _failure(one: _Running) -> str:
    """The reason why a job that has ended failed; empty where it did not."""
    if not one.process.exitcode:
        return ""
    with suppress(ClearheadError):  # of records that are not there, or are a conversion's
        if any(run.diverged for run in load(one.job.records).runs):
            return ""
    lines = one.log.read_text("utf-8", errors="replace").strip().splitlines() or [""]
    return f"failed with {one.process.exitcode}: {lines[-1].strip()} (all of it: {one.log})"


def _mark(job: Job, logs: Path) -> Path:
    return logs / f"{job.name}.done"


def is_finished(job: Job, logs: Path) -> bool:
    """True if this job, and those that make its model, finished with these settings."""
    mark, before = _mark(job, logs), job.after
    with suppress(ClearheadError):  # of a mark that is missing or damaged
        if job.records.exists() and read_json(mark, "delete it").get("identity") == job.identity:
            return before is None or (
                is_finished(before, logs)
                and _mark(before, logs).stat().st_mtime_ns <= mark.stat().st_mtime_ns
            )
    return False
