"""Softmax-1: a null key with logit 0 and value 0, so that a head may attend to nothing."""

from clearhead.nn.null import NullKey
from clearhead.spec import Declaration, LayerSpec


class Softmax1(NullKey):
    """A fixed sink of logit 0: exp(s) / (1 + Σ exp(s))."""

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__(layer, heads, together)
        self.reset_parameters()


DECLARATION = Declaration(
    axis="normalizer",
    name="softmax1",
    summary="exp(s) / (1 + Σ exp(s)): a row may sum to less than 1",
    source="arXiv 2410.17174, section 3.2",
    build=Softmax1,
    anneals=True,
)
