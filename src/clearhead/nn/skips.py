"""Skip connections around the two branches.

Dropout applies to a branch only where a skip connection is added to it.
"""

from collections.abc import Callable

from torch import Tensor

from clearhead.spec import Declaration, LayerSpec

Dropout = Callable[[Tensor], Tensor]


def identity(x_BTC: Tensor, branch_BTC: Tensor, dropout: Dropout) -> Tensor:
    """The stream, and the branch added to it."""
    return x_BTC + dropout(branch_BTC)


def none(x_BTC: Tensor, branch_BTC: Tensor, dropout: Dropout) -> Tensor:
    """The branch alone."""
    return branch_BTC


def _mlp_refuses(layer: LayerSpec) -> str | None:
    if layer.mlp_skip_gain is not None and layer.mlp_skip == "none":
        return (
            "mlp_skip_gain has no skip to scale: leave it out, or choose mlp_skip='identity' "
            "with order='sequential'"
        )
    return None


ATTENTION_IDENTITY = Declaration(
    axis="attention_skip",
    name="identity",
    summary="x + attention",
    source="arXiv 1706.03762",
    build=lambda: identity,
)
ATTENTION_NONE = Declaration(
    axis="attention_skip",
    name="none",
    summary="attention alone, which must then carry the signal itself (see `shaping`)",
    source="arXiv 2302.10322",
    build=lambda: none,
)
MLP_IDENTITY = Declaration(
    axis="mlp_skip",
    name="identity",
    summary="x + MLP",
    source="arXiv 1706.03762",
    build=lambda: identity,
)
MLP_NONE = Declaration(
    axis="mlp_skip",
    name="none",
    summary="the MLP alone",
    source="arXiv 2311.01906, section 4.3",
    build=lambda: none,
    refuses=_mlp_refuses,
)
