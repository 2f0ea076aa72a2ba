"""Training: the loop, its checkpoints, and the protocol of those who watch."""

from clearhead.train.batches import BatchSource
from clearhead.train.callbacks import (
    Callback,
    MetricsFile,
    Progress,
    Run,
    StepMetrics,
    TensorBoard,
    Trackio,
)
from clearhead.train.config import TrainConfig
from clearhead.train.finetuning import FinetuneConfig, Finetuned, finetune
from clearhead.train.folder import holds_run, is_finished
from clearhead.train.loop import train
from clearhead.train.result import DivergedError, TrainResult

__all__ = [
    "BatchSource",
    "Callback",
    "DivergedError",
    "FinetuneConfig",
    "Finetuned",
    "MetricsFile",
    "Progress",
    "Run",
    "StepMetrics",
    "TensorBoard",
    "Trackio",
    "TrainConfig",
    "TrainResult",
    "finetune",
    "holds_run",
    "is_finished",
    "train",
]
