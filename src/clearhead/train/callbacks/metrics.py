"""metrics.jsonl: one line a step, in the form of the records that reports read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO

from clearhead.errors import ClearheadError
from clearhead.train.atomic import write_text
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics

FILE = "metrics.jsonl"


class MetricsFile(Callback):
    """Appends a record {"kind": "step", "run", "step", "loss", …} a step to OUTPUT/metrics.jsonl.

    Its other values are those of `StepMetrics`, but for the time left. A resumed run first drops
    the lines after the step it resumes from: every step has one line, however often it was killed.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._run = ""

    def start(self, run: Run) -> None:
        """Open the file, cut back to the steps that are done."""
        self._run = run.name
        path = run.output / FILE
        try:
            write_text(path, lines_until(path, run.first_step))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _refused(path, error) from error

    def step(self, metrics: StepMetrics) -> None:
        """Write one line, and hand it to the system at once: a killed process loses none."""
        assert self._file is not None
        values = asdict(metrics)
        del values["seconds_left"]  # a guess for people, not a measurement
        try:
            self._file.write(json.dumps({"kind": "step", "run": self._run, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise _refused(self._file.name, error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _refused(path: Path | str, error: OSError) -> ClearheadError:
    return ClearheadError(f"cannot write {path} ({error.strerror}): make room and resume")


def lines_until(path: Path, step: int) -> str:
    """The whole lines of `path`, JSON with a "step", up to and including `step`, as one text."""
    if not path.exists():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            done = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break  # torn by a kill: nothing after it can be older
        if done > step or not line.endswith("\n"):
            break
        kept.append(line)
    return "".join(kept)
