"""Shaped attention (arXiv 2311.01906) and SkipInit (arXiv 2302.10322): gains of identity and A."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.spec import Declaration, LayerSpec


class SkipInit(nn.Module):
    """α I + β A, a trained α and β for each head, from 1 and 0 (arXiv 2302.10322). A base.

    W_Q, and so every score, starts at 0, unless `query_range` says otherwise.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def gains(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gains of the identity, of attention and of its centre, [H]."""
        return self.alpha, self.beta, None

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: Callable[[Tensor], Tensor]) -> Tensor:
        """The heads' outputs, from values x, attention's output o, and C x from [B, T, H, D]."""
        alpha, beta, gamma = self.gains()
        x, o = (each.unflatten(-1, (len(alpha), -1)) for each in (x_BTC, o_BTC))
        centre = None if gamma is None else centring(x)
        return ops.shaped(x, o, centre, alpha, beta, gamma).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values, from A, `own` (rows of the identity), and C."""
        (alpha, beta, gamma), dtype = self.gains(), weights_BHRS.dtype
        mixed = alpha.to(dtype)[:, None, None] * own_BHRS
        mixed = mixed + beta.to(dtype)[:, None, None] * weights_BHRS
        return mixed if gamma is None else mixed - gamma.to(dtype)[:, None, None] * centring()


class Shaped(SkipInit):
    """α I + β A − γ C, three trained gains for each head, all from 1 (arXiv 2311.01906, eq. 5).

    C is A at W_Q = 0, where W_Q starts, so that the whole is the identity (footnote 3): C x is the
    mean of the n visible values under softmax, their sum / (n + exp(b)) under a sink b.
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
    if layer.scores != "dot" and not layer.query_range:
        return "from W_Q = 0 no gradient ever moves such scores: give query_range=0.02"
    if layer.num_value_heads != layer.num_attention_heads:
        return "each head adds its own value: leave num_value_heads out, and only keys are shared"
    if layer.maps == "differential" and layer.head_norm != "none":
        return "a head's norm leaves no matrix to mix with the identity: choose head_norm='none'"
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
