"""Softmax-1: a null key with logit 0 and value 0, so that a head may attend to nothing."""

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Softmax, with_own_parameters
from clearhead.spec import Declaration, LayerSpec

# Beside a row's log-sum-exp of −20 or more, less than float32 resolves.
NOTHING = -40.0


class Softmax1(nn.Module, Softmax):
    """A fixed sink of logit 0: exp(s) / (1 + Σ exp(s)). The base of learned sinks and key biases.

    `annealed_start` adds −40 (1 − t)² to its logit, t the part of the training run that is done:
    half of the run is spent above −10, where a null key begins to count. The offset is a buffer
    that `on_step_end` sets. It never falls, so a trained model can be trained further.
    """

    offset: Tensor | None

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        nn.Module.__init__(self)
        Softmax.__init__(self, layer, heads, together)
        self.register_buffer("offset", torch.empty(1) if layer.annealed_start else None)
        Softmax1.reset_parameters(self)

    def reset_parameters(self) -> None:
        if self.offset is not None:
            nn.init.constant_(self.offset, NOTHING)

    def on_step_end(self, done: float) -> None:
        """Set the offset after a step, at a share `done` of the run from 0 to 1."""
        if self.offset is not None:
            self.offset.clamp_(min=NOTHING * (1 - done) ** 2)

    @with_own_parameters
    def resting(self) -> float | Tensor:
        return 0.0 if self.offset is None else self.offset.expand(self.heads)


DECLARATION = Declaration(
    "normalizer",
    "softmax1",
    "exp(s) / (1 + Σ exp(s)): a row may sum to less than 1",
    "arXiv 2410.17174, section 3.2",
    Softmax1,
    anneals=True,
)
