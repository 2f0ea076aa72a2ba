"""Progress of a run, for people."""

from pathlib import Path
from typing import TextIO

from clearhead.progress import Line, Work, clock
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics
from clearhead.train.result import TrainResult


class Progress(Callback):
    """Shows steps, loss, learning rate, gradient norm, tokens/s and the time left.

    Args:
        stream: where to; standard error where none is given.
        work: the longer work of which the run is the unit at hand; it shows its own time left.
    """

    def __init__(self, stream: TextIO | None = None, work: Work | None = None) -> None:
        self._alone = work is None
        self._work = Line(stream) if work is None else work
        self._steps = 0

    def start(self, run: Run) -> None:
        """Say where the run starts."""
        self._steps = run.steps
        if self._alone:
            self._work.start(1)
            self._work.begin(run.name)
        if self._alone or run.first_step:
            resumed = f" from step {run.first_step}" if run.first_step else ""
            self._work.say(f"{run.name}: training {run.steps} steps{resumed}")
        self._work.resume(run.first_step / run.steps)

    def step(self, metrics: StepMetrics) -> None:
        """Show the step's numbers."""
        left = f"  {clock(metrics.seconds_left)} left" if self._alone else ""
        numbers = (
            f"step {metrics.step}/{self._steps}  loss {metrics.loss:.4f}  "
            f"lr {metrics.learning_rate:.2e}  norm {metrics.gradient_norm:.2f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s{left}"
        )
        self._work.update(metrics.step / self._steps, numbers)

    def checkpoint(self, path: Path) -> None:
        """Say where it is."""
        if self._alone:
            self._work.say(f"saved {path}")

    def end(self, result: TrainResult) -> None:
        """Sum up."""
        self.close()
        stopped = f" (stopped by {result.stop_signal.name})" if result.stop_signal else ""
        self._work.say(
            f"{result.steps} steps, {result.tokens:,} tokens in {clock(result.seconds)} "
            f"({result.tokens_per_second:,.0f} tokens/s), loss {result.final_loss:.4f}, "
            f"peak memory {result.peak_memory_bytes / 2**20:,.0f} MiB{stopped}"
        )

    def close(self) -> None:
        """Give the terminal back, where no longer work has it."""
        if self._alone:
            self._work.close()
