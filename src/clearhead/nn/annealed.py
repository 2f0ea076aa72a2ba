"""The annealed identity: attention takes over from the identity as training goes on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.protocols import CentringTerm
from clearhead.nn.shaping import NoShaping, mixes_no_matrix
from clearhead.spec import Declaration, LayerSpec


class Annealed(NoShaping):
    """λ I + (1 − λ) A, λ = 1 − t, t the part of the run that is done: plain attention at the end.

    λ is a number of the run and no weight: `on_step_end` sets it, checkpoints hold it.
    """

    identity: Tensor

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.register_buffer("identity", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.identity)

    def on_step_end(self, done: float, loss: float) -> None:
        """After a step: `done` of the run, from 0 to 1."""
        self.identity.fill_(1 - done)

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: CentringTerm) -> Tensor:
        x, o = x_BTC.unflatten(-1, (1, -1)), o_BTC.unflatten(-1, (1, -1))
        return ops.shaped(x, o, None, self.identity, 1 - self.identity, None).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        identity = self.identity.to(weights_BHRS.dtype)
        return identity * own_BHRS + (1 - identity) * weights_BHRS


DECLARATION = Declaration(
    axis="shaping",
    name="annealed",
    summary="λ I + (1 − λ) A, λ falling from 1 to 0 over the training run",
    source="a reading of arXiv 2311.01906",
    build=Annealed,
    refuses=mixes_no_matrix,
    flops=lambda layer, length: 3.0 * layer.width,
)
