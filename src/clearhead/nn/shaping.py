"""Shaped attention: the identity, attention and its centre, so that a block starts as its input."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.spec import Declaration, LayerSpec


class SkipInit(nn.Module):
    """α I + β A, a trained α and β for each head, from 1 and 0. The base of all shapings.

    W_Q, and so every score, starts at 0, unless `query_range` says otherwise.
    With β = 0 no gradient reaches W_Q and W_K in the first step (arXiv 2302.10322).
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def gains(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gains of the identity, of attention and of its centre: one a head, or one for all."""
        return self.alpha, self.beta, None

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: Callable[[Tensor], Tensor]) -> Tensor:
        """The heads' outputs, from these tokens' values x and attention's output o over all.

        `centring` computes C x, attention's output at W_Q = 0, from x by head, [B, T, H, D].
        """
        alpha, beta, gamma = self.gains()
        x, o = (each.unflatten(-1, (len(alpha), -1)) for each in (x_BTC, o_BTC))
        centre = None if gamma is None else centring(x)
        return ops.shaped(x, o, centre, alpha, beta, gamma).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values, from A, `own` (rows of the identity), and C."""

        def wide(gain: Tensor) -> Tensor:
            return gain.to(weights_BHRS.dtype)[:, None, None]

        alpha, beta, gamma = self.gains()
        mixed = wide(alpha) * own_BHRS + wide(beta) * weights_BHRS
        return mixed if gamma is None else mixed - wide(gamma) * centring()


class Shaped(SkipInit):
    """α I + β A − γ C, three trained gains for each head, all from 1; W_Q starts at 0.

    C is A at W_Q = 0: C x is the mean of the n visible values under softmax, their sum / (n + 1)
    under softmax-1, / (n + exp(b)) under a sink b, and combined as A is if a head has several maps.
    So A = C at the start, and the whole is the identity (arXiv 2311.01906, eq. 5 and footnote 3).
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.beta, self.gamma = (nn.Parameter(torch.ones(heads)) for _ in range(2))

    def reset_parameters(self) -> None:
        for gain in self.parameters():
            nn.init.ones_(gain)

    def gains(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.alpha, self.beta, self.gamma


def _refuses(layer: LayerSpec) -> str | None:
    """Reason why attention cannot start from W_Q = 0 beside the identity, or None."""
    if layer.scores != "dot" and not layer.query_range:
        return (
            f"scores={layer.scores!r} are quadratic in the queries, so that from W_Q = 0 no "
            "gradient ever moves them: give query_range=0.02, or choose scores='dot'"
        )
    if layer.num_value_heads != layer.num_attention_heads:
        return (
            "a head adds its own value to what it attends to, and "
            f"{layer.num_attention_heads} heads cannot share num_value_heads="
            f"{layer.num_value_heads}: leave it out, and only keys are shared"
        )
    if layer.maps == "differential" and layer.head_norm != "none":
        return (
            "a norm of each head leaves no matrix to mix with the identity: choose "
            "head_norm='none', or maps='differential-v2'"
        )
    return None


_shaping = partial(Declaration, "shaping", refuses=_refuses)
DECLARATIONS = (
    _shaping(
        "skipinit",
        "α I + β A, from α = 1 and β = 0, a pair for each head; W_Q from 0",
        "arXiv 2302.10322; 2311.01906, eq. 4",
        SkipInit,
        flops=lambda layer, length: 3.0 * layer.width,
    ),
    _shaping(
        "shaped",
        "α I + β A − γ C, all from 1, three gains a head; C is A at W_Q = 0, where W_Q starts",
        "arXiv 2311.01906, eq. 5",
        Shaped,
        flops=lambda layer, length: 8.0 * layer.width,  # the running mean beside the three gains
    ),
)
