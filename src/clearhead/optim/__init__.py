"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

from clearhead.optim.build import OPTIMIZERS, READERS, OptimizerConfig, build_optimizer
from clearhead.optim.groups import decay_groups, pattern_groups
from clearhead.optim.orthoadam import OrthoAdam
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
