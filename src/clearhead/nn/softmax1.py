"""Softmax-1: a null key with logit 0 and value 0, so that a head may attend to nothing."""

from clearhead.nn.softmax import Softmax
from clearhead.spec import Declaration


class Softmax1(Softmax):
    """A fixed sink of logit 0: exp(s) / (1 + Σ exp(s))."""

    def resting(self) -> float:
        return 0.0


DECLARATION = Declaration(
    axis="normalizer",
    name="softmax1",
    summary="exp(s) / (1 + Σ exp(s)): a row may sum to less than 1",
    source="arXiv 2410.17174, section 3.2",
    build=Softmax1,
)
