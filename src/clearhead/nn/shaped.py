"""Shaped attention: the identity, attention and its centre, so that a block starts as its input."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn import skipinit
from clearhead.nn.protocols import CentringTerm
from clearhead.nn.shaping import NoShaping
from clearhead.spec import Declaration, LayerSpec


class Shaped(NoShaping):
    """α I + β A − γ C, three trained gains for each head, all from 1; W_Q starts at 0.

    C is A at W_Q = 0: under softmax the mean over visible keys, under softmax-1 their sum over
    n + 1, under a sink b over n + exp(b), and of several maps what they combine to; with ALiBi each
    key weighs exp(−slope · distance) in these. So A = C at the start, and the whole is the identity
    (arXiv 2311.01906, eq. 5 and footnote 3).
    """

    zero_queries = True

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.alpha = nn.Parameter(torch.empty(heads))
        self.beta = nn.Parameter(torch.empty(heads))
        self.gamma = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gain in (self.alpha, self.beta, self.gamma):
            nn.init.ones_(gain)

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: CentringTerm) -> Tensor:
        heads = (len(self.alpha), -1)
        x, o = x_BTC.unflatten(-1, heads), o_BTC.unflatten(-1, heads)
        gains = self.alpha, self.beta, self.gamma
        if centring.running:
            return ops.shaped_causal(x, o, *gains).flatten(2)
        return ops.shaped(x, o, centring.make(), *gains).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        gains = (self.alpha, self.beta, self.gamma)
        alpha, beta, gamma = (gain.to(weights_BHRS.dtype)[:, None, None] for gain in gains)
        return alpha * own_BHRS + beta * weights_BHRS - gamma * centring()


DECLARATION = Declaration(
    axis="shaping",
    name="shaped",
    summary="α I + β A − γ C, all from 1, three gains a head; C is A at W_Q = 0, where W_Q starts",
    source="arXiv 2311.01906, eq. 5",
    build=Shaped,
    refuses=skipinit.refuses,
    flops=lambda layer, length: 8.0 * layer.width,  # the running mean beside the three gains
)
