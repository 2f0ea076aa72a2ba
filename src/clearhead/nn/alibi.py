"""ALiBi (arXiv 2108.12409): a penalty on distance, as more columns of queries and keys."""

from functools import partial

from torch import Tensor

from clearhead import ops
from clearhead.nn.bases import NoPosition, PositionTables, visible_keys
from clearhead.spec import Declaration, LayerSpec

LONGEST = 256**2  # positions have two digits of base 256


class Alibi(NoPosition):
    """Scores get −slope · (i − j), from 8 more columns (`ops.alibi_columns`), never a T × T bias.

    The maps of one head share its slope. Keys are cached without the columns, which follow from
    their positions.
    """

    def longest(self) -> int:
        return LONGEST

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        scale = self.layer.head_dim**-0.5
        slopes_H = ops.alibi_slopes(self.heads, queries_BT.device)
        return PositionTables(*ops.alibi_columns(queries_BT, keys_BS, slopes_H, scale))

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        return True

    prepare = staticmethod(ops.with_columns)


def bias_refuses(layer: LayerSpec) -> str | None:
    """Reason why scores cannot fall with distance, by ALiBi or by forget gates, or None."""
    if layer.direction != "causal":
        return "it would raise the scores of later keys: choose direction='causal', or rope"
    if layer.shaping == "shaped":
        return "no paper states C under such a bias: choose position='rope', or shaping='none'"
    return None


def _refuses(layer: LayerSpec) -> str | None:
    if layer.max_position_embeddings > LONGEST:
        return f"positions above {LONGEST} have more than two digits of base 256: choose rope"
    return bias_refuses(layer)


def column_flops(columns: int, layer: LayerSpec, length: int) -> float:
    return 2.0 * columns * layer.num_attention_heads * visible_keys(layer, length)


DECLARATIONS = (
    Declaration(
        "position",
        "alibi",
        "scores minus slope · distance, a slope for each head; causal",
        "arXiv 2108.12409",
        Alibi,
        refuses=_refuses,
        flops=partial(column_flops, ops.alibi.COLUMNS),
    ),
)
