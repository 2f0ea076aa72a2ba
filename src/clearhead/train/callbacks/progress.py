"""Progress for people: a bar on a terminal, plain lines elsewhere."""

import sys
from pathlib import Path
from typing import Any, TextIO

from clearhead.terminal import console, printable
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics
from clearhead.train.result import TrainResult

PLAIN_LINES = 20  # about so many for a whole run, so that a log stays readable


class Progress(Callback):
    """Shows steps, loss, learning rate, gradient norm, tokens/s and the time left on `stream`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._run: Run | None = None
        self._printed = 0

    def start(self, run: Run) -> None:
        """Draw the empty bar, or say where the run starts."""
        self._run = run
        self._printed = run.first_step
        if self._stream.isatty():
            self._draw(run)
        else:
            resumed = f" from step {run.first_step}" if run.first_step else ""
            self._print(f"{run.name}: training {run.steps} steps{resumed}")

    def step(self, metrics: StepMetrics) -> None:
        """Move the bar, or print a line once in a while."""
        assert self._run is not None
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, numbers=_numbers(metrics))
            return
        interval = max(1, self._run.steps // PLAIN_LINES)
        if metrics.step - self._printed >= interval or metrics.step == self._run.steps:
            self._printed = metrics.step
            self._print(f"step {metrics.step}/{self._run.steps}  {_numbers(metrics)}")

    def checkpoint(self, path: Path) -> None:
        """Say where it is."""
        self._print(f"saved {path}")

    def end(self, result: TrainResult) -> None:
        """Sum up."""
        self.close()
        stopped = f" (stopped by {result.stop_signal.name})" if result.stop_signal else ""
        self._print(
            f"{result.steps} steps, {result.tokens:,} tokens in {_clock(result.seconds)} "
            f"({result.tokens_per_second:,.0f} tokens/s), loss {result.final_loss:.4f}, "
            f"peak memory {result.peak_memory_bytes / 2**20:,.0f} MiB{stopped}"
        )

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, run: Run) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console(file=self._stream),
        )
        self._task = self._bar.add_task(
            run.name, total=run.steps, completed=run.first_step, numbers=""
        )
        self._bar.start()

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(printable(line), file=self._stream, flush=True)


def _numbers(metrics: StepMetrics) -> str:
    return (
        f"loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2e}  "
        f"norm {metrics.gradient_norm:.2f}  {metrics.tokens_per_second:,.0f} tokens/s  "
        f"{_clock(metrics.seconds_left)} left"
    )


def _clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
