"""Interfaces of the mechanisms, axis by axis, each with plain attention's value as its base class.

A mechanism of another package implements one of these, and has a declaration (`clearhead.spec`). H
is the number of a token's queries, one a map; output heads may be fewer.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.ops import oracles
from clearhead.ops.attention import attend
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec

Weights = dict[str, Tensor]


class Attend(Protocol):
    """`attend(q, k, v, visibility=…, sink=…, prefix=…, scale=…)`, such as `ops.attend`."""

    def __call__(self, *tensors: Any, **options: Any) -> Tensor: ...


Interface = Callable[..., Tensor]
"""Attention of a layer by an oracle, a probe, or the user, called as `Attend` is, with the layer's
`Attention` before q, and `lambdas`, by which its `maps` combine the maps, or None."""

AsSoftmax = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From scores [B, H, R, S] and the visible ones, softmax's scores and its sink [B, H, R, 1]."""


class PositionTables(NamedTuple):
    """Tables that prepare queries, keys and a prefix's keys; the last dimension but one: tokens."""

    queries: Any = None
    keys: Any = None
    prefix: Any = None


class NoPosition(nn.Module):
    """No position: the causal mask alone tells order. Base of all positions."""

    wide_factors = False  # True where prepared queries and keys leave the range of float16

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads

    def longest(self) -> int | None:
        """Largest number of positions; None for no limit."""
        return None

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """Add position to the input embeddings."""
        return x_BTC

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        """Tables for the positions of the queries, and of the keys to prepare."""
        return PositionTables()

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        """True if keys are cached as projected, and prepared at each read."""
        return False

    @staticmethod
    def decay(layer: LayerSpec, heads: int) -> Any:
        """The module that computes a layer's tables from its tokens (`forget.ForgetGates`)."""
        return None

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any, /) -> Tensor:
        """Apply position to queries or keys."""
        return x_BHTD


class Scores:
    """The dot product of queries and keys as the position prepares them; other scores' interface.

    `queries` and `keys` turn projections [B, H, T, D] and their table into the product's factors.
    """

    cache_unrotated = False  # True: keys are cached as projected and prepared when read
    # Attention of a lone query over such keys, with their `rotation` and another `attend`.
    attend_unrotated: Callable[..., Tensor] | None = None
    queries: Callable[[Tensor, Any], Tensor]
    keys: Callable[[Tensor, Any], Tensor]

    def __init__(self, layer: LayerSpec, prepare: Callable[[Tensor, Any], Tensor]) -> None:
        self.queries = self.keys = prepare


class Softmax:
    """Softmax without a sink: a row's weights sum to 1. Base of all normalizers."""

    prefix_length = 0  # keys of the prefix, which take the positions before the text
    attend: Attend = staticmethod(attend)
    weights: Callable[..., Tensor] = staticmethod(oracles.weights)  # its oracle, in float64
    as_softmax: AsSoftmax | None = None  # None: scores and sink are softmax's

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        self.heads, self.together = heads, together

    def sink(self, q_BHTD: Tensor) -> float | Tensor | None:
        """The logit that competes with the keys in `ops.attend`, for queries as projected."""
        return self.resting()

    def prefix(self) -> tuple[Tensor, Tensor] | None:
        """Keys [G, N, D] and values [G, N, V] before the text's, as projected; None for none."""
        return None

    def resting(self) -> float | Tensor | None:
        """The sink's logit at W_Q = 0; None without a sink."""
        return None

    def row_sum(self, count_BT: Tensor) -> Tensor | None:
        """Row sums at W_Q = 0, [B, H, T, 1], of queries that see `count` keys; None for 1."""
        sink = self.resting()
        if sink is None:
            return None
        count_BHT = count_BT[:, None].expand(-1, self.heads, -1)
        logit = sink.to(count_BT.dtype)[:, None] if isinstance(sink, Tensor) else sink
        # n / (n + exp(sink)), also where n is 0.
        return torch.sigmoid(count_BHT.log() - logit)[..., None]


class SingleMaps:
    """One map a head; nothing is combined. Base of all maps.

    Others are called as `maps(q, k, v, lambdas, attend=…, **options)`, and return the heads'
    outputs [B, heads, T, width] from calls of `attend(q, k, v, **options)`.
    """

    maps: ClassVar[tuple[str, ...]] = ("softmax",)  # their names, in `split`'s order
    keys_together: ClassVar[int] = 1  # neighbouring keys of one head

    def __init__(self, layer: LayerSpec) -> None:
        pass

    def lambdas(self, x_BTC: Tensor) -> Tensor | None:
        """Weights of the maps, such as λ, from attention's input."""
        return None

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        """Split [B, H, ...], a value for each query given to `attend`, by map."""
        return (heads_BH,)

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Any) -> Tensor:
        """The matrix that multiplies the values, from the maps in `attend`'s order."""
        return weights_BHTS

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Any) -> Tensor | None:
        """Row sums of that matrix, [B, heads, T, 1], from the queries'; None stands for 1."""
        return row_sum_BHT1


Epilogue = Callable[[Tensor, Tensor, Callable[[], Tensor]], Tensor]
"""From the heads' outputs [B, T, H · D], attention's input [B, T, C] and a function that computes
each token's own values, as wide as the outputs, the input of `o_proj`."""


def visible_keys(layer: LayerSpec, length: int) -> float:
    """Keys that a token sees on average."""
    return Visibility(layer.direction == "causal", layer.sliding_window).mean_count(length)


def attention_flops(layer: LayerSpec, length: int) -> float:
    """q kᵀ and p v for each token, over its visible keys."""
    return 4.0 * layer.num_attention_heads * layer.head_dim * visible_keys(layer, length)


def numbers_per_group(layer: LayerSpec) -> int:
    """Numbers that a token's keys take in a cache."""
    return layer.num_key_value_heads * layer.head_dim


def with_doubled_output(weights: Weights, layer: LayerSpec) -> Weights:
    """The weights with 2 W_O, for a mechanism that starts by halving the heads."""
    if "o_proj.weight" not in weights or layer.projections != "linear":
        raise ClearheadError(
            f"projections={layer.projections!r} has no W_O to double, as maps={layer.maps!r} or "
            f"epilogue={layer.epilogue!r} need: convert a model with projections='linear'"
        )
    return {**weights, "o_proj.weight": 2 * weights["o_proj.weight"]}


def with_own_parameters(method: Callable[..., Any]) -> Any:
    """Load a module's parameters, offloaded by accelerate, in a method other than `forward`."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return method(self, *arguments, **options)
        hook.pre_forward(self)
        return hook.post_forward(self, method(self, *arguments, **options))

    return run


def nothing(*of: Any) -> None:
    """The `build` of axis values that need no module: returns None."""


PAPER = "arXiv 1706.03762"
_direction = partial(Declaration, "direction")
DECLARATIONS = (
    Declaration("scores", "dot", "q · k / √d", PAPER, Scores, cache=numbers_per_group),
    Declaration("normalizer", "softmax", "exp(s) / Σ exp(s)", PAPER, nothing),
    Declaration("maps", "single", "one map a head", PAPER, SingleMaps, flops=attention_flops),
    Declaration("shaping", "none", "A", PAPER, nothing),
    Declaration("epilogue", "none", "the heads as they are", PAPER, nothing),
    # Whether attention is causal.
    _direction("causal", "a token sees itself and what came before", PAPER, lambda: True),
    _direction(
        "bidirectional",
        "a token sees the whole text; no generation, no cache",
        "arXiv 1810.04805",
        lambda: False,
    ),
)
