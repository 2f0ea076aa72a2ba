"""Attention maps of a layer by tiles, computed once for all statistics; h is a map's heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.nn.attention import Attention
from clearhead.ops.attention import at_zero_queries
from clearhead.probe.attention_call import AttentionCall, Scores, normalised
from clearhead.probe.observation import Statistic, measures_of

TILE = 1 << 20  # scores held at once: 4 MiB, so that a tile fits into a processor's cache
DIFFLLAMA = (
    "the maps of a DiffLlama are not combined here: give the folder that `clearhead convert` makes "
    "of it"
)
_HIDDEN = -1e30  # finite, so that weight × score of a hidden key is 0 and not NaN


class MapTile(NamedTuple):
    """One attention map of a tile: "softmax"; "map 1", "map 2" and the signed "difference" of
    differential attention; "shaped", the matrix of a shaped block that multiplies the values."""

    name: str
    weights: Tensor  # [B, h, R, S], 0 where hidden and in rows that do not count
    counted: Tensor  # bool [B, h, R]: the row sees a key, and all of its logits are finite
    # [B, h, R], 1 / n where key 0 is one of the row's n largest, signed weights by value; else 0.
    first_is_largest: Tensor
    entropy: Tensor | None = None  # [B, h, R], nats, a null key included; None for signed maps
    null: Tensor | None = None  # [B, h, R], the weight of the sink, if any


class AttentionTile(NamedTuple):
    """Rows `start` to `start + R` of all the maps of a layer.

    Attributes:
        visible: bool [B or 1, H or 1, R, S], True where the query may see the key.
        maps: the softmax maps first, the matrix that multiplies the values last.
        lambdas: λ of the difference, if any.
        non_finite: rows left out because of a logit that is not finite.
    """

    start: int
    visible: Tensor
    maps: list[MapTile]
    lambdas: Tensor | None
    non_finite: int


class ByTile:
    """A group of statistics of scores and weights, updated in one pass over each layer's tiles.

    Args:
        scores: statistics whose `observe` takes the AttentionCall, and a tile of its logits.
        weights: statistics whose `observe` takes the AttentionCall, and an AttentionTile.
    """

    def __init__(
        self, *, scores: Sequence[Statistic] = (), weights: Sequence[Statistic] = ()
    ) -> None:
        self._of_scores, self._of_weights = scores, weights

    def observe(self, call: AttentionCall) -> None:
        if type(call.module).__name__ == "DiffLlamaAttention":
            raise ClearheadError(DIFFLLAMA)
        for scores in call.scores(TILE):
            for of_scores in self._of_scores:
                of_scores.observe(call, scores)
            tile = _softmax(call, scores)
            for of_weights in self._of_weights:
                of_weights.observe(call, tile)

    def measures(self) -> list[dict[str, Any]]:
        return measures_of([*self._of_weights, *self._of_scores])


def _softmax(call: AttentionCall, scores: Scores) -> AttentionTile:
    """Weights in the memory of the scores, with what several statistics need of each row."""
    start, score, visible, clear = scores
    if clear < score.shape[-1]:
        score[..., clear:].masked_fill_(~visible[..., clear:], _HIDDEN)
    score, sink = call.competing(score, visible, start)
    share, top = _first_is_largest(score)
    if sink is not None:
        sink = torch.as_tensor(sink, dtype=top.dtype, device=top.device)
        sink = sink.squeeze(-1) if sink.ndim else sink
        top = torch.maximum(top, sink)
    score.sub_(top[..., None])
    weights = torch.exp(score)
    total = weights.sum(-1)
    # −Σ p log p = log total − Σ p (s − top), the sink being one of them
    products = score.mul_(weights).sum(-1)
    null = None
    if sink is not None:
        null = torch.exp(sink - top)
        total = total + null
        products = products + torch.where(null > 0, null * (sink - top), 0)
        null = null / total
    entropy = total.log() - products / total
    weights.mul_((1 / total)[..., None])
    seen, finite = visible.any(-1), total.isfinite() & entropy.isfinite()
    counted = finite & seen
    if not bool(counted.all()):
        weights.masked_fill_(~counted[..., None], 0.0)
    parts: list[Any] = [(weights, counted, share, entropy, null)]
    names: tuple[str, ...] = ("softmax",)
    if isinstance(call.module, Attention):
        maps = call.module.maps
        names, none = maps.maps, [None] * len(maps.maps)
        parts = list(zip(*(none if x is None else maps.split(x) for x in parts[0]), strict=True))
    tiles = [MapTile(name, *part) for name, part in zip(names, parts, strict=True)]
    if isinstance(call.module, Attention):
        tiles = [*tiles, *_combined(call, start, weights, visible, tiles)]
    return AttentionTile(start, visible, tiles, call.lambdas, int((~finite & seen).sum()))


def _combined(
    call: AttentionCall, start: int, weights_BHRS: Tensor, visible: Tensor, softmax: list[MapTile]
) -> Iterator[MapTile]:
    """The signed matrices that a layer makes of its softmax maps: their difference, and the
    α I + β A − γ C of a shaped block."""
    module: Any = call.module
    lambdas, signed = call.lambdas, dict[str, Tensor]()
    counted_BhR = torch.stack([tile.counted for tile in softmax]).all(0)
    if lambdas is not None and lambdas.ndim > 2:  # one for each token
        lambdas = lambdas[:, :, start : start + weights_BHRS.shape[2]]
    if lambdas is not None:
        signed["difference"] = module.maps.effective_weights(weights_BHRS, lambdas)
    if module.layer.shaping != "none":

        def resting() -> Tensor:  # the softmax maps at W_Q = 0
            null = replace(call, sink=at_zero_queries(call.sink)).null_logit()
            equal_BHRS = torch.where(visible, 0.0, -torch.inf).expand_as(weights_BHRS)
            return normalised(equal_BHRS, null)[0]

        first = call.k.shape[2] - call.q.shape[2] + start
        signed["shaped"] = module.effective_weights(weights_BHRS, lambdas, resting, first)
    for name, matrix in signed.items():
        matrix = matrix.masked_fill(~counted_BhR[..., None], 0.0)
        # Signed weights may all be below the 0 of a hidden key.
        share, _ = _first_is_largest(matrix.masked_fill(~visible, -torch.inf))
        yield MapTile(name, matrix, counted_BhR, share)


def _first_is_largest(scores_BHRS: Tensor) -> tuple[Tensor, Tensor]:
    """`MapTile.first_is_largest`, and the row's largest score."""
    first = scores_BHRS[..., 0]
    if scores_BHRS.shape[-1] == 1:
        return torch.ones_like(first), first
    rest = scores_BHRS[..., 1:].amax(-1)
    share = (first > rest).to(first.dtype)
    tied = first == rest
    if bool(tied.any()):  # rare, so that counting ties need not cost a pass
        rows = scores_BHRS[tied]
        share[tied] = 1 / (rows == rows[:, :1]).sum(-1).to(share.dtype)
    return share, torch.maximum(first, rest)
