"""ALiBi: a penalty on distance, a slope for each head, as extra columns of queries and keys."""

from typing import Any

from torch import Tensor

from clearhead import ops
from clearhead.nn.positions import NoPosition, Part
from clearhead.spec import Declaration, LayerSpec

LONGEST = 256**2


class Alibi(NoPosition):
    """Scores get −slope · (i − j), from 8 more columns (`ops.alibi_columns`), never a T × T bias.

    The maps of one head share its slope: differential attention subtracts what both have. Keys are
    kept without the columns, which their positions give.
    """

    @staticmethod
    def late(layer: LayerSpec) -> bool:
        return True

    def parts(self, queries_BT: Tensor, keys_BS: Tensor) -> tuple[Part, ...]:
        layer = self.layer
        slopes = ops.alibi_slopes(self.heads)
        return (Part(*ops.alibi_columns(queries_BT, keys_BS, slopes, layer.head_dim**-0.5)),)

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        return ops.with_columns(x_BHTD, table)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.direction != "causal":
        return "|i − j| is not a sum of products of columns: choose direction='causal' or rope"
    if layer.max_position_embeddings > LONGEST:
        return f"positions above {LONGEST} have more than two digits of base 256: choose rope"
    return None


DECLARATION = Declaration(
    axis="position",
    name="alibi",
    summary="scores minus slope · distance, a slope for each head",
    source="arXiv 2108.12409",
    build=Alibi,
    refuses=_refuses,
    flops=lambda layer, length: 2.0 * ops.alibi.COLUMNS * layer.num_attention_heads * length / 2,
)
