"""Settings of training and of fine-tuning, checked when they are made; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Literal, get_args

from clearhead.errors import ClearheadError, choose
from clearhead.metavars import Parallel, Pattern
from clearhead.optim.readers import READERS
from clearhead.optim.schedule import SCHEDULES
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

Optimizer = Literal["adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon", "soap", "lion"]
PRECISIONS = ("auto", "bf16", "fp32")
COMPILES = ("none", "blocks")
ROTATIONS = ("hadamard", "haar")
SIDES = ("left", "right", "both")
SHARES = ("parameter", "size")
Tracker = Literal["tensorboard", "trackio", "wandb"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Optimizer settings, independent of what the batches hold.

    Raises:
        ClearheadError: naming the field, what was found and what would work.
    """

    learning_rate: Positive = 1e-3
    """Peak learning rate."""
    final_learning_rate: Fraction = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    warmup: Fraction = 0.1
    """Length of the linear warmup, as a fraction of the steps (of the tokens in a triangle)."""
    schedule: Literal["cosine", "linear", "constant", "triangle"] = "cosine"
    """Fall of the learning rate after the warmup. A triangle starts at a quarter of the peak; both
    its sides are linear in tokens, not in steps (steps of a ramp differ in tokens)."""
    optimizer: Optimizer = "adamw"
    """Muon and SOAP step hidden matrices, AdamW the rest; soap and lion come with an extra."""
    weight_decay: NotNegative = 0.1
    """Decay of the matrices; norms, biases and gains have none. Part of the gradient in SGD and
    RMSprop, decoupled elsewhere."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment; RMSprop reads the second, SGD and Adafactor neither."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    momentum: Share | None = None
    """Momentum of SGD (0.9 where not given), RMSprop (0) and Muon (0.95)."""
    rotation: Literal["hadamard", "haar"] | None = None
    """OrthoAdam's rotation; hadamard where not given."""
    rotation_sides: Literal["left", "right", "both"] | None = None
    """The sides that OrthoAdam rotates, rows (left) or columns; columns where not given."""
    rotation_share: Literal["parameter", "size"] | None = None
    """OrthoAdam's rotations: one for each parameter, as in its paper (the default), or one for all
    axes of a size, as in every record up to 2026-11."""
    adamw_patterns: Annotated[tuple[Pattern, ...], Range("patterns such as '*.o_proj.*'")] = ()
    """Names of parameters left to AdamW under OrthoAdam, Muon and SOAP, such as "*.o_proj.*"."""
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
        choose("optimizer", str(self.optimizer), get_args(Optimizer))
        for name, readers in READERS.items():
            value = getattr(self, name)
            if value not in (None, (), []) and self.optimizer not in readers:
                raise ClearheadError(
                    f"{name} is {value!r}, but {self.optimizer} does not read it: leave it out, or "
                    f"choose {' or '.join(readers)} as optimizer"
                )
        choose("rotation", str(self.rotation or ROTATIONS[0]), ROTATIONS)
        choose("rotation_sides", str(self.rotation_sides or "right"), SIDES)
        choose("rotation_share", str(self.rotation_share or "parameter"), SHARES)
        choose("schedule", str(self.schedule), SCHEDULES)
        choose("precision", str(self.precision), PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Token budget: windows of a stream of tokens, and their number in a step."""

    tokens: Count = 300_000
    """Budget of input tokens; the remainder after the last whole step is not used."""
    sequence_length: Length = 256
    """Tokens in a window."""
    batch_size: Count = 8
    """Windows in one forward pass."""
    accumulation: Count = 1
    """Forward passes in one optimizer step, which is that of one batch so many times as large."""
    ramp: Fraction = 0.0
    """Share of the tokens over which the accumulation grows linearly, from 1 to its full number;
    0 has it full from the first step."""
    schedule_tokens: Count | None = None
    """Tokens over which the learning rate, the ramp and annealed parts run their course; beyond
    them each stays as it ended. All tokens where not given; an extended run keeps its own."""

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
        """The same windows over the tokens of the schedule."""
        if self.schedule_tokens is None:
            return self
        return replace(self, tokens=self.schedule_tokens, schedule_tokens=None)

    def used(self, step: int) -> float:
        """The share of the schedule's tokens that steps before `step` take."""
        return min(1.0, self.starts[step] / self.plan.starts[-1])

    def done(self, steps: int) -> float:
        """The share of the schedule's steps that so many are."""
        return min(1.0, steps / self.plan.steps)


# Ways of spreading a model that are not on offer, and the reason.
_REFUSED = {
    "tensor": "heads would have to be split by width, which these blocks do not do",
    "pipeline": "its stages would need models without tied weights and a schedule of their own",
    "context": "attention here reads whole texts",
}
PARALLELS = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Training on several processes, started by torchrun: docs/scale.md. No token depends on it."""

    parallel: Parallel = "ddp"
    """ddp gives every process the whole model; fsdp (FSDP2) shards it, and with precision bf16
    computes in bfloat16 throughout."""
    shard: Natural = 0
    """Processes that share one copy of the model under fsdp (HSDP); 0 is all of them."""
    reshard: bool = True
    """Under fsdp, free a block's weights after its forward pass and gather them again."""
    checkpointing: Literal["none", "blocks"] = "none"
    """"blocks" recomputes activations in the backward pass, block by block."""
    timeout: Positive = 600.0
    """Seconds that a process waits for another before the run ends with an error."""

    def check_processes(self) -> None:
        """Raise a ClearheadError for what is not on offer, or would have no effect."""
        if reason := _REFUSED.get(self.parallel):
            raise ClearheadError(
                f"parallel {self.parallel} is not supported, for {reason} (docs/scale.md): "
                f"choose {' or '.join(PARALLELS)}"
            )
        choose("parallel", str(self.parallel), PARALLELS)
        choose("checkpointing", str(self.checkpointing), COMPILES)
        if self.parallel != "fsdp" and (self.shard or not self.reshard):
            raise ClearheadError(
                "shard and reshard have no effect under parallel ddp: leave them out, or choose "
                "fsdp"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Processes, Recipe, Windows):  # the last base's fields come first, in help too
    """One training run. Every field shapes the result but those of `Processes`, `save_every`,
    `keep` and `log_every`.

    Raises:
        ClearheadError: naming the field, what was found and what would work.
    """

    compile: Literal["none", "blocks"] = "none"
    """"blocks" compiles each decoder layer with torch.compile."""
    seed: Natural = 0
    """Seeds what is random during training: dropout, and OrthoAdam's rotations."""
    log_every: Count = 1
    """Steps between lines of metrics."""
    document_masks: bool = False
    """Attention and positions restart where a document does; the batches must say where."""
    only: Annotated[tuple[Pattern, ...], Range("patterns such as '*attn*'")] = ()
    """Names of the parameters to train, such as "*attn*"; all where not given."""
    freeze: Annotated[tuple[Pattern, ...], Range("patterns such as '*.layers.[0-3].*'")] = ()
    """Names of parameters to freeze, such as "*.layers.[0-3].*"."""
    lora: Natural = 0
    """Rank of low-rank adapters (LoRA, by the extra peft), trained in place of the linear layers
    that `only` and `freeze` leave, and of all else; 0 trains the weights themselves."""
    lora_alpha: Positive | None = None
    """Scale of the adapters, times their rank; twice the rank where not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_processes()
        choose("compile", str(self.compile), COMPILES)
        if self.tokens < self.tokens_per_step:
            raise ClearheadError(
                f"tokens is {self.tokens}, less than one step of {self.tokens_per_step} "
                f"(sequence_length {self.sequence_length} x batch_size {self.batch_size} x "
                f"accumulation {self.accumulation}): raise tokens, or lower one of those"
            )
        self._check_schedule()
        if self.lora_alpha is not None and not self.lora:
            raise ClearheadError("lora_alpha has no effect without lora, a rank: leave it out")
        if self.ramp and self.accumulation == 1:
            raise ClearheadError(
                f"ramp is {self.ramp}, but accumulation is 1, so that nothing can grow: raise "
                "accumulation, or leave ramp out"
            )

    def _check_schedule(self) -> None:
        planned = self.schedule_tokens
        if planned is None:
            return
        if planned < self.tokens_per_step:
            raise ClearheadError(
                f"schedule_tokens is {planned}, less than one step of {self.tokens_per_step}: "
                "raise it, or leave it out"
            )
        if planned < self.tokens and self.schedule != "constant" and not self.final_learning_rate:
            raise ClearheadError(
                f"the {self.schedule} schedule ends after {planned} tokens at learning rate 0, so "
                f"that the rest of {self.tokens} would teach nothing: start another run from this "
                "one's model (train --from), or give it a final_learning_rate at its start"
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Recipe):
    """The protocol of the crammed BERT's GLUE runs, at SAS's settings (arXiv 2311.01906, D.2).

    Neither states a gradient clip; 1 is this house's.
    """

    learning_rate: Positive = 1.5e-4
    """Peak learning rate."""
    final_learning_rate: Fraction = 0.0
    """Learning rate of the last step, as a fraction of the peak."""
    weight_decay: NotNegative = 0.0
    """Decay of the matrices; norms, biases and gains have none."""
    betas: Betas = (0.9, 0.98)
    """Decay of the first and second moment."""
    epsilon: Positive = 1e-6
    """Added to the root of the second moment."""
    epochs: Count = 5
    """Passes over the training texts."""
    batch_size: Count = 32
    """Texts in a step."""
    max_length: Annotated[int, Range("a whole number of at least 3", lambda n: n >= 3)] = 128
    """Tokens of a text, special ones included; longer ones lose their end."""
    dropout: Share | None = None
    """Dropout of a clearhead model, 0.1 where not given; other models keep their own."""

    def run(self, per_epoch: int, seed: int) -> TrainConfig:
        """One training run of so many batches an epoch."""
        return TrainConfig(
            **{one.name: getattr(self, one.name) for one in fields(Recipe)},
            tokens=self.epochs * per_epoch * self.batch_size * self.max_length,
            sequence_length=self.max_length,
            batch_size=self.batch_size,
            seed=seed,
        )
