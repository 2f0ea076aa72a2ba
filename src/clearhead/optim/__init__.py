"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.optim.build import OPTIMIZERS, OptimizerConfig, build_optimizer
    from clearhead.optim.groups import decay_groups, pattern_groups
    from clearhead.optim.orthoadam import OrthoAdam
    from clearhead.optim.readers import READERS
    from clearhead.optim.schedule import SCHEDULES, ScheduleConfig, learning_rate

__all__ = [
    "OPTIMIZERS",
    "READERS",
    "SCHEDULES",
    "OptimizerConfig",
    "OrthoAdam",
    "ScheduleConfig",
    "build_optimizer",
    "decay_groups",
    "learning_rate",
    "pattern_groups",
]

__getattr__ = lazily(__name__)
