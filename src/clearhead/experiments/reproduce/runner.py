"""Command lines of `clearhead` as processes: some at a time, a log each, none twice."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.records.files import write_text
from clearhead.records.loading import load
from clearhead.train.interrupt import StopSignals

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line, and what it leaves."""

    name: str
    """For people, and of its log: rates/6-layers/sas-8e-3."""
    words: tuple[str, ...]
    """What follows `clearhead`."""
    records: Path
    """The records that it writes."""
    arm: str
    """The arm of these records, and below their label."""
    label: str
    model: Path | None = None
    """The folder that it reads, where another command writes it."""

    def __str__(self) -> str:
        return shlex.join(["clearhead", *self.words])


class Stopped(Exception):  # noqa: N818 (a request, not a fault)
    """A signal stopped the commands; what they had is saved, and the same call goes on."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__("stopped")
        self.code = 128 + number


def run(
    commands: Sequence[Command], *, logs: Path, jobs: int, say: Callable[[str], None]
) -> list[Command]:
    """Run what is not finished, at most `jobs` at a time, and return those that failed.

    They start in their order, but for those whose model is still to come; without a model at the
    end of the training that should have left it they are left out. Each has its share of the CPU's
    threads and its output in a log of its own. A failed one is told in a line, and the others go
    on. One whose training diverged has not failed: that is a result.

    Raises:
        Stopped: after SIGINT or SIGTERM, once every command has saved and ended. A second Ctrl-C
            kills them.
    """
    waiting = [command for command in commands if not _is_finished(command, logs)]
    total, failed = len(waiting), list[Command]()
    running, done, asked = list[_Running](), 0, False
    with StopSignals() as stop:
        try:
            while running or (waiting and not stop.received):
                while len(running) < jobs and not stop.received:
                    command = _next(waiting, [one.command for one in running])
                    if command is None:
                        break
                    waiting.remove(command)
                    if command.model is None or command.model.is_dir():
                        running.append(_Running(command, logs, jobs))
                    else:
                        done += 1
                        say(f"[{done}/{total}] {command.name}: left out, for want of its model")
                time.sleep(_POLL_SECONDS)
                ended = [one for one in running if one.process.poll() is not None]
                running = [one for one in running if one not in ended]
                for one in ended:
                    failure = one.end()
                    if failure and stop.received:
                        continue  # it was asked to stop
                    if failure:
                        failed.append(one.command)
                    done += 1
                    told = failure or f"{time.monotonic() - one.started:.0f} s"
                    say(f"[{done}/{total}] {one.command.name}: {told}")
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


def _next(waiting: Sequence[Command], running: Sequence[Command]) -> Command | None:
    """The first that waits for no other's model."""
    writers = [one.records.parent for one in (*waiting, *running) if one.model is None]
    for command in waiting:
        model = command.model
        if model is None or not any(model.is_relative_to(folder) for folder in writers):
            return command
    return None


class _Running:
    """A command at work."""

    def __init__(self, command: Command, logs: Path, jobs: int) -> None:
        self.command, self.started = command, time.monotonic()
        self._log, self._mark = logs / f"{command.name}.log", _mark(command, logs)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(max(1, torch.get_num_threads() // jobs))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clearhead", *command.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": threads},
                # A terminal's Ctrl-C is for the runner alone: a second signal would end a command
                # before it has saved.
                process_group=0,
            )

    def end(self) -> str:
        """Mark as finished, or else return why it failed."""
        if self.process.returncode and not _diverged(self.command.records):
            lines = self._log.read_text("utf-8", errors="replace").strip().splitlines() or [""]
            said = f"{lines[-1].strip()} (all of it: {self._log})"
            return f"failed with {self.process.returncode}: {said}"
        write_text(self._mark, f"{self.command}\n")
        return ""


def _mark(command: Command, logs: Path) -> Path:
    return logs / f"{command.name}.done"


def _is_finished(command: Command, logs: Path) -> bool:
    """Whether this very command was; one of the same name with other settings was not."""
    mark = _mark(command, logs)
    return mark.exists() and mark.read_text("utf-8") == f"{command}\n"


def _diverged(records: Path) -> bool:
    return records.exists() and any(run.header.get("diverged") for run in load(records).runs)
