"""Observers of a run: the protocol, and those that come with the house."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.train.callbacks.callback import Callback, Run, StepMetrics
    from clearhead.train.callbacks.metrics import MetricsFile
    from clearhead.train.callbacks.progress import Progress
    from clearhead.train.callbacks.trackers import TensorBoard, Trackio, WandB, make_trackers

__all__ = [
    "Callback",
    "MetricsFile",
    "Progress",
    "Run",
    "StepMetrics",
    "TensorBoard",
    "Trackio",
    "WandB",
    "make_trackers",
]

__getattr__ = lazily(__name__)
