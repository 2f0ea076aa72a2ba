"""A learned key whose value is zero: a sink whose logit is a product with the query."""

import torch
from torch import Tensor, nn

from clearhead.nn.bases import with_own_parameters
from clearhead.nn.softmax1 import Softmax1
from clearhead.ops.precision import without_autocast
from clearhead.ops.requests import repeat
from clearhead.spec import Declaration, LayerSpec


class KeyBias(Softmax1):
    """exp(s) / (exp(q · k′ / √d) + Σ exp(s)), k′ learned for each key head (arXiv 2410.10781).

    k′ has no position: its score is with the query as projected. It starts at 0, so the layer
    starts as softmax-1 exactly.
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.scale = layer.head_dim**-0.5
        self.key = nn.Parameter(torch.empty(layer.num_key_value_heads, layer.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.key)

    @with_own_parameters
    def sink(self, q_BHTD: Tensor) -> Tensor:
        exact = torch.promote_types(q_BHTD.dtype, torch.float32)
        key_BHD1 = repeat(self.key[None, :, :, None], self.heads, self.together)
        # Autocast would round the logits to bfloat16.
        with without_autocast(q_BHTD):
            logit_BHT = (q_BHTD.to(exact) @ key_BHD1.to(exact)).squeeze(-1) * self.scale
        return logit_BHT if self.offset is None else logit_BHT + self.offset


def _refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot":
        return (
            f"its key is scored by the dot product, unlike keys under scores={layer.scores!r}: "
            "choose scores='dot', or normalizer='sink'"
        )
    return None


DECLARATION = Declaration(
    axis="normalizer",
    name="key",
    summary="exp(s) / (exp(q · k′ / √d) + Σ exp(s)), k′ a learned key of value zero, from 0",
    source="arXiv 2410.10781 (K biases)",
    build=KeyBias,
    anneals=True,
    refuses=_refuses,
    flops=lambda layer, length: 2.0 * layer.num_attention_heads * layer.head_dim,
)
