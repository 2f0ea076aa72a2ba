"""A sigmoid gate on the heads' outputs from attention's input, a number for each channel."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Weights, with_doubled_output
from clearhead.spec import Declaration, LayerSpec


class Gate(nn.Module):
    """o ∘ σ(x W_G), a number for each token and channel.

    A head can thus output nothing without a sink. W_G starts as any matrix, the gates near ½
    (arXiv 2505.06708, G1, elementwise).
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(layer.hidden_size, layer.width, bias=False)

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        return o_BTC * torch.sigmoid(self.gate_proj(x_BTC))


def _adopt(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
    """Gates of exactly ½, and W_O doubled."""
    gate = weights["q_proj.weight"].new_zeros(after.width, after.hidden_size)
    return {**with_doubled_output(weights, after), "epilogue.gate_proj.weight": gate}


DECLARATION = Declaration(
    axis="epilogue",
    name="gate",
    summary="o ∘ σ(x W_G), a gate for each channel",
    source="arXiv 2505.06708 (G1)",
    build=Gate,
    flops=lambda layer, length: float(layer.width),
    adopt=_adopt,
)
