"""How order enters at the input: learned, sinusoidal, or not at all. The base of all positions.

A position has up to three parts: `embed` adds to the input; `parts` makes, once for all layers,
what queries and keys need at these positions; `prepare` puts it into them, in every layer. Where it
adds to the scores, it also says what they are with nothing else in them: `centre` and `alone`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.offloading import with_own_parameters
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec


class Part(NamedTuple):
    """Some queries, and how they and the keys they read are prepared.

    Attributes:
        queries, keys: what `prepare` takes beside the queries, and beside the keys.
        centre: what `centre` takes beside the values; None where scores have no position in them
            but what `prepare` puts into queries and keys, which are 0 at W_Q = 0.
        start, stop: these of the queries; None, to the end.
        rows: bool [B, stop − start], which of them; None for all.
    """

    queries: Any = None
    keys: Any = None
    centre: Any = None
    start: int = 0
    stop: int | None = None
    rows: Tensor | None = None


class NoPosition(nn.Module):
    """No position at all: order is known through the causal mask alone. The base of the others.

    Without that mask a text is a bag of tokens: permuted tokens have permuted outputs.

    Positions are built for a layer and its number of heads (a head may have several maps).
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads

    @staticmethod
    def late(layer: LayerSpec) -> bool:
        """Whether keys are kept in a cache as they are, and prepared when they are read."""
        return False

    def longest(self) -> int | None:
        """The number of positions that it can tell apart; None where there is no limit."""
        return None

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        """Add what the input should know of its position."""
        return x_BTC

    def parts(self, queries_BT: Tensor, keys_BS: Tensor) -> tuple[Part, ...]:
        """Every query once; for positions of the queries, and of the keys that are prepared."""
        return (Part(),)

    @staticmethod
    def prepare(x_BHTD: Tensor, table: Any) -> Tensor:
        """Put position into queries, or into keys."""
        return x_BHTD

    @staticmethod
    def centre(
        x_BHSD: Tensor, queries: int, table: Any, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """C x where no sink is, and what weighs there: attention at W_Q = 0, its weights unnormed.

        Args:
            x_BHSD: values, by head or of all heads side by side. queries: the last of the keys.

        Returns:
            ([B, any, T, any], heads in order; [B or 1, 1 or heads, T]), float32 at least.
        """
        mean, count_BT = ops.running_mean(x_BHSD, queries, visibility)
        return mean, count_BT[:, None]

    @staticmethod
    def alone(x_BHTN: Tensor) -> Tensor:
        """Prepared queries or keys with nothing but position in them: their scores are C's."""
        return torch.zeros_like(x_BHTN)


class Learned(NoPosition):
    """A learned vector for each of `max_position_embeddings` positions, added to the embedding."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.weight = nn.Embedding(layer.max_position_embeddings, layer.hidden_size)

    def longest(self) -> int:
        return self.layer.max_position_embeddings

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTC + self.weight(positions_BT)


class Sinusoidal(NoPosition):
    """sin and cos of position · 10000^(−2j/C), added to the embedding, in neighbouring channels.

    Times `initializer_range`, the embeddings' own spread: in the paper embeddings are multiplied by
    √C, to about 1, and waves of amplitude 1 added; on embeddings of 0.02 those would drown them.
    """

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.layer.initializer_range).to(x_BTC.dtype)


class ScaledSinusoidal(NoPosition):
    """The waves of `Sinusoidal` times one learned number, which starts at 1/√C."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.layer.hidden_size**-0.5)

    @with_own_parameters
    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.scale).to(x_BTC.dtype)


def _waves(positions_BT: Tensor, width: int) -> Tensor:
    """sin and cos of position · 10000^(−2j/width) in neighbouring channels, float32 [B, T, C]."""
    even = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32)
    angle = positions_BT[..., None].float() * torch.exp(even * (-math.log(10_000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


LEARNED = Declaration(
    axis="position",
    name="learned",
    summary="a learned vector a position, up to max_position_embeddings",
    source="GPT-2",
    build=Learned,
)
SINUSOIDAL = Declaration(
    axis="position",
    name="sinusoidal",
    summary="fixed waves added to the embedding",
    source="arXiv 1706.03762, section 3.5",
    build=Sinusoidal,
)
SCALED_SINUSOIDAL = Declaration(
    axis="position",
    name="scaled-sinusoidal",
    summary="fixed waves times a learned number, added to the embedding",
    source="arXiv 2212.14034 (crammed BERT); arXiv 2202.10447",
    build=ScaledSinusoidal,
)
NONE = Declaration(
    axis="position",
    name="none",
    summary="no position: the causal mask alone tells order; without it, a bag of tokens",
    source="arXiv 2305.19466",
    build=NoPosition,
)
