"""Experiment trackers, each behind its extra."""

from collections.abc import Iterable
from typing import Any

from clearhead.errors import require
from clearhead.records.files import write_text
from clearhead.train.callbacks.callback import Callback, Run, StepMetrics
from clearhead.train.config import Tracker

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

    module = "trackio"  # and its extra's name

    def __init__(self, project: str = "clearhead") -> None:
        self._module = require(self.module, self.module)
        self._project = project
        self._started = False

    def start(self, run: Run) -> None:
        """Open the run, or go on with it."""
        self._module.init(
            project=self._project, name=run.name, config=run.record["config"], **self._resumed(run)
        )
        self._started = True

    def _resumed(self, run: Run) -> dict[str, Any]:
        return {"resume": "allow" if run.first_step else "never"}

    def step(self, metrics: StepMetrics) -> None:
        """Log the step's numbers."""
        self._module.log(
            {f"train/{name}": getattr(metrics, name) for name in LOGGED}, step=metrics.step
        )

    def close(self) -> None:
        """Send what is buffered."""
        if self._started:
            self._module.finish()


class WandB(Trackio):
    """Logs to the Weights & Biases project `project`, under the run's name.

    Its account and mode are those of wandb's own settings, such as WANDB_MODE=offline. The run's
    id is kept in OUTPUT/wandb-id, so that a resumed run goes on with it.

    Raises:
        ClearheadError: when made, where the extra "wandb" is not installed.
    """

    module = "wandb"

    def _resumed(self, run: Run) -> dict[str, Any]:
        path = run.output / "wandb-id"
        if not (run.first_step and path.exists()):
            write_text(path, self._module.util.generate_id())
        return {"id": path.read_text("utf-8"), "resume": "allow", "dir": str(run.output)}


_TRACKERS: dict[Tracker, type[Callback]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


def make_trackers(names: Iterable[Tracker]) -> list[Callback]:
    """The trackers of these names.

    Raises:
        ClearheadError: where one's extra is not installed.
    """
    return [_TRACKERS[name]() for name in names]
