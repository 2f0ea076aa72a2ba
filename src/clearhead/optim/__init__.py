"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

from clearhead.optim.build import OPTIMIZERS as OPTIMIZERS
from clearhead.optim.build import build_optimizer as build_optimizer
from clearhead.optim.build import decay_groups as decay_groups
from clearhead.optim.orthoadam import OrthoAdam as OrthoAdam
from clearhead.settings.recipe import SCHEDULES as SCHEDULES
from clearhead.settings.recipe import Course as Course
from clearhead.settings.recipe import Recipe as Recipe
from clearhead.settings.recipe import Windows as Windows
from clearhead.settings.recipe import learning_rate as learning_rate
