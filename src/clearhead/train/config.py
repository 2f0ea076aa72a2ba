"""The settings of a training run, checked when they are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose
from clearhead.optim import OPTIMIZERS, READERS, SCHEDULES

PRECISIONS = ("auto", "bf16", "fp32")
COMPILES = ("none", "blocks")
ROTATIONS = ("hadamard", "haar")
SIDES = ("left", "right", "both")
SHARES = ("parameter", "size")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Every field but `save_every`, `keep` and `log_every` shapes the result.

    Raises:
        ClearheadError: naming the field, what was found and what would work.
    """

    tokens: int = 300_000
    """Budget of input tokens; what is left over after the last whole step is not used."""
    sequence_length: int = 256
    """Tokens in a window."""
    batch_size: int = 8
    """Windows in one forward pass."""
    accumulation: int = 1
    """Forward passes in one optimizer step; the step is that of one batch so many times as big."""
    ramp: float = 0.0
    """Share of the tokens over which the accumulation grows linearly, from 1 to its full number;
    0 has it full from the first step."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    warmup: float = 0.1
    """Length of the linear warmup, as a fraction of the steps (of the tokens in a triangle)."""
    schedule: Literal["cosine", "linear", "constant", "triangle"] = "cosine"
    """How the learning rate falls after the warmup. A triangle starts at a quarter of the peak, and
    both its sides are straight in the tokens, which steps of a ramp differ in."""
    optimizer: Literal[
        "adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon", "soap", "lion"
    ] = "adamw"
    """Muon and SOAP step hidden matrices, AdamW the rest; soap and lion come with an extra."""
    weight_decay: float = 0.1
    """Decay of the matrices; norms, biases and gains have none. Part of the gradient in SGD and
    RMSprop, decoupled elsewhere."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment; RMSprop reads the second, SGD and Adafactor neither."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    momentum: float | None = None
    """Of SGD (0.9 where not given), RMSprop (0) and Muon (0.95)."""
    rotation: Literal["hadamard", "haar"] | None = None
    """OrthoAdam's rotation; hadamard where not given."""
    rotation_sides: Literal["left", "right", "both"] | None = None
    """The sides that OrthoAdam rotates, rows (left) or columns; columns where not given."""
    rotation_share: Literal["parameter", "size"] | None = None
    """"parameter" gives each parameter a rotation of its own, as in OrthoAdam's paper; "size" one
    to all axes of a size, as every record up to 2026-11 has it. A parameter where not given."""
    adamw_patterns: tuple[str, ...] = ()
    """Names of parameters left to AdamW under OrthoAdam, Muon and SOAP, such as "*.o_proj.*"."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 clips nothing."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast; "auto" is bf16 where the hardware multiplies it natively. Weights stay float32."""
    compile: Literal["none", "blocks"] = "none"
    """"blocks" compiles each decoder layer with torch.compile."""
    seed: int = 0
    """Seeds what is random during training: dropout, and OrthoAdam's rotations."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    log_every: int = 1
    """Steps between lines of metrics."""
    document_masks: bool = False
    """Attention and positions restart where a document does; the batches must say where."""

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 1),
            ("sequence_length", 2),
            ("batch_size", 1),
            ("accumulation", 1),
            ("seed", 0),
            ("save_every", 0),
            ("keep", 1),
            ("log_every", 1),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _check(name, value, whole, f"a whole number of at least {least}")
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            _check(name, value, _number(value) and value > 0, "a number above 0")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            _check(name, value, _number(value) and value >= 0, "a number of at least 0")
        for name in ("final_learning_rate", "warmup", "ramp"):
            value = getattr(self, name)
            _check(name, value, _number(value) and 0 <= value <= 1, "a fraction between 0 and 1")
        betas = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        betas = betas and all(_number(beta) and 0 <= beta < 1 for beta in self.betas)
        _check("betas", self.betas, betas, "two numbers from 0 to below 1, such as 0.9 0.95")
        _check(
            "document_masks", self.document_masks, isinstance(self.document_masks, bool), "a bool"
        )
        choose("optimizer", str(self.optimizer), OPTIMIZERS)
        for name, readers in READERS.items():
            value = getattr(self, name)
            if value not in (None, (), []) and self.optimizer not in readers:
                raise ClearheadError(
                    f"{name} is {value!r}, but {self.optimizer} does not read it: leave it out, or "
                    f"choose {' or '.join(readers)} as optimizer"
                )
        if self.momentum is not None:
            momentum = _number(self.momentum) and 0 <= self.momentum < 1
            _check("momentum", self.momentum, momentum, "a number from 0 to below 1")
        choose("rotation", str(self.rotation or ROTATIONS[0]), ROTATIONS)
        choose("rotation_sides", str(self.rotation_sides or "right"), SIDES)
        choose("rotation_share", str(self.rotation_share or "parameter"), SHARES)
        patterns = isinstance(self.adamw_patterns, (tuple, list))
        patterns = patterns and all(isinstance(word, str) for word in self.adamw_patterns)
        _check("adamw_patterns", self.adamw_patterns, patterns, "patterns such as '*.o_proj.*'")
        choose("schedule", str(self.schedule), SCHEDULES)
        choose("precision", str(self.precision), PRECISIONS)
        choose("compile", str(self.compile), COMPILES)
        if self.tokens < self.tokens_per_step:
            raise ClearheadError(
                f"tokens is {self.tokens}, less than one step of {self.tokens_per_step} "
                f"(sequence_length {self.sequence_length} x batch_size {self.batch_size} x "
                f"accumulation {self.accumulation}): raise tokens, or lower one of those"
            )

        if self.ramp and self.accumulation == 1:
            raise ClearheadError(
                f"ramp is {self.ramp}, but accumulation is 1, so that nothing can grow: raise "
                "accumulation, or leave ramp out"
            )

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step, once its accumulation is full."""
        return self.sequence_length * self.batch_size * self.accumulation

    @property
    def steps(self) -> int:
        """Optimizer steps that the budget pays for."""
        return len(self.starts) - 1

    @cached_property
    def starts(self) -> Sequence[int]:
        """Step s takes the batches from starts[s] to before starts[s + 1]."""
        available = self.tokens // (self.sequence_length * self.batch_size)
        if not self.ramp:
            return range(0, available + 1, self.accumulation)
        starts = [0]
        while True:
            grown = (self.accumulation - 1) * starts[-1] / (self.ramp * available)
            end = starts[-1] + min(self.accumulation, 1 + int(grown))
            if end > available:
                return starts
            starts.append(end)

    def tokens_before(self, step: int) -> int:
        """Input tokens of all steps before `step`, counted from 0."""
        return self.starts[step] * self.batch_size * self.sequence_length

    def used(self, step: int) -> float:
        """The share of the run's tokens that steps before `step` take."""
        return self.starts[step] / self.starts[-1]


def _number(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and math.isfinite(value)


def _check(name: str, value: Any, valid: bool, wanted: str) -> None:
    if not valid:
        raise ClearheadError(f"{name} is {value!r}: give {wanted}")
