"""Softmax, whose weights sum to 1 in every row."""

import torch
from torch import Tensor, nn

from clearhead.spec import Declaration, LayerSpec


class Softmax(nn.Module):
    """No sink beside the keys. The base of all normalizers."""

    places = 0

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        super().__init__()
        self.heads, self.together = heads, together

    def sink(self, q_BHTD: Tensor) -> float | Tensor | None:
        return self.resting()

    def prefix(self) -> tuple[Tensor, Tensor] | None:
        return None

    def resting(self) -> float | Tensor | None:
        return None

    def row_sum(self, weight_BGT: Tensor) -> Tensor | None:
        sink = self.resting()
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
