"""Plain attention: one map a head."""

from typing import Any

from torch import Tensor, nn

from clearhead.nn.costs import attention_flops
from clearhead.spec import Declaration, LayerSpec


class StandardMaps(nn.Module):
    """One map a head; nothing to combine."""

    maps = ("softmax",)
    keys_together = 1

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()

    def lambdas(self, x_BTC: Tensor) -> Tensor | None:
        return None

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        lambdas: None,
        *,
        attend: Any,
        **options: Any,
    ) -> Tensor:
        return attend(q_BHTD, k_BGSD, v_BGSD, **options)

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        return (heads_BH,)

    def effective_weights(self, weights_BHTS: Tensor, lambdas: None) -> Tensor:
        return weights_BHTS

    def finish(self, o_BHTD: Tensor) -> Tensor:
        return o_BHTD

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: None) -> Tensor | None:
        return row_sum_BHT1


DECLARATION = Declaration(
    axis="maps",
    name="single",
    summary="one map a head",
    source="arXiv 1706.03762",
    build=StandardMaps,
    flops=attention_flops,
)
