"""The residual stream of a layer: the order of its two branches, and the skip connections.

Dropout applies to a branch only where a skip connection is added to it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead.spec import Declaration, LayerSpec

Dropout = Callable[[Tensor], Tensor]


class Sequential:
    """Attention, then the MLP over what attention wrote; a norm before each."""

    norms = 2

    @staticmethod
    def run(block: Any, x_BTC: Tensor, context: dict[str, Any]) -> Tensor:
        attended = block.attention_gain(block.self_attn(block.input_layernorm(x_BTC), **context))
        x_BTC = block.attention_skip(x_BTC, attended, block.dropout)
        changed = block.mlp_gain(block.mlp(block.post_attention_layernorm(x_BTC)))
        return block.mlp_skip(block.mlp_skip_gain(x_BTC), changed, block.dropout)


class Parallel:
    """Attention and the MLP over one normed input, added; one skip passes by both."""

    norms = 1

    @staticmethod
    def run(block: Any, x_BTC: Tensor, context: dict[str, Any]) -> Tensor:
        z_BTC = block.input_layernorm(x_BTC)
        attended = block.attention_gain(block.self_attn(z_BTC, **context))
        x_BTC = block.attention_skip(x_BTC, attended, block.dropout)
        return x_BTC + block.dropout(block.mlp_gain(block.mlp(z_BTC)))


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


def _parallel_refuses(layer: LayerSpec) -> str | None:
    if layer.attention_skip != layer.mlp_skip:
        return (
            f"one skip passes by both branches, and attention_skip={layer.attention_skip!r} is not "
            f"mlp_skip={layer.mlp_skip!r}: give both the same, or choose order='sequential'"
        )
    if layer.mlp_skip_gain is not None:
        return "mlp_skip_gain is of the MLP's own skip: leave it out, or choose order='sequential'"
    return None


SEQUENTIAL = Declaration(
    axis="order",
    name="sequential",
    summary="the MLP reads the stream after attention wrote to it; two norms",
    source="arXiv 1706.03762",
    build=Sequential,
)
PARALLEL = Declaration(
    axis="order",
    name="parallel",
    summary="the MLP reads what attention reads; one norm",
    source="GPT-J; arXiv 2311.01906, eq. 7",
    build=Parallel,
    refuses=_parallel_refuses,
)
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
