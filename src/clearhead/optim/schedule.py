"""The learning rate: a pure function of the step, so that a resumed run cannot drift."""

import math
from typing import Protocol

from clearhead.errors import choose

SCHEDULES = ("cosine", "linear", "constant")


class ScheduleConfig(Protocol):
    """What `learning_rate` reads; `clearhead.train.TrainConfig` has it all."""

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
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """The learning rate of `step`, counted from 0.

    It rises linearly and reaches the peak on the last step of the warmup; then it falls so that
    the last step of the run uses exactly `final_learning_rate` times the peak ("constant" stays at
    the peak). The first step never has rate 0, which would waste its batch.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = min(1.0, (step + 1 - warmup) / max(1, config.steps - warmup))
    match choose("schedule", config.schedule, SCHEDULES):
        case "constant":
            return config.learning_rate
        case "linear":
            remaining = 1.0 - done
        case _:
            remaining = 0.5 * (1.0 + math.cos(math.pi * done))
    final = config.final_learning_rate
    return config.learning_rate * (final + (1.0 - final) * remaining)
