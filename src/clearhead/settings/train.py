"""Settings of training and of fine-tuning, checked at construction; imports no torch."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from clearhead.errors import ClearheadError
from clearhead.metavars import Pattern
from clearhead.ranges import Betas, Count, Fraction, Natural, NotNegative, Positive, Range, Share
from clearhead.settings.recipe import Course, Recipe

Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Course):
    """Settings of one training run; a ClearheadError names a field that cannot work. All shape the
    result except `parallel`, `checkpointing`, `timeout`, `save_every`, `keep` and `log_every`."""

    compile: Literal["none", "blocks"] = "none"
    """"blocks" compiles each decoder layer with torch.compile."""
    log_every: Count = 1
    """Steps between lines of metrics."""
    document_masks: bool = False
    """Attention and positions restart at each document; the batches must mark documents."""
    begin_windows: bool = False
    """Put the begin token in the place of every window's first token (the last target of the
    window before). The model's config.json records it, and every verb then reads windows so."""
    only: Annotated[tuple[Pattern, ...], Range("patterns such as '*attn*'")] = ()
    """Names of the parameters to train, such as "*attn*"; by default all."""
    freeze: Annotated[tuple[Pattern, ...], Range("patterns such as '*.layers.[0-3].*'")] = ()
    """Names of parameters to freeze, such as "*.layers.[0-3].*"."""
    lora: Natural = 0
    """Rank of low-rank adapters (LoRA, by the extra peft) of the linear layers that `only` and
    `freeze` leave; they alone are then trained. 0 trains the weights themselves. The adapters'
    scale is twice their rank."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp gives every process the whole model; fsdp (FSDP2) shards it, and with precision bf16
    computes in bfloat16 throughout."""
    checkpointing: Literal["none", "blocks"] = "none"
    """"blocks" recomputes activations in the backward pass, block by block."""
    timeout: Positive = 600.0
    """Seconds that a process waits for another before the run ends with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "schedule_tokens"):
            budget = getattr(self, name)
            if budget is not None and budget < self.tokens_per_step:
                raise ClearheadError(
                    f"{name} is {budget}, less than one step of {self.tokens_per_step} "
                    "(sequence_length x batch_size x accumulation): raise it, or lower one of those"
                )
        if self.ramp and self.accumulation == 1:
            raise ClearheadError(f"ramp is {self.ramp}, but accumulation is 1: raise it")
        planned, falls = self.schedule_tokens or self.tokens, self.schedule != "constant"
        if planned < self.tokens and falls and not self.final_learning_rate:
            raise ClearheadError(
                f"the {self.schedule} schedule ends after {planned} tokens at learning rate 0, and "
                f"the rest of {self.tokens} would teach nothing: start another run from this model "
                "(train --from)"
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Recipe):
    """The protocol of the crammed BERT's GLUE runs, at SAS's settings (arXiv 2311.01906, D.2), and
    a gradient clip of ours, 1."""

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
    """Tokens of a text, special ones included; longer texts lose their end."""
    dropout: Share | None = None
    """Dropout of a clearhead model, by default 0.1; other models keep their own."""

    def run(self, per_epoch: int, seed: int) -> TrainConfig:
        """The settings of one training run with `per_epoch` batches in an epoch."""
        return TrainConfig(
            **{one.name: getattr(self, one.name) for one in fields(Recipe)},
            tokens=self.epochs * per_epoch * self.batch_size * self.max_length,
            sequence_length=self.max_length,
            batch_size=self.batch_size,
            seed=seed,
        )
