"""Results of a training run, and its errors."""

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.errors import ClearheadError, Stopped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DivergedError(ClearheadError):
    """The loss, a gradient or the weights are no longer finite. Checkpoints from before stay."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A run that finished, or was asked to stop and saved itself."""

    model: "PreTrainedModel"
    """The trained model, in evaluation mode."""
    steps: int
    """Steps done, over all processes of the run."""
    tokens: int
    """Input tokens of those steps."""
    seconds: float
    """Time in those steps; checkpoints are not in it, compilation is."""
    tokens_per_second: float
    """`tokens / seconds`."""
    peak_memory_bytes: int
    """Of this process while it trained (see `PeakMemory`)."""
    final_loss: float
    """Loss of the last step, in nats per label."""
    stop_signal: signal.Signals | None
    """SIGINT or SIGTERM where one stopped the run; None where it finished."""

    @property
    def interrupted(self) -> bool:
        """True if steps remain; `train(..., resume=True)` does them."""
        return self.stop_signal is not None


class InterruptedRun(Stopped):
    """A signal stopped a run; its checkpoint is kept and the same command goes on from it."""
