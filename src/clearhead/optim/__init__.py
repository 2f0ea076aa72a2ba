"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.optim.build import OPTIMIZERS as OPTIMIZERS
    from clearhead.optim.build import build_optimizer as build_optimizer
    from clearhead.optim.build import decay_groups as decay_groups
    from clearhead.optim.orthoadam import OrthoAdam as OrthoAdam
    from clearhead.optim.recipe import SCHEDULES as SCHEDULES
    from clearhead.optim.recipe import Course as Course
    from clearhead.optim.recipe import Recipe as Recipe
    from clearhead.optim.recipe import Windows as Windows
    from clearhead.optim.recipe import learning_rate as learning_rate


__getattr__, __all__ = lazily(__name__)
