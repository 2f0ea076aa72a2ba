"""The learning rate: a pure function of the step, so that a resumed run cannot drift."""

import math
from typing import Protocol

from clearhead.errors import choose

SCHEDULES = ("cosine", "linear", "constant", "triangle")
"""Courses of the learning rate, after warmup."""


class Plan(Protocol):
    """A budget of steps."""

    @property
    def steps(self) -> int:
        """Number of its optimizer steps."""


class ScheduleConfig(Protocol):
    """The settings that `learning_rate` reads; `clearhead.train.TrainConfig` has them all."""

    @property
    def learning_rate(self) -> float:
        """The peak."""

    @property
    def final_learning_rate(self) -> float:
        """Where the decay ends, as a fraction of the peak."""

    @property
    def warmup(self) -> float:
        """Length of the linear warmup, as a fraction of the steps."""

    @property
    def schedule(self) -> str:
        """One of `SCHEDULES`: how the rate falls after the warmup."""

    @property
    def plan(self) -> "Plan":
        """The budget over which the rate runs its course; beyond it the rate stays as it ended."""

    def used(self, step: int) -> float:
        """The share of that budget that steps before `step` take; read by "triangle"."""


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """The learning rate of `step`, counted from 0.

    It rises linearly and reaches the peak on the last step of the warmup; then it falls so that
    the last step of the plan uses exactly `final_learning_rate` times the peak ("constant" stays at
    the peak); steps beyond the plan have the rate of its end. The first step never has rate 0,
    which would waste its batch.

    "triangle" is the crammed BERT's triangle2 (arXiv 2212.14034), a function of the share x of the
    budget used before the step: min(1/4 + 3/4 · x / warmup, (1 − x) / (1 − warmup)), with warmup
    3/4 there. It falls towards `final_learning_rate`, which the end of the last step would have.
    """
    if config.schedule == "triangle":
        return config.learning_rate * _triangle(config.used(step), config)
    steps = config.plan.steps
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    match choose("schedule", config.schedule, SCHEDULES):
        case "constant":
            return config.learning_rate
        case "linear":
            remaining = 1.0 - done
        case _:
            remaining = 0.5 * (1.0 + math.cos(math.pi * done))
    final = config.final_learning_rate
    return config.learning_rate * (final + (1.0 - final) * remaining)


def _triangle(used: float, config: ScheduleConfig) -> float:
    if used < config.warmup:
        return 0.25 + 0.75 * used / config.warmup
    final = config.final_learning_rate
    return final + (1.0 - final) * (1.0 - used) / (1.0 - config.warmup)
