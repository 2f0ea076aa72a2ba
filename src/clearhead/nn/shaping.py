"""No shaping, the base of all shapings; and the layers that cannot be shaped."""

from collections.abc import Callable

from torch import Tensor, nn

from clearhead.nn.protocols import CentringTerm
from clearhead.spec import Declaration, LayerSpec


class NoShaping(nn.Module):
    """A. The base of all shapings."""

    zero_queries = False

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: CentringTerm) -> Tensor:
        return o_BTC

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
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
    build=NoShaping,
)
