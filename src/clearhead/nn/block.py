"""One layer: attention and an MLP around the residual stream, their order and their skips."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead.nn.attention import Attention
from clearhead.nn.gains import Trainable, gain
from clearhead.nn.norms import identity
from clearhead.nn.registry import REGISTRY
from clearhead.spec import Declaration, LayerSpec

Dropout = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention and an MLP, in the order, with the skips and the gains that the layer's axes name.

    The pre-norm block is x + attention(norm x), then x + mlp(norm x). Dropout applies to a branch
    only where a skip connection is added to it.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        norm = REGISTRY.find("norm", layer.norm).build
        scale = REGISTRY.find("residual_scale", layer.residual_scale).build
        self.order = REGISTRY.find("order", layer.order).build()
        self.input_layernorm = norm(layer.hidden_size, layer.norm_eps)
        self.self_attn = Attention(layer)
        self.attention_gain = gain(scale, layer.attention_gain)
        self.attention_skip = REGISTRY.find("attention_skip", layer.attention_skip).build()
        if self.order.norms == 2:
            self.post_attention_layernorm = norm(layer.hidden_size, layer.norm_eps)
        rotation = REGISTRY.find("mlp_rotation", layer.mlp_rotation).build
        mlp = REGISTRY.find("mlp", layer.mlp).build
        self.mlp = mlp(layer, rotation(layer.intermediate_size))
        self.mlp_gain = gain(scale, layer.mlp_gain)
        self.mlp_skip = REGISTRY.find("mlp_skip", layer.mlp_skip).build()
        self.mlp_skip_gain = gain(Trainable, layer.mlp_skip_gain)
        self.dropout = nn.Dropout(layer.dropout) if layer.dropout else identity

    def forward(self, x_BTC: Tensor, **context: Any) -> Tensor:
        return self.order.run(self, x_BTC, context)


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


def _added(x_BTC: Tensor, branch_BTC: Tensor, dropout: Dropout) -> Tensor:
    """The stream, and the branch added to it."""
    return x_BTC + dropout(branch_BTC)


def _alone(x_BTC: Tensor, branch_BTC: Tensor, dropout: Dropout) -> Tensor:
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


_PAPER = "arXiv 1706.03762"
DECLARATIONS = (
    Declaration(
        "order",
        "sequential",
        "the MLP reads the stream after attention wrote to it; two norms",
        _PAPER,
        Sequential,
    ),
    Declaration(
        "order",
        "parallel",
        "the MLP reads what attention reads; one norm",
        "GPT-J; arXiv 2311.01906, eq. 7",
        Parallel,
        refuses=_parallel_refuses,
    ),
    Declaration("attention_skip", "identity", "x + attention", _PAPER, lambda: _added),
    Declaration(
        "attention_skip",
        "none",
        "attention alone, which must then carry the signal itself (see `shaping`)",
        "arXiv 2302.10322",
        lambda: _alone,
    ),
    Declaration("mlp_skip", "identity", "x + MLP", _PAPER, lambda: _added),
    Declaration(
        "mlp_skip",
        "none",
        "the MLP alone",
        "arXiv 2311.01906, section 4.3",
        lambda: _alone,
        refuses=_mlp_refuses,
    ),
)
