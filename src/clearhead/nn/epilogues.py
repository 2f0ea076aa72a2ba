"""No epilogue, the base of the steps between the heads' outputs and their projection."""

from collections.abc import Callable

from torch import Tensor, nn

from clearhead.spec import Declaration, LayerSpec


class NoEpilogue(nn.Module):
    """The heads' outputs as they are. The base of all epilogues."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        return o_BTC


DECLARATION = Declaration(
    axis="epilogue",
    name="none",
    summary="the heads as they are",
    source="arXiv 1706.03762",
    build=NoEpilogue,
)
