"""Positions added to the input: learned, waves; and no position.

`embed` adds to the input; `tables` computes, once for all layers, tables of the positions;
`prepare` applies them to queries and keys in every layer.
"""

import math

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


class ScaledSinusoidal(NoPosition):
    """sin and cos of position · 10000^(−2j/C), added to the embedding, in neighbouring channels.

    Times one learned number, which starts at 1/√C: the paper of the waves multiplies embeddings by
    √C instead.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.layer.hidden_size**-0.5)

    @with_own_parameters
    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        width = x_BTC.shape[-1]
        even = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32)
        angle = positions_BT[..., None].float() * torch.exp(even * (-math.log(10_000.0) / width))
        waves_BTC = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]
        return x_BTC + (waves_BTC * self.scale).to(x_BTC.dtype)


DECLARATIONS = (
    Declaration(
        "position",
        "learned",
        "a learned vector a position, up to max_position_embeddings",
        "GPT-2",
        Learned,
    ),
    Declaration(
        "position",
        "scaled-sinusoidal",
        "fixed waves times a learned number, added to the embedding",
        "arXiv 2212.14034 (crammed BERT); arXiv 2202.10447",
        ScaledSinusoidal,
    ),
    Declaration(
        "position",
        "none",
        "no position: the causal mask alone tells order; without it, a bag of tokens",
        "arXiv 2305.19466",
        NoPosition,
    ),
)
