"""Training: the loop, its checkpoints, and the protocol of those who watch."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.train.batches import BatchSource
    from clearhead.train.callbacks import (
        Callback,
        MetricsFile,
        Progress,
        Run,
        StepMetrics,
        TensorBoard,
        Trackio,
        WandB,
        make_trackers,
    )
    from clearhead.train.config import FinetuneConfig, TrainConfig
    from clearhead.train.loop import train
    from clearhead.train.result import DivergedError, InterruptedRun, TrainResult
    from clearhead.train.run_dir import holds_run, is_finished
    from clearhead.train.whole import train_to_end

__all__ = [
    "BatchSource",
    "Callback",
    "DivergedError",
    "FinetuneConfig",
    "InterruptedRun",
    "MetricsFile",
    "Progress",
    "Run",
    "StepMetrics",
    "TensorBoard",
    "Trackio",
    "TrainConfig",
    "TrainResult",
    "WandB",
    "holds_run",
    "is_finished",
    "make_trackers",
    "train",
    "train_to_end",
]

__getattr__ = lazily(__name__)
