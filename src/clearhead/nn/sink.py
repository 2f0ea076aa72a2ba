"""Learned sink: softmax-1 with a learned logit for each head."""

import torch
from torch import Tensor, nn

from clearhead.nn.bases import Weights, with_own_parameters
from clearhead.nn.softmax1 import NOTHING, Softmax1
from clearhead.spec import Declaration, LayerSpec

# Said beside a remedy, where `Sink.rests`.
AT_REST = f"the sinks rest at {NOTHING:g}, where training hardly moves them"


class Sink(Softmax1):
    """exp(s) / (exp(b) + Σ exp(s)) with a learned b for each map.

    b starts at 0, so that the layer starts as softmax-1 exactly.
    """

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.logit = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.logit)

    @property
    def rests(self) -> bool:
        """True if every logit is so low that hardly any gradient reaches it."""
        return bool((self.logit <= NOTHING).all())

    @with_own_parameters
    def resting(self) -> Tensor:
        return self.logit if self.offset is None else self.logit + self.offset


def _adopt(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
    """Logits too low to have an effect, or the logit of the fixed sink that they replace.

    An annealed start needs no low logits: it has no effect at first.
    """
    logit = 0.0 if after.annealed_start or before.normalizer == "softmax1" else NOTHING
    like = weights["q_proj.weight"]
    return {**weights, "normalizer.logit": like.new_full((after.num_attention_heads,), logit)}


DECLARATION = Declaration(
    axis="normalizer",
    name="sink",
    summary="exp(s) / (exp(b) + Σ exp(s)), b learned for each head, from 0 (softmax-1)",
    source="arXiv 2410.17174, section 3.2, with gpt-oss's learned logit",
    build=Sink,
    anneals=True,
    adopt=_adopt,
)
