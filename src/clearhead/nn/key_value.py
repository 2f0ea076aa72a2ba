"""Learned keys and values before every text: null keys that have values."""

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Softmax, with_own_parameters
from clearhead.spec import Declaration, LayerSpec


class KeyValue(nn.Module, Softmax):
    """Softmax over the text's keys and N learned keys k′ with learned values v′.

    They take the positions 0 to N − 1, and the text begins at N: filled with the keys and values of
    tokens, they act as these tokens before the text. Every query sees them: no window, padding or
    document hides them. From 0 they start as softmax-1 with a logit of log N.
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        nn.Module.__init__(self)
        Softmax.__init__(self, layer, heads, together)
        self.prefix_length = number = layer.prefix_length
        self.key_bias = nn.Parameter(torch.empty(layer.num_key_value_heads, number, layer.head_dim))
        self.value_bias = nn.Parameter(torch.empty(layer.num_value_heads, number, layer.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.key_bias)
        nn.init.zeros_(self.value_bias)

    @with_own_parameters
    def prefix(self) -> tuple[Tensor, Tensor]:
        return self.key_bias, self.value_bias


def _refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot":
        return (
            f"scores={layer.scores!r} pass no gradient to keys of 0, as its own start: choose "
            "scores='dot', or normalizer='sink'"
        )
    if layer.shaping != "none":
        return (
            f"shaping={layer.shaping!r} subtracts attention's centre, which leaves its values out: "
            "choose shaping='none', or normalizer='sink'"
        )
    return None


DECLARATION = Declaration(
    axis="normalizer",
    name="key-value",
    summary="softmax over learned keys k′ with learned values v′ before the text's own, from 0",
    source="arXiv 2402.17762, eq. 3; filled with a token's, arXiv 2410.05265 (PrefixQuant)",
    build=KeyValue,
    refuses=_refuses,
    flops=lambda layer, length: (
        4.0 * layer.num_attention_heads * layer.head_dim * layer.prefix_length
    ),
)
