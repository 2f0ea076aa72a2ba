"""V-SkipInit's attention: the identity at first, attention mixed in as it proves useful."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.protocols import CentringTerm
from clearhead.nn.shaping import NoShaping, mixes_no_matrix
from clearhead.spec import Declaration, LayerSpec


class SkipInit(NoShaping):
    """α I + β A, a trained α and β for each head, from 1 and 0; W_Q starts at 0.

    With β = 0 no gradient reaches W_Q and W_K in the first step (arXiv 2302.10322).
    """

    zero_queries = True

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.alpha = nn.Parameter(torch.empty(heads))
        self.beta = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: CentringTerm) -> Tensor:
        heads = (len(self.alpha), -1)
        x, o = x_BTC.unflatten(-1, heads), o_BTC.unflatten(-1, heads)
        return ops.shaped(x, o, None, self.alpha, self.beta, None).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        gains = (self.alpha, self.beta)
        alpha, beta = (gain.to(weights_BHRS.dtype)[:, None, None] for gain in gains)
        return alpha * own_BHRS + beta * weights_BHRS


def refuses(layer: LayerSpec) -> str | None:
    """Why attention cannot start from W_Q = 0 beside the identity."""
    if layer.scores != "dot" and not layer.query_range:
        return (
            f"scores={layer.scores!r} are quadratic in the queries, so that from W_Q = 0 no "
            "gradient ever moves them: state query_range=0.02, or choose scores='dot'"
        )
    return mixes_no_matrix(layer)


DECLARATION = Declaration(
    axis="shaping",
    name="skipinit",
    summary="α I + β A, from α = 1 and β = 0, a pair for each head; W_Q from 0",
    source="arXiv 2302.10322; 2311.01906, eq. 4",
    build=SkipInit,
    refuses=refuses,
    flops=lambda layer, length: 3.0 * layer.width,
)
