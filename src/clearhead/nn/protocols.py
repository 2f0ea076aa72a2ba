"""Protocols of the mechanisms: the interface that the values of an axis share.

A mechanism of another package implements one of these, and has a declaration (`clearhead.spec`). C
is the width of the residual stream, H the queries of a token, one a map; output heads may be fewer.
A table is opaque to all but the position that made it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from clearhead.ops.visibility import Visibility
from clearhead.spec import LayerSpec


class PositionTables(NamedTuple):
    """Tables that prepare a layer's queries and keys.

    Attributes:
        queries, keys: tables for queries and keys; the last dimension but one counts tokens.
        prefix: table for the keys of a prefix (`Normalizer.prefix`), if there is one.
    """

    queries: Any = None
    keys: Any = None
    prefix: Any = None


class Attend(Protocol):
    """Attention: `ops.attention.attend_visible`, or an `Interface` of a layer."""

    def __call__(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        /,
        *,
        visibility: Visibility,
        sink: float | Tensor | None,
        prefix: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> Tensor:
        """[B, H, T, V]."""


Interface = Callable[..., Tensor]
"""Attention of a layer by another function: an oracle, a probe, or one of the user's.

Called as `Attend`, with the layer's `Attention` before q, and `lambdas`, by which its `maps`
combine the maps, None for one map a head.
"""


AsSoftmax = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The scores and the sink by which softmax has a normalizer's weights.

Called with scores [B, H, R, S] and the visible ones, it returns scores and [B, H, R, 1].
"""


class Decay(Protocol):
    """Decay of scores, computed from a layer's tokens. Built for a layer and its heads."""

    def with_gates(self, k_BGTD: Tensor, x_BTC: Tensor) -> Tensor:
        """Keys to cache: with their tokens' gates, from attention's input."""

    def columns(
        self, k_BGSN: Tensor, queries: int, visibility: Visibility
    ) -> tuple[Tensor, PositionTables]:
        """Projected keys, from cached ones, and tables of all keys and of the last `queries`."""


class Position(Protocol):
    """Position encoding. Built for a layer and its number of heads."""

    layer: LayerSpec
    wide_factors: bool  # True where prepared queries and keys leave the range of float16

    def longest(self) -> int | None:
        """Largest number of positions; None for no limit."""

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """Add position to the input embeddings."""

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        """Tables for the positions of the queries, and of the keys to prepare."""

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        """True if keys are cached as projected, and prepared at each read."""

    @staticmethod
    def decay(layer: LayerSpec, heads: int) -> Decay | None:
        """The layer's module that makes the tables from its tokens; None: positions make them."""

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        """Apply position to queries or keys."""


class Scores(Protocol):
    """Scores of queries and keys. Built for a layer and the position's `prepare`.

    Attributes:
        cache_unrotated: whether keys are cached as projected and prepared when read.
        attend_unrotated: attention of a lone query over such keys, called as `Attend` with the
            keys' `rotation` and a fallback `attend`; None: keys are prepared first.
    """

    cache_unrotated: bool
    attend_unrotated: Callable[..., Tensor] | None

    def queries(self, q_BHTD: Tensor, table: Any) -> Tensor:
        """Queries as the dot product takes them, from projected ones."""

    def keys(self, k_BGSD: Tensor, table: Any) -> Tensor:
        """Keys as the dot product takes them, from projected ones."""


class Normalizer(Protocol):
    """Normalisation of scores to weights. Built for a layer, H, and `Maps.keys_together`.

    Attributes:
        places: number of the prefix's keys, which take the positions before the text.
        attend: attention by these weights, such as `ops.attention.attend_visible`.
        weights: their float64 oracle, called as `ops.oracles.weights`.
        as_softmax: scores and sink with the same weights under softmax; None: those as they are.
    """

    places: int
    attend: Attend
    weights: Callable[..., Tensor]
    as_softmax: AsSoftmax | None

    def sink(self, q_BHTD: Tensor) -> float | Tensor | None:
        """The logit that competes with the keys in `ops.attend`, for queries as projected."""

    def prefix(self) -> tuple[Tensor, Tensor] | None:
        """Keys [G, N, D] and values [G, N, V] before the text's, as projected; None for none."""

    def resting(self) -> float | Tensor | None:
        """The sink at W_Q = 0."""

    def row_sum(self, count_BT: Tensor) -> Tensor | None:
        """Row sums at W_Q = 0, [B, H, T, 1], of queries that see `count` keys; None for 1."""


class Maps(Protocol):
    """The combination of attention maps into heads. Built for a layer.

    Attributes:
        maps: names of the maps, in `split`'s order.
        keys_together: number of neighbouring keys of one head.
    """

    maps: ClassVar[tuple[str, ...]]
    keys_together: ClassVar[int]

    def lambdas(self, x_BTC: Tensor) -> Tensor | None:
        """Weights of the maps, such as λ, from attention's input."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lambdas: Any, *, attend: Attend, **options: Any
    ) -> Tensor:
        """The heads' outputs, [B, heads, T, width], from calls of `attend(q, k, v, **options)`."""

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        """Split [B, H, ...], a value for each query given to `attend`, by map."""

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Any) -> Tensor:
        """The matrix that multiplies the values, from the maps in `attend`'s order."""

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Any) -> Tensor | None:
        """Row sums of that matrix, [B, heads, T, 1], from the maps' in the queries' order.

        None stands for 1.
        """


class Shaping(Protocol):
    """Mix of the attention matrix and the identity. Built for a layer and its heads.

    Attributes:
        zero_queries: True if W_Q, and so every score, starts at 0.
    """

    zero_queries: ClassVar[bool]

    def __call__(
        self, x_BTC: Tensor, o_BTC: Tensor, centring: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The heads' outputs, from these tokens' values x and attention's output o over all.

        `centring` computes C x, attention's output at W_Q = 0, from x by head, [B, T, H, D].
        """

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values, from A, rows of the identity, and C."""


class Epilogue(Protocol):
    """Function of the heads' outputs before `o_proj`. Built for a layer and its heads."""

    def __call__(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """The input of `o_proj`.

        Args:
            o_BTC: the heads' outputs, one after the other.
            x_BTC: attention's input.
            own: computes each token's own values by head, as wide as o.
        """
