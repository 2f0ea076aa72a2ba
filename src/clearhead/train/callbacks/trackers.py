"""Experiment trackers, each behind its extra."""

from typing import Any

from clearhead.errors import require
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics

LOGGED = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "tokens")


class TensorBoard(Callback):
    """Writes scalars to OUTPUT/tensorboard.

    Raises:
        ClearheadError: when made, where the extra "tensorboard" is not installed.
    """

    def __init__(self) -> None:
        self._module = require("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, run: Run) -> None:
        """Open the log; a resumed run hides what was logged after the step it resumes from."""
        self._writer = self._module.SummaryWriter(
            log_dir=str(run.output / "tensorboard"),
            purge_step=run.first_step + 1 if run.first_step else None,
        )

    def step(self, metrics: StepMetrics) -> None:
        """Log the step's numbers."""
        for name in LOGGED:
            self._writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()


class Trackio(Callback):
    """Logs to the local Trackio project `project`, under the run's name.

    Raises:
        ClearheadError: when made, where the extra "trackio" is not installed.
    """

    def __init__(self, project: str = "clearhead") -> None:
        self._module = require("trackio", "trackio")
        self._project = project
        self._started = False

    def start(self, run: Run) -> None:
        """Open the run, or go on with it."""
        resume = "allow" if run.first_step else "never"
        self._module.init(
            project=self._project, name=run.name, config=run.record["config"], resume=resume
        )
        self._started = True

    def step(self, metrics: StepMetrics) -> None:
        """Log the step's numbers."""
        self._module.log(
            {f"train/{name}": getattr(metrics, name) for name in LOGGED}, step=metrics.step
        )

    def close(self) -> None:
        """Send what is buffered."""
        if self._started:
            self._module.finish()
