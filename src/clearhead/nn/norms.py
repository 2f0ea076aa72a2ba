"""Normalisation layers."""

import torch
from torch import Tensor, nn

from clearhead.ops import rms_norm
from clearhead.ops.precision import without_autocast
from clearhead.spec import Declaration


class RMSNorm(nn.Module):
    """x / rms(x), times a gain for each channel; float32 inside, the input's dtype outside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RMSNormSingle(RMSNorm):
    """RMSNorm with one gain for all channels, so that no channel is privileged."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(1, eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with gain and bias, in float32 under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            return super().forward(x)


def _no_norm(width: int, eps: float) -> nn.Module:
    return nn.Identity()


RMSNORM = Declaration(
    axis="norm",
    name="rmsnorm",
    summary="root mean square, a gain for each channel",
    source="arXiv 1910.07467",
    build=RMSNorm,
)
RMSNORM_SINGLE = Declaration(
    axis="norm",
    name="rmsnorm-single",
    summary="root mean square, one gain for all channels (part of the OrthoAdam recipe)",
    source="arXiv 2410.17174, RMSNorm-S",
    build=RMSNormSingle,
)
LAYERNORM = Declaration(
    axis="norm",
    name="layernorm",
    summary="mean and variance, gain and bias for each channel",
    source="arXiv 1607.06450",
    build=LayerNorm,
)
NONE = Declaration(
    axis="norm",
    name="none",
    summary="nothing, but LayerNorm in the first layer and after the last",
    source="arXiv 2311.01906, section 4.4, as its authors' code does",
    build=_no_norm,
)
