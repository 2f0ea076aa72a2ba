"""Callback protocol: the events of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from clearhead.train.result import TrainResult


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is about to train."""

    name: str
    """The id in its records: description["run"], or else the output folder's name."""
    output: Path
    """The run folder."""
    model: "PreTrainedModel"
    """The model, on its device; its weights change from step to step."""
    steps: int
    """Steps of the whole run."""
    first_step: int
    """Steps already done when this process took over; 0 for a new run."""
    record: dict[str, Any]
    """Content of run.json: resolved config, seed, versions, device, command, date."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step, after the weights took it."""

    step: int
    """Steps done, this one included: the first is 1."""
    tokens: int
    """Input tokens of all steps so far."""
    seconds: float
    """Time in steps so far, over all processes of the run; checkpoints are not in it."""
    loss: float
    """Mean loss per label of this step's batch, in nats, before the update."""
    learning_rate: float
    """Of this step."""
    gradient_norm: float
    """Global norm before clipping."""
    tokens_per_second: float
    """Over the steps since the last line."""
    batch_stall: float
    """Share of these steps' time in which this process waited for a batch to be prepared."""
    seconds_left: float
    """Time that the remaining steps will take at this process's pace."""


class Callback:
    """Watches a run. Every method may be left as it is; none may change the weights.

    An exception ends the run, as one of the loop's own would.
    """

    def start(self, run: Run) -> None:
        """Before the first step, once checkpoint and settings are accepted."""

    def step(self, metrics: StepMetrics) -> None:
        """Every `log_every` steps and after the last."""

    def checkpoint(self, path: Path) -> None:
        """After the checkpoint in folder `path` is on the disk."""

    def end(self, result: "TrainResult") -> None:
        """After a finished or interrupted run, not after a failed one."""

    def close(self) -> None:
        """Last of all, whatever happened: release files, threads, the terminal."""
