"""Plain attention: one map a head."""

from typing import Any

from torch import Tensor, nn

from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec


class Single(nn.Module):
    """One map a head; nothing to combine.

    Attributes:
        maps: their names, in the order in which `split` gives them.
        keys_together: how many neighbouring keys are one head's.
    """

    maps = ("softmax",)
    keys_together = 1

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()

    def coefficients(self, x_BTC: Tensor) -> Tensor | None:
        """What weighs the maps against each other, from attention's input [B, T, C]."""
        return None

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        coefficients: None,
        *,
        attend: Any,
        **options: Any,
    ) -> Tensor:
        """[B, heads, T, width] with heads · width = baseline heads · D."""
        return attend(q_BHTD, k_BGSD, v_BGSD, **options)

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        """Map by map, from what `attend` has for all the queries it gets, [B, H, ...]."""
        return (heads_BH,)

    def effective(self, weights_BHTS: Tensor, coefficients: None) -> Tensor:
        """The matrix that multiplies the values, from the maps in the order `attend` gets them."""
        return weights_BHTS

    def mass(self, mass_BHT1: Tensor | None, coefficients: None) -> Tensor | None:
        """What a row of that matrix sums to, [B, heads, T, 1], where a map's sums to `mass_BHT1`.

        Queries in the order of their projection; None is 1.
        """
        return mass_BHT1


def visible_keys(layer: LayerSpec, length: int) -> float:
    """How many keys a token sees on average."""
    return Visibility(layer.direction == "causal", layer.sliding_window).mean_count(length)


def attention_flops(layer: LayerSpec, length: int) -> float:
    """q kᵀ and p v for each token, over its visible keys."""
    return 4.0 * layer.num_attention_heads * layer.head_dim * visible_keys(layer, length)


def numbers_per_group(layer: LayerSpec) -> int:
    """One vector of the head's width for each key head: a token's keys."""
    return layer.num_key_value_heads * layer.head_dim


DECLARATION = Declaration(
    axis="maps",
    name="single",
    summary="one map a head",
    source="arXiv 1706.03762",
    build=Single,
    flops=attention_flops,
)
