"""Trained gains of the two branches, and of the MLP's skip."""

import torch
from torch import Tensor, nn

from clearhead.spec import LayerSpec


class Gain(nn.Module):
    """x · β, β a trained number (arXiv 2311.01906, section 4.1)."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start
        self.gain = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gain


def gain(start: float | None) -> Gain | None:
    """The gain of a branch; None where it has none."""
    return None if start is None else Gain(start)


def silent(layer: LayerSpec) -> str | None:
    """Reason why no gradient passes a branch that starts at 0, or None."""
    alone = "would write nothing at the start, and no skip passes by it: make that gain null"
    if layer.attention_skip == "none" and layer.attention_gain == 0:
        return f"attention with attention_gain={layer.attention_gain} {alone}"
    skipped = layer.mlp_skip == "identity" and layer.mlp_skip_gain != 0
    if layer.order == "sequential" and not skipped and layer.mlp_gain == 0:
        return f"the MLP with mlp_gain={layer.mlp_gain} {alone}"
    return None
