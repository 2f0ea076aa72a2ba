"""How order enters: at the input (`embed`), or in the queries and keys (`table`, `prepare`)."""

from torch import Tensor, nn

from clearhead.ops import rotary_table, rotate
from clearhead.spec import Declaration, LayerSpec

Table = tuple[Tensor, Tensor] | None


class NoPosition(nn.Module):
    """No position at all: order is known only through the causal mask. The base of the others."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """Add what the input should know of its position."""
        return x_BTC

    def table(self, positions_BT: Tensor) -> Table:
        """What `prepare` needs, computed once for all layers."""
        return None

    @staticmethod
    def prepare(q_BHTD: Tensor, k_BGTD: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """Put position into queries and keys."""
        return q_BHTD, k_BGTD


class Rotary(NoPosition):
    """Rotary position embedding, a pure function of the positions: no buffers."""

    def table(self, positions_BT: Tensor) -> Table:
        return rotary_table(positions_BT, self.layer.head_dim, self.layer.rope_theta)

    @staticmethod
    def prepare(q_BHTD: Tensor, k_BGTD: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        assert table is not None
        return rotate(q_BHTD, table), rotate(k_BGTD, table)


class Learned(NoPosition):
    """A learned vector for each of `max_position_embeddings` positions, added to the embedding."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.weight = nn.Embedding(layer.max_position_embeddings, layer.hidden_size)

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTC + self.weight(positions_BT)


def _odd_head(layer: LayerSpec) -> str | None:
    if layer.head_dim % 2:
        return f"rotation turns pairs of channels, and head_dim={layer.head_dim} is odd"
    if layer.rope_theta <= 0:
        return f"rope_theta={layer.rope_theta} is not above 0"
    return None


def _rotation_flops(layer: LayerSpec, length: int) -> float:
    return 3.0 * layer.head_dim * (layer.num_attention_heads + layer.num_key_value_heads)


ROPE = Declaration(
    axis="position",
    name="rope",
    summary="rotary: queries and keys turned by an angle that grows with position",
    source="arXiv 2104.09864",
    build=Rotary,
    refuses=_odd_head,
    flops=_rotation_flops,
)
LEARNED = Declaration(
    axis="position",
    name="learned",
    summary="a learned vector a position, up to max_position_embeddings",
    source="GPT-2",
    build=Learned,
)
NONE = Declaration(
    axis="position",
    name="none",
    summary="no position: the causal mask alone tells order",
    source="arXiv 2305.19466",
    build=NoPosition,
)


def longest(layer: LayerSpec) -> int | None:
    """The number of positions a layer can tell apart; None where there is no limit."""
    return layer.max_position_embeddings if layer.position == "learned" else None
