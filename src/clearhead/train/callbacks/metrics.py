"""metrics.jsonl: one line a step, in the form of the records that reports read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO

from clearhead.errors import ClearheadError
from clearhead.train.atomic import write_text
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics

FILE = "metrics.jsonl"


class LinesFile(Callback):
    """Appends JSON lines, each with its "step", to `file` in OUTPUT, each step's at once.

    A resumed run first drops the lines after the step it resumes from: however often it was killed,
    no step has its lines twice.
    """

    file: str
    afterwards = "resume"  # what to do once there is room again

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def start(self, run: Run) -> None:
        """Open the file, cut back to the steps that are done."""
        path = run.output / self.file
        try:
            write_text(path, lines_until(path, run.first_step))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._refused(path, error) from error

    def write(self, lines: str) -> None:
        """Hand whole lines to the system at once: a killed process loses none."""
        assert self._file is not None
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            raise self._refused(self._file.name, error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refused(self, path: Path | str, error: OSError) -> ClearheadError:
        return ClearheadError(
            f"cannot write {path} ({error.strerror}): make room and {self.afterwards}"
        )


class MetricsFile(LinesFile):
    """Appends a record {"kind": "step", "run", "step", "loss", …} a step to OUTPUT/metrics.jsonl.

    Its other values are those of `StepMetrics`, but for the time left.
    """

    file = FILE

    def start(self, run: Run) -> None:
        """Open the file."""
        super().start(run)
        self._run = run.name

    def step(self, metrics: StepMetrics) -> None:
        """Write one line."""
        values = asdict(metrics)
        del values["seconds_left"]  # a guess for people, not a measurement
        self.write(json.dumps({"kind": "step", "run": self._run, **values}) + "\n")


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
