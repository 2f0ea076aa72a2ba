"""Softmax: a row of weights sums to 1, so a head that finds nothing must still look somewhere."""

import torch
from torch import Tensor, nn

from clearhead.spec import Declaration


class Softmax(nn.Module):
    """No sink beside the keys.

    Normalizers are built for a number of maps, the queries that a token has.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def sink(self) -> float | Tensor | None:
        """The logit that competes with the keys in `ops.attend`."""
        return None

    def mass(self, count_BT: Tensor) -> Tensor | None:
        """What n equal scores of 0 sum to as weights, [B, heads, T, 1]; None for 1."""
        sink = self.sink()
        if sink is None:
            return None
        sink_H = torch.as_tensor(sink, dtype=count_BT.dtype, device=count_BT.device)
        count_BHT = count_BT[:, None].expand(-1, self.heads, -1)
        return (count_BHT / (count_BHT + sink_H.expand(self.heads)[:, None].exp()))[..., None]


DECLARATION = Declaration(
    axis="normalizer",
    name="softmax",
    summary="exp(s) / Σ exp(s)",
    source="arXiv 1706.03762",
    build=Softmax,
)
