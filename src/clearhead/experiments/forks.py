"""Processes of jobs, forked from one process that has imported what every job needs."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from clearhead import extensions
from clearhead.allocator import keep_freed_memory
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import CompareConfig
from clearhead.experiments.job_runner import Start, gpus, run
from clearhead.experiments.jobs import Job
from clearhead.progress import Work
from clearhead.terminal import open_streams

_PERFORMING = "clearhead.experiments.performing"
_IMPORTED = ["clearhead.cli", _PERFORMING]  # the first silences libraries that the second imports


def starting(jobs: int) -> Start:
    """Start jobs of which so many run at once, each with its share of the CPU's threads.

    They are forked from multiprocessing's fork server: an import of torch and transformers takes
    seconds of a core, which short jobs save. It computes nothing and never uses a GPU, so that a
    copy of it may.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    return partial(_start, threads=max(1, torch.get_num_threads() // jobs))


def _start(job: Job, log: Path, device: str | None, *, threads: int) -> BaseProcess:
    log.touch()  # there to be told, should the job be killed before it opens it
    words = (job.config, log, device, threads)
    process = multiprocessing.get_context("forkserver").Process(target=_perform, args=words)
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
        os.dup2(nothing.fileno(), 0)
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    torch.set_num_threads(threads)
    keep_freed_memory()  # as the command does; a process of the fork server has not inherited it
    open_streams()
    extensions.load()
    importlib.import_module(_PERFORMING).perform(config)


def make_at_once(
    config: CompareConfig, jobs: Sequence[Job], say: Callable[[str], None], work: Work
) -> None:
    """Make runs, `config.jobs` at a time; the folder of the comparison is held by this process.

    Raises:
        ClearheadError: where some failed, once the others are made.
        Stopped: as `job_runner.run`.
    """
    if not jobs:
        return
    logs, count = config.output / "logs", min(config.jobs, len(jobs))
    say(f"{count} of {len(jobs)} runs at once, with logs in {logs}")
    start, devices = starting(count), gpus()
    failed = run(jobs, logs=logs, jobs=count, start=start, say=say, work=work, devices=devices)
    if failed:
        names = ", ".join(one.name for one in failed)
        raise ClearheadError(
            f"{len(failed)} of {len(jobs)} runs failed ({names}): {logs} says why, and the same "
            "command tries them again"
        )
