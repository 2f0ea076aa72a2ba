"""Plain attention, axis by axis: base classes of the other mechanisms.

Also what mechanisms share: costs, weights carried over to another mechanism (`Declaration.adopt`),
and parameters that are read outside `forward`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.nn.protocols import AsSoftmax, Attend, Decay, PositionTables
from clearhead.ops import oracles
from clearhead.ops.attention import attend_visible
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec

Weights = dict[str, Tensor]
Method = TypeVar("Method", bound=Callable[..., Any])


def visible_keys(layer: LayerSpec, length: int) -> float:
    """Keys that a token sees on average."""
    return Visibility(layer.direction == "causal", layer.sliding_window).mean_count(length)


def attention_flops(layer: LayerSpec, length: int) -> float:
    """q kᵀ and p v for each token, over its visible keys."""
    return 4.0 * layer.num_attention_heads * layer.head_dim * visible_keys(layer, length)


def numbers_per_group(layer: LayerSpec) -> int:
    """Numbers in a token's keys: one vector of the head's width for each key head."""
    return layer.num_key_value_heads * layer.head_dim


def with_doubled_output(weights: Weights, layer: LayerSpec) -> Weights:
    """The weights with 2 W_O, for a mechanism that starts by halving the heads.

    Raises:
        ClearheadError: a layer without W_O.
    """
    if "o_proj.weight" not in weights or layer.projections != "linear":
        raise ClearheadError(
            f"maps={layer.maps!r}, epilogue={layer.epilogue!r} halve the heads at their start, and "
            f"projections={layer.projections!r} has no W_O to double: convert a model with "
            "projections='linear'"
        )
    return {**weights, "o_proj.weight": 2 * weights["o_proj.weight"]}


def with_own_parameters(method: Method) -> Method:
    """Wrap a method so that its module's offloaded parameters are loaded while it runs.

    With a `device_map` that offloads, accelerate's hook loads them for `forward` alone.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return method(self, *arguments, **options)
        hook.pre_forward(self)
        return hook.post_forward(self, method(self, *arguments, **options))

    return run  # type: ignore[return-value]


class NoPosition(nn.Module):
    """No position; base of all positions. Order is known through the causal mask alone.

    Without that mask a text is a bag of tokens: permuted tokens have permuted outputs.
    """

    wide_factors = False

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        return False

    def longest(self) -> int | None:
        return None

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTC

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        return PositionTables()

    @staticmethod
    def decay(layer: LayerSpec, heads: int) -> Decay | None:
        return None

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        return x_BHTD


class Softmax:
    """Softmax without a sink: a row's weights sum to 1. Base of the other normalizers."""

    places = 0
    attend: Attend = staticmethod(attend_visible)
    weights: Callable[..., Tensor] = staticmethod(oracles.weights)
    as_softmax: AsSoftmax | None = None

    def __init__(self, layer: LayerSpec, heads: int, together: int) -> None:
        self.heads, self.together = heads, together

    def sink(self, q_BHTD: Tensor) -> float | Tensor | None:
        return self.resting()

    def prefix(self) -> tuple[Tensor, Tensor] | None:
        return None

    def resting(self) -> float | Tensor | None:
        return None

    def row_sum(self, count_BT: Tensor) -> Tensor | None:
        sink = self.resting()
        if sink is None:
            return None
        count_BHT = count_BT[:, None].expand(-1, self.heads, -1)
        logit = sink.to(count_BT.dtype)[:, None] if isinstance(sink, Tensor) else sink
        # n / (n + exp(sink)), also where n is 0.
        return torch.sigmoid(count_BHT.log() - logit)[..., None]


class SingleMaps:
    """One map a head; nothing is combined, so it is not called. Base of all maps."""

    maps: ClassVar[tuple[str, ...]] = ("softmax",)
    keys_together: ClassVar[int] = 1

    def __init__(self, layer: LayerSpec) -> None:
        pass

    def lambdas(self, x_BTC: Tensor) -> Tensor | None:
        return None

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        return (heads_BH,)

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Any) -> Tensor:
        return weights_BHTS

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Any) -> Tensor | None:
        return row_sum_BHT1


_PAPER = "arXiv 1706.03762"
DECLARATIONS = (
    Declaration("normalizer", "softmax", "exp(s) / Σ exp(s)", _PAPER, lambda *of: None),
    Declaration("maps", "single", "one map a head", _PAPER, SingleMaps, flops=attention_flops),
    Declaration("shaping", "none", "A", _PAPER, lambda *of: None),
    Declaration("epilogue", "none", "the heads as they are", _PAPER, lambda *of: None),
    # Whether attention is causal.
    Declaration(
        "direction", "causal", "a token sees itself and what came before", _PAPER, lambda: True
    ),
    Declaration(
        "direction",
        "bidirectional",
        "a token sees the whole text; no generation, no cache",
        "arXiv 1810.04805",
        lambda: False,
    ),
)
