"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.optim.build import OPTIMIZERS, build_optimizer
    from clearhead.optim.groups import decay_groups, pattern_groups
    from clearhead.optim.orthoadam import OrthoAdam
    from clearhead.optim.recipe import READERS, SCHEDULES, Course, Recipe, Windows, learning_rate

__all__ = [
    "OPTIMIZERS",
    "READERS",
    "SCHEDULES",
    "Course",
    "OrthoAdam",
    "Recipe",
    "Windows",
    "build_optimizer",
    "decay_groups",
    "learning_rate",
    "pattern_groups",
]

__getattr__ = lazily(__name__)
