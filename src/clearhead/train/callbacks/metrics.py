"""metrics.jsonl: one line a step, in the form of the records that reports read."""

from dataclasses import asdict

from clearhead.records import jsonl
from clearhead.records.files import write_text
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics

FILE = "metrics.jsonl"


class LinesFile(Callback):
    """Appends JSON lines, each with its "step", to `file` in OUTPUT, each step's at once.

    A resumed run first drops the lines after the step it resumes from: however often it was killed,
    no step has its lines twice. Damaged lines are left out, and a warning says so.
    """

    file: str
    afterwards = "resume"  # what to do once there is room again

    def __init__(self) -> None:
        self._writer: jsonl.Writer | None = None

    def start(self, run: Run) -> None:
        """Open the file, cut back to the steps that are done."""
        path = run.output / self.file
        done = jsonl.salvage(path, until=run.first_step)
        write_text(path, "".join(map(jsonl.encode, done)), f"make room and {self.afterwards}")
        self._writer = jsonl.Writer(path, self.afterwards)

    def write(self, lines: str) -> None:
        """Hand whole lines to the system at once: a killed process loses none."""
        assert self._writer is not None
        self._writer.write(lines)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


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
        self.write(jsonl.encode({"kind": "step", "run": self._run, **values}))
