"""Positions added to the input: learned, sinusoidal (arXiv 1706.03762), scaled; and none."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.nn.bases import NoPosition, with_own_parameters
from clearhead.spec import Declaration, LayerSpec


class Learned(NoPosition):
    """A learned vector for each of `max_position_embeddings` positions, added to the embedding."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.weight = nn.Embedding(layer.max_position_embeddings, layer.hidden_size)

    def longest(self) -> int:
        return self.layer.max_position_embeddings

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTC + self.weight(positions_BT)


class Sinusoidal(NoPosition):
    """sin and cos of position · 10000^(−2j/C), side by side, times `initializer_range`."""

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.layer.initializer_range).to(x_BTC.dtype)


class ScaledSinusoidal(NoPosition):
    """The waves of `Sinusoidal` times one learned number, which starts at 1/√C."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.layer.hidden_size**-0.5)

    @with_own_parameters
    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.scale).to(x_BTC.dtype)


def _waves(positions_BT: Tensor, width: int) -> Tensor:
    even = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32)
    angle = positions_BT[..., None].float() * torch.exp(even * (-math.log(10_000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


_position = partial(Declaration, "position")
DECLARATIONS = (
    _position(
        "learned", "a learned vector a position, up to max_position_embeddings", "GPT-2", Learned
    ),
    _position(
        "sinusoidal",
        "fixed waves added to the embedding",
        "arXiv 1706.03762, section 3.5",
        Sinusoidal,
    ),
    _position(
        "scaled-sinusoidal",
        "fixed waves times a learned number, added to the embedding",
        "arXiv 2212.14034 (crammed BERT); arXiv 2202.10447",
        ScaledSinusoidal,
    ),
    _position(
        "none",
        "no position: the causal mask alone tells order; without it, a bag of tokens",
        "arXiv 2305.19466",
        NoPosition,
    ),
)
