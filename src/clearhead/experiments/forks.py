"""Processes of jobs, forked from one process that has imported what every job needs."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch

from clearhead.errors import ClearheadError
from clearhead.experiments.jobs import Job

_POLL_SECONDS = 0.1


class Fork:
    """A job's process, with the methods of `subprocess.Popen` that the runner calls."""

    def __init__(self, pid: int, template: "Template") -> None:
        self.pid, self._template = pid, template
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._template.ended(self.pid)
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Template:
    """The process that jobs are forked from; it starts with the first job.

    An import of torch and transformers takes seconds of a core, which short jobs save. It computes
    nothing and never uses a GPU, so that a copy of it may.

    Args:
        jobs: that run at once, each with its share of the CPU's threads.
    """

    def __init__(self, jobs: int) -> None:
        self._threads = max(1, torch.get_num_threads() // jobs)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = TemporaryFile()  # noqa: SIM115 (closed with the template)
        self._ended: dict[int, int] = {}

    def __enter__(self) -> "Template":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._streams()[0].close()  # ends it; running jobs go on
            self._process.wait()
            self._streams()[1].close()
        self._said.close()

    def start(self, job: Job, log: Path, device: str | None) -> Fork:
        """Start a job, which writes to `log` and sees this GPU, or all.

        Raises:
            ClearheadError: the template has ended.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "clearhead.experiments"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                # A terminal's Ctrl-C is for the runner alone.
                process_group=0,
            )
        log.touch()  # there to be told, should the job be killed before it opens it
        orders, _ = self._streams()
        seen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        order = {"job": job.to_json(), "log": str(log), "environment": seen}
        with suppress(BrokenPipeError):  # said by `_read`
            orders.write(json.dumps(order).encode() + b"\n")
            orders.flush()
        while (answer := self._read())[0] != "started":
            pass
        return Fork(answer[1], self)

    def ended(self, pid: int) -> int | None:
        """The exit status of a job's process; None while it runs."""
        while pid not in self._ended and select.select([self._streams()[1]], [], [], 0)[0]:
            self._read()
        return self._ended.get(pid)

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process is not None
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        return orders, answers

    def _read(self) -> tuple[str, int]:
        """The next answer; one of an end is kept."""
        line = _line(self._streams()[1].fileno())
        if not line:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines() or ["killed"]
            raise ClearheadError(
                f"the process that starts the jobs has ended: {lines[-1].strip()}; the same "
                "command goes on from here"
            )
        word, pid, *code = line.split()
        if word == "ended":
            self._ended[int(pid)] = int(code[0])
        return word, int(pid)


def serve(perform: Callable[[str], None]) -> None:
    """Fork a process that performs each job ordered on standard input, until that is closed.

    Writes "started PID" and "ended PID STATUS" to standard output.
    """
    running = set[int]()
    answers = sys.stdout

    def answer(*words: Any) -> None:
        print(*words, file=answers, flush=True)

    while True:
        for pid in sorted(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                answer("ended", pid, os.waitstatus_to_exitcode(status))
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            continue
        line = _line(0)
        if not line:
            return
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(Path(order["log"]), order["environment"])
            perform(order["job"])
            return
        running.add(pid)
        answer("started", pid)


def _become(log: Path, environment: dict[str, str]) -> None:
    """Make this process a job's own: its group, its log, no input."""
    os.setpgid(0, 0)
    os.environ.update(environment)
    with log.open("ab") as written, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)


def _line(descriptor: int) -> str:
    """A line of a pipe, read without a buffer, which `select` would not see."""
    read = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        read += byte
    return read.decode()
