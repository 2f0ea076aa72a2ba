"""Settings of an optimizer and of its learning rate over a budget of tokens; no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, get_args

from clearhead.errors import ClearheadError
from clearhead.metavars import Pattern
from clearhead.ranges import (
    Betas,
    Count,
    Fraction,
    Length,
    Natural,
    NotNegative,
    Positive,
    Range,
    Share,
    check,
)

Optimizer = Literal["adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon"]
Schedule = Literal["cosine", "linear", "constant", "triangle"]
SCHEDULES = get_args(Schedule)
"""Courses of the learning rate, after warmup."""
# Optimizers that read a setting; one that is not listed is read by all.
_READERS = {
    "momentum": ("muon", "rmsprop", "sgd"),
    "rotation": ("orthoadam",),
    "rotation_share": ("orthoadam",),
    "adamw_patterns": ("muon", "orthoadam"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Optimizer settings, independent of the kind of batches; a ClearheadError names a field that
    cannot work, or that the optimizer does not read."""

    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    final_learning_rate: Fraction = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    warmup: Fraction = 0.1
    """Length of the linear warmup, as a fraction of the steps (of the tokens in a triangle)."""
    schedule: Schedule = "cosine"
    """Fall of the learning rate after the warmup. triangle starts at a quarter of the peak; its
    rise and fall are linear in tokens, not in steps (steps of a ramp differ in tokens)."""
    optimizer: Optimizer = "adamw"
    """Muon steps hidden matrices, AdamW the rest."""
    weight_decay: NotNegative = 0.1
    """Decay of the matrices; norms, biases, gains and learned keys have none. Part of the gradient
    in SGD and RMSprop, decoupled elsewhere."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment; RMSprop reads the second, SGD and Adafactor neither."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    momentum: Share | None = None
    """Momentum; by default 0.9 for SGD, 0 for RMSprop and 0.95 for Muon."""
    rotation: Literal["hadamard", "haar"] | None = None
    """OrthoAdam's rotation; by default hadamard."""
    rotation_share: Literal["parameter", "size"] | None = None
    """OrthoAdam's rotations: one for each parameter, as in its paper (the default), or one for all
    axes of a size."""
    adamw_patterns: Annotated[tuple[Pattern, ...], Range("patterns such as '*.o_proj.*'")] = ()
    """Names of parameters left to AdamW under OrthoAdam and Muon, such as "*.o_proj.*"."""
    clip: NotNegative = 1.0
    """Largest global norm of the gradient; 0 clips nothing."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast; "auto" is bf16 where the hardware multiplies it natively. Weights stay float32."""
    save_every: Natural = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""

    def __post_init__(self) -> None:
        check(self)
        for name, readers in _READERS.items():
            value = getattr(self, name)
            if value not in (None, (), []) and self.optimizer not in readers:
                raise ClearheadError(
                    f"{name} is {value!r}, but {self.optimizer} does not read it: leave it out, or "
                    f"choose {' or '.join(readers)} as optimizer"
                )


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A token budget, spent in windows of tokens, a number of them in each step."""

    tokens: Count = 300_000
    """Budget of input tokens; the remainder after the last whole step is not used."""
    sequence_length: Length = 256
    """Tokens in a window."""
    batch_size: Count = 8
    """Windows in one forward pass."""
    accumulation: Count = 1
    """Forward passes in one optimizer step: a step's batch is that many times batch_size."""
    ramp: Fraction = 0.0
    """Share of the tokens over which the accumulation grows linearly, from 1 to its full number;
    0 has it full from the first step."""
    schedule_tokens: Count | None = None
    """Tokens over which the learning rate, the ramp and annealed parts run their course; they keep
    their last values afterwards. By default all tokens; an extended run keeps its own."""

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step, once its accumulation is full."""
        return self.sequence_length * self.batch_size * self.accumulation

    @property
    def steps(self) -> int:
        """Number of optimizer steps in the budget."""
        return len(self.starts) - 1

    @cached_property
    def starts(self) -> Sequence[int]:
        """Step s takes the batches from starts[s] to before starts[s + 1]."""
        window = self.sequence_length * self.batch_size
        available = self.tokens // window
        if not self.ramp:
            return range(0, available + 1, self.accumulation)
        planned = (self.schedule_tokens or self.tokens) // window
        starts = [0]
        while True:
            grown = (self.accumulation - 1) * starts[-1] / (self.ramp * planned)
            end = starts[-1] + int(min(self.accumulation, 1 + grown))  # inf where ramp is tiny
            if end > available:
                return starts
            starts.append(end)

    def tokens_before(self, step: int) -> int:
        """Input tokens of all steps before `step`, counted from 0."""
        return self.starts[step] * self.batch_size * self.sequence_length

    @cached_property
    def plan(self) -> "Windows":
        """The same settings with the tokens of the schedule as budget."""
        if self.schedule_tokens is None:
            return self
        return replace(self, tokens=self.schedule_tokens, schedule_tokens=None)

    def used(self, step: int) -> float:
        """The share of the schedule's tokens that steps before `step` take."""
        return min(1.0, self.starts[step] / self.plan.starts[-1])

    def done(self, steps: int) -> float:
        """`steps` as a share of the schedule's steps."""
        return min(1.0, steps / self.plan.steps)


@dataclass(frozen=True, kw_only=True)
class Course(Recipe, Windows):
    """A recipe over a token budget, and the random seed."""

    seed: Natural = 0
    """Seeds what is random during training: dropout, and OrthoAdam's rotations."""


def learning_rate(step: int, config: Course) -> float:
    """The learning rate of `step`, counted from 0.

    It rises linearly to the peak on the last step of the warmup; then it falls so that the last
    step of the plan uses exactly `final_learning_rate` times the peak ("constant" stays at the
    peak); steps beyond the plan have the rate of its end. The first step never has rate 0.

    "triangle" is the crammed BERT's triangle2 (arXiv 2212.14034), a function of the share x of the
    budget used before the step: min(1/4 + 3/4 · x / warmup, (1 − x) / (1 − warmup)), with warmup
    3/4 there. It falls towards `final_learning_rate`, reached at the end of the last step.
    """
    peak, final = config.learning_rate, config.final_learning_rate
    if config.schedule == "triangle":
        used = config.used(step)
        if used < config.warmup or config.warmup == 1:
            return peak * (0.25 + 0.75 * used / config.warmup)
        return peak * (final + (1.0 - final) * (1.0 - used) / (1.0 - config.warmup))
    steps = config.plan.steps
    warmup = round(config.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    done = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    cosine = config.schedule == "cosine"
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if cosine else 1.0 - done
    return peak * (final + (1.0 - final) * remaining)
