"""ALiBi: a penalty on distance, a slope for each head, as extra columns of queries and keys."""

from typing import Any

import torch
from torch import Tensor

from clearhead import ops
from clearhead.nn.positions import NoPosition, Part
from clearhead.nn.single import visible_keys
from clearhead.spec import Declaration, LayerSpec

LONGEST = 256**2


class Alibi(NoPosition):
    """Scores get −slope · |i − j|, from 8 more columns (`ops.alibi_columns`), never a T × T bias.

    Causally that is −slope · (i − j). Of a whole text the columns of the keys after a query carry
    the opposite of it: |i − j| is no one sum of products, but one on either side.
    The maps of one head share its slope: differential attention subtracts what both have. Keys are
    kept without the columns, which their positions give.
    """

    @staticmethod
    def late(layer: LayerSpec) -> bool:
        return True

    def longest(self) -> int:
        return LONGEST

    def parts(self, queries_BT: Tensor, keys_BS: Tensor) -> tuple[Part, ...]:
        scale = self.layer.head_dim**-0.5
        slopes_H = ops.alibi_slopes(self.heads, queries_BT.device)
        q, k = ops.alibi_columns(queries_BT, keys_BS, slopes_H, scale)
        centre = keys_BS, ops.held_slopes(slopes_H, scale)
        if self.layer.direction == "causal":
            return (Part(q, k, centre),)
        return (Part((q, -q), (k, k), centre, by_side=True),)

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        return ops.with_columns(x_BHTD, table)

    @staticmethod
    def centre(x_BHSD: Tensor, queries: int, table: Any, **seen: Any) -> tuple[Tensor, Tensor]:
        """A mean that fades with distance, by each head's slope."""
        positions_BS, slopes_H = table
        if x_BHSD.shape[1] != len(slopes_H):
            x_BHSD = x_BHSD.transpose(1, 2).flatten(2).unflatten(-1, (len(slopes_H), -1))
            x_BHSD = x_BHSD.transpose(1, 2)
        return ops.fading_mean(x_BHSD, queries, positions_BS, slopes_H, **seen)

    @staticmethod
    def alone(x_BHTN: Tensor, by_side: bool) -> Tensor:
        sides = x_BHTN.chunk(2, -1) if by_side else (x_BHTN,)
        return torch.cat([ops.alibi.alone(side) for side in sides], -1)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.max_position_embeddings > LONGEST:
        return f"positions above {LONGEST} have more than two digits of base 256: choose rope"
    return None


def _flops(layer: LayerSpec, length: int) -> float:
    return 2.0 * ops.alibi.COLUMNS * layer.num_attention_heads * visible_keys(layer, length)


DECLARATION = Declaration(
    axis="position",
    name="alibi",
    summary="scores minus slope · distance, either way, a slope for each head",
    source="arXiv 2108.12409",
    build=Alibi,
    refuses=_refuses,
    flops=_flops,
)
