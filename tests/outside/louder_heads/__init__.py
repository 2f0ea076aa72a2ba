"""A package of its own beside clearhead: an epilogue, and a preset that has it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import clearhead
from clearhead.spec import Declaration, LayerSpec


class Louder(nn.Module):
    """o · g, a trained number for each head, from 1."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        return (o_BTC.unflatten(-1, (len(self.gain), -1)) * self.gain[:, None]).flatten(2)


def _refuses(layer: LayerSpec) -> str | None:
    return "it is for two heads or more" if layer.num_attention_heads == 1 else None


clearhead.register(
    Declaration(
        axis="epilogue",
        name="louder",
        summary="o · g, a gain a head",
        source="a test",
        build=Louder,
        refuses=_refuses,
    )
)
clearhead.register_preset(
    "louder", {"epilogue": "louder"}, "the baseline with a gain for each head"
)
