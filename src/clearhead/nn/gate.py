"""Gates on the heads' outputs, from the input of attention (arXiv 2505.06708, G1)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Weights, with_doubled_output
from clearhead.nn.registry import REGISTRY
from clearhead.spec import Declaration, LayerSpec


class Gate(nn.Module):
    """o ∘ σ(x W_G), a number for each token and channel, or for each token and head.

    W_G starts as any matrix, so gates near ½ (arXiv 2505.06708, G1, elementwise and headwise).
    """

    def __init__(self, layer: LayerSpec, heads: int, *, headwise: bool) -> None:
        super().__init__()
        width = heads if headwise else layer.width
        self.gate_proj = nn.Linear(layer.hidden_size, width, bias=False)

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        gate_BTN = torch.sigmoid(self.gate_proj(x_BTC))
        return (o_BTC.unflatten(-1, (gate_BTN.shape[-1], -1)) * gate_BTN[..., None]).flatten(-2)


def _gate(name: str, summary: str, *, headwise: bool) -> Declaration:
    def adopt(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
        """Gates of exactly ½, and W_O doubled."""
        heads = REGISTRY.find("maps", after.maps).heads(after)
        gates = heads if headwise else after.width
        gate = weights["q_proj.weight"].new_zeros(gates, after.hidden_size)
        return {**with_doubled_output(weights, after), "epilogue.gate_proj.weight": gate}

    return Declaration(
        *("epilogue", name, f"o ∘ σ(x W_G), a gate for each {summary}", "arXiv 2505.06708 (G1)"),
        partial(Gate, headwise=headwise),
        flops=lambda layer, length: float(layer.width),
        adopt=adopt,
    )


DECLARATIONS = (
    _gate("gate", "channel", headwise=False),
    _gate("gate-headwise", "head", headwise=True),
)
