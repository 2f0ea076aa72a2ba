"""No shaping: the heads are attention's output, and nothing of the identity is in the matrix."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from clearhead.spec import Declaration, LayerSpec


class Centre(NamedTuple):
    """C x, attention's output at W_Q = 0, for a shaping that asks for it.

    Attributes:
        make: makes it, [B, T, heads, width].
        running: whether it is the running mean of these tokens' own values and nothing else, as in
            `ops.shaped_causal`.
    """

    make: Callable[[], Tensor]
    running: bool


class Unshaped(nn.Module):
    """A. The base of all shapings, which are built for a layer and its number of heads.

    Attributes:
        zero_queries: whether W_Q is to start at 0, so that all scores do.
    """

    zero_queries = False

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centre: Centre) -> Tensor:
        """What the heads write, from these tokens' values x and o, attention's output over all."""
        return o_BTC

    def effective(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centre: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values: from A, the identity's rows, and C as a matrix."""
        return weights_BHRS


def mixes_no_matrix(layer: LayerSpec) -> str | None:
    """Why the identity cannot be mixed into this layer's attention."""
    if layer.num_value_heads != layer.num_attention_heads:
        return (
            "a head adds its own value to what it attends to, and "
            f"{layer.num_attention_heads} heads cannot share num_value_heads="
            f"{layer.num_value_heads}: leave it out, and only keys are shared"
        )
    if layer.maps == "differential" and layer.head_norm != "none":
        return (
            "a norm of each head leaves no matrix to mix with the identity: choose "
            "head_norm='none', or maps='differential-v2'"
        )
    return None


DECLARATION = Declaration(
    axis="shaping",
    name="none",
    summary="A",
    source="arXiv 1706.03762",
    build=Unshaped,
)
