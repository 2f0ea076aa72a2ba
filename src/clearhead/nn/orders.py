"""Order of a layer's two branches: sequential or parallel."""

from typing import Any

from torch import Tensor

from clearhead.spec import Declaration, LayerSpec


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


def _refuses(layer: LayerSpec) -> str | None:
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
    refuses=_refuses,
)
