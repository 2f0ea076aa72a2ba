"""Protocols of the mechanisms: the interface that the values of an axis share.

A mechanism of another package implements one of these, and declares itself (`clearhead.spec`).
C is the width of the residual stream, H the queries of a token, one a map; the heads that come out
may be fewer. Table: what a position prepares queries or keys with, opaque to all others.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from clearhead.ops.visibility import Visibility
from clearhead.spec import LayerSpec


class PositionTables(NamedTuple):
    """Tables that prepare a layer's queries and keys.

    Attributes:
        queries, keys: tables for the queries, and for the keys, whose last dimension but one is
            theirs.
        at_init: what `Position.attention_at_init` takes beside the values; None where scores have
            no position in them but what is put into queries and keys, which are 0 at W_Q = 0.
        prefix: makes the table for the keys of a prefix (`Normalizer.prefix`), if there is one.
    """

    queries: Any = None
    keys: Any = None
    at_init: Any = None
    prefix: Callable[[], Any] | None = None


class CentringTerm(NamedTuple):
    """C x, attention's output at W_Q = 0, for a shaping that asks for it.

    Attributes:
        make: makes it, [B, T, heads, width].
        running: whether it is the running mean of these tokens' own values and nothing else, as in
            `ops.shaped_causal`.
    """

    make: Callable[[], Tensor]
    running: bool


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


class Decay(Protocol):
    """A layer's decay of scores, computed from its tokens. Built for a layer and its heads."""

    def with_gates(self, k_BGTD: Tensor, x_BTC: Tensor) -> Tensor:
        """Keys as they are cached, with what their tokens add, from attention's input."""

    def columns(
        self, k_BGSN: Tensor, queries: int, visibility: Visibility
    ) -> tuple[Tensor, PositionTables]:
        """Projected keys, from cached ones; the tables of all keys and of the last `queries`."""


class Position(Protocol):
    """The way in which order enters. Built for a layer and its number of heads."""

    layer: LayerSpec
    wide_factors: bool  # True where prepared queries and keys leave the range of float16

    def longest(self) -> int | None:
        """The number of positions that it can tell apart; None where there is no limit."""

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """Add what the input should know of its position."""

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        """Tables for positions of the queries, and of the keys that are prepared."""

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        """True where keys are cached as projected, and prepared whenever they are read."""

    @staticmethod
    def decay(layer: LayerSpec, heads: int) -> Decay | None:
        """The layer's own module that makes the tables; None where positions alone do."""

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        """Put position into queries, or into keys."""

    @staticmethod
    def attention_at_init(
        x_BHSD: Tensor, queries: int, table: Any, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """C·x, attention's output at W_Q = 0 without a sink, and the unnormalised row sums.

        Args:
            x_BHSD: values, by head or of all heads side by side. queries: the last of the keys.

        Returns:
            ([B, any, T, any], heads in order; [B or 1, 1 or heads, T]), float32 at least.
        """

    @staticmethod
    def position_only(x_BHTN: Tensor) -> Tensor:
        """Prepared queries or keys with nothing but position in them: their scores are C's."""


class Scores(Protocol):
    """The comparison of queries with keys. Built for the position's `prepare`.

    Attributes:
        cache_unrotated: whether keys are cached as projected and prepared when read.
        attend_unrotated: attention of a lone query over such keys, called as `Attend` with the
            keys' `rotation` and the `attend` to use where no kernel reads them so; None: keys are
            prepared first.
    """

    cache_unrotated: bool
    attend_unrotated: Callable[..., Tensor] | None

    def queries(self, q_BHTD: Tensor, table: Any) -> Tensor:
        """Queries as the dot product takes them, from projected ones."""

    def keys(self, k_BGSD: Tensor, table: Any) -> Tensor:
        """Keys as the dot product takes them, from projected ones."""


class Normalizer(Protocol):
    """The way from scores to weights. Built for a layer, H, and `Maps.keys_together`.

    Attributes:
        places: how many keys `prefix` has, which take the first positions; the text follows.
    """

    places: int

    def sink(self, q_BHTD: Tensor) -> float | Tensor | None:
        """The logit that competes with the keys in `ops.attend`, for queries as projected."""

    def prefix(self) -> tuple[Tensor, Tensor] | None:
        """Keys [G, N, D] and values [G, N, V] before the text's, as projected; None for none."""

    def resting(self) -> float | Tensor | None:
        """The sink at W_Q = 0."""

    def row_sum(self, weight_BGT: Tensor) -> Tensor | None:
        """Row sums at W_Q = 0, [B, H, T, 1], from unnormalised ones; None for 1.

        G divides H: neighbours weigh alike.
        """


class Maps(Protocol):
    """The combination of attention maps into heads. Built for a layer.

    Attributes:
        maps: their names, in the order in which `split` gives them.
        keys_together: how many neighbouring keys are one head's.
    """

    maps: ClassVar[tuple[str, ...]]
    keys_together: ClassVar[int]

    def lambdas(self, x_BTC: Tensor) -> Tensor | None:
        """The weights of the maps against each other, from attention's input."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lambdas: Any, *, attend: Attend, **options: Any
    ) -> Tensor:
        """The heads' outputs, [B, heads, T, width], by one `attend(q, k, v, **options)` or more."""

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        """Map by map, from what `attend` has for all the queries it gets, [B, H, ...]."""

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Any) -> Tensor:
        """The matrix that multiplies the values, from the maps in the order `attend` gets them."""

    def finish(self, o_BHTD: Tensor) -> Tensor:
        """The heads' outputs, from that matrix times the values."""

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Any) -> Tensor | None:
        """Row sums of that matrix, [B, heads, T, 1], from the maps', in the queries' order.

        None is 1.
        """


class Shaping(Protocol):
    """The meeting of the attention matrix with the identity. Built for a layer and its heads.

    Attributes:
        zero_queries: whether W_Q is to start at 0, so that all scores do.
    """

    zero_queries: ClassVar[bool]

    def __call__(self, x_BTC: Tensor, o_BTC: Tensor, centring: CentringTerm) -> Tensor:
        """The heads' outputs, from these tokens' values x and attention's output o over all."""

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values, from A, the identity's rows, and C as a matrix."""


class Epilogue(Protocol):
    """The step between the heads' outputs and their projection. Built for a layer and its heads."""

    def __call__(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """The input of `o_proj`.

        Args:
            o_BTC: the heads' outputs, one after the other.
            x_BTC: attention's input.
            own: makes each token's own value as its heads have it, as wide as o.
        """
