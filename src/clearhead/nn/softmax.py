"""Softmax: a row of weights sums to 1, so a head that finds nothing must still look somewhere."""

from torch import Tensor, nn

from clearhead.spec import Declaration


class Softmax(nn.Module):
    """No sink beside the keys.

    Normalizers are built for a number of maps, the queries that a token has.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()

    def sink(self) -> float | Tensor | None:
        """The logit that competes with the keys in `ops.attend`."""
        return None


DECLARATION = Declaration(
    axis="normalizer",
    name="softmax",
    summary="exp(s) / Σ exp(s)",
    source="arXiv 1706.03762",
    build=Softmax,
)
