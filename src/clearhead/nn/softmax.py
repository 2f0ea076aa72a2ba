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

    def mass(self, weight_BGT: Tensor) -> Tensor | None:
        """What a row's weights sum to, [B, heads, T, 1], from their sum before; None for 1.

        G divides the number of heads: neighbours weigh alike.
        """
        sink = self.sink()
        if sink is None:
            return None
        weight_BHT = weight_BGT.repeat_interleave(self.heads // weight_BGT.shape[1], 1)
        logit = sink.to(weight_BHT.dtype)[:, None] if isinstance(sink, Tensor) else sink
        # w / (w + exp(sink)), also where w is 0, or more than a float holds.
        return torch.sigmoid(weight_BHT.log() - logit)[..., None]


DECLARATION = Declaration(
    axis="normalizer",
    name="softmax",
    summary="exp(s) / Σ exp(s)",
    source="arXiv 1706.03762",
    build=Softmax,
)
