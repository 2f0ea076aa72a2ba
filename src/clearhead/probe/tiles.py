"""The attention maps of a layer, and their weights by tiles, computed once for all statistics.

Shape suffixes as in `clearhead.probe.attention_call`; h is the heads of one map.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.nn.attention import Attention
from clearhead.ops.attention import at_zero_queries
from clearhead.probe.attention_call import AttentionCall, Scores, Tile, normalised
from clearhead.probe.observation import Statistic, measures_of

PLAIN = "softmax"
DIFFERENCE = "difference"
SHAPED = "shaped"


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """The attention maps of one layer.

    Attributes:
        names: of the maps that are rows of weights each, in the order of `split`.
        lambdas: λ of the difference, a scalar or [B, heads, T, 1]; None where there is none.
        by: the module that splits and combines; None for one map a head.
        call: of clearhead's own attention, where its shaping makes another matrix of the maps.
    """

    names: tuple[str, ...]
    lambdas: Tensor | None
    by: Any
    call: AttentionCall | None = None

    def split(self, heads_BH: Tensor) -> Sequence[Tensor]:
        """Split a tensor with heads in dimension 1 into one for each map."""
        return (heads_BH,) if self.by is None else self.by.split(heads_BH)

    def difference(self, weights_BHRS: Tensor, start: int) -> Tensor | None:
        """The signed map [B, heads, R, S] of the queries from `start` on, where there is one."""
        if self.lambdas is None:
            return None
        return self.by.effective_weights(weights_BHRS, self._of_rows(weights_BHRS, start))

    def shaped(self, tile: Tile, before: int) -> Tensor | None:
        """The matrix α I + β A − γ C, [B, heads, R, S], or None; `before`: keys before query 0."""
        call = self.call
        if call is None:
            return None
        by, first = self._of_rows(tile.weights, tile.start), before + tile.start
        attention: Any = call.module
        return attention.effective_weights(
            tile.weights, by, lambda: _at_zero_queries(call, tile), first
        )

    def _of_rows(self, weights_BHRS: Tensor, start: int) -> Tensor | None:
        lambdas = self.lambdas
        if lambdas is not None and lambdas.ndim > 2:  # one for each token
            lambdas = lambdas[:, :, start : start + weights_BHRS.shape[2]]
        return lambdas


def maps_of(call: AttentionCall) -> LayerMaps:
    """The maps of clearhead's attention and of DiffLlama; any other attention has one a head."""
    if isinstance(call.module, Attention):
        return LayerMaps(
            names=call.module.maps.maps,
            lambdas=call.lambdas,
            by=call.module.maps,
            call=call if call.module.layer.shaping != "none" else None,
        )
    if type(call.module).__name__ == "DiffLlamaAttention":
        return LayerMaps(names=_Halves.maps, lambdas=_diffllama_lambda(call.module), by=_Halves)
    return LayerMaps(names=(PLAIN,), lambdas=None, by=None)


def _at_zero_queries(call: AttentionCall, tile: Tile) -> Tensor:
    """The softmax maps [B, H, R, S] at W_Q = 0."""
    resting = replace(call, sink=at_zero_queries(call.sink))
    score = torch.zeros_like(tile.weights).masked_fill(~tile.visible, -torch.inf)
    return normalised(score, resting.null_logit())[0]


class _Halves:
    """transformers' DiffLlama pairs head i with head i + H/2."""

    maps = ("map 1", "map 2")

    @staticmethod
    def split(heads_BH: Tensor) -> tuple[Tensor, ...]:
        return heads_BH.chunk(2, 1)

    @staticmethod
    def effective_weights(weights_BHTS: Tensor, lambdas: Tensor) -> Tensor:
        first, second = weights_BHTS.chunk(2, 1)
        return first - lambdas.to(first.dtype) * second


def _diffllama_lambda(module: Any) -> Tensor:
    first = torch.exp((module.lambda_q1.float() * module.lambda_k1.float()).sum())
    second = torch.exp((module.lambda_q2.float() * module.lambda_k2.float()).sum())
    return first - second + module.lambda_init


TILE = 1 << 20  # scores held at once: 4 MiB, so that a tile fits into a processor's cache
_HIDDEN = -1e30  # finite, so that weight × score of a hidden key is 0 and not NaN


class MapTile(NamedTuple):
    """One attention map of a tile.

    Attributes:
        name: "softmax"; "map 1", "map 2" and the signed "difference" of differential attention;
            "shaped", the matrix of a shaped block that multiplies the values.
        weights: [B, h, R, S], 0 where hidden and in rows that do not count.
        counted: bool [B, h, R]: the row sees a key, and all of its logits are finite.
        first_is_largest: [B, h, R], 1 / n where key 0 is one of the row's n largest, else 0; of
            signed weights the largest is the most positive.
        entropy: [B, h, R] in nats, where the null key counts as a key; None for signed maps.
        null: [B, h, R], the weight of the sink (`AttentionCall.null_metric`); None without one.
    """

    name: str
    weights: Tensor
    counted: Tensor
    first_is_largest: Tensor
    entropy: Tensor | None = None
    null: Tensor | None = None


class AttentionTile(NamedTuple):
    """Rows `start` to `start + R` of all the maps of a layer.

    Attributes:
        visible: bool [B or 1, H or 1, R, S], True where the query may see the key.
        maps: the softmax maps first, the matrix that multiplies the values last.
        lambdas: λ of the difference; None where there is none.
        non_finite: rows left out because of a logit that is not finite.
    """

    start: int
    visible: Tensor
    maps: list[MapTile]
    lambdas: Tensor | None
    non_finite: int


class ByTile:
    """Statistics of scores and of weights, fed in one pass over the tiles of each layer.

    Softmax takes about a dozen passes over a tile, in the memory of its scores.
    """

    def __init__(
        self, *, scores: Sequence[Statistic] = (), weights: Sequence[Statistic] = ()
    ) -> None:
        self._of_scores, self._of_weights = scores, weights

    def observe(self, call: AttentionCall) -> None:
        maps = maps_of(call)
        for scores in call.scores(TILE):
            for of_scores in self._of_scores:
                of_scores.observe(call, scores)
            tile = _softmax(call, maps, scores)
            for of_weights in self._of_weights:
                of_weights.observe(call, tile)

    def measures(self) -> list[dict[str, Any]]:
        return measures_of([*self._of_weights, *self._of_scores])


def _softmax(call: AttentionCall, maps: LayerMaps, scores: Scores) -> AttentionTile:
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
    parts = (weights, counted, share, entropy)
    split = [maps.split(part) for part in parts]
    nulls = [None] * len(maps.names) if null is None else maps.split(null)
    tiles = [MapTile(*map_) for map_ in zip(maps.names, *split, nulls, strict=True)]
    tiles += _combined(call, maps, Tile(start, weights, visible, null), counted)
    return AttentionTile(start, visible, tiles, maps.lambdas, int((~finite & seen).sum()))


def _combined(
    call: AttentionCall, maps: LayerMaps, tile: Tile, counted_BHR: Tensor
) -> Iterator[MapTile]:
    """The signed matrices that a layer makes of its softmax maps."""
    difference = maps.difference(tile.weights, tile.start)
    shaped = maps.shaped(tile, call.k.shape[2] - call.q.shape[2])
    for name, signed in ((DIFFERENCE, difference), (SHAPED, shaped)):
        if signed is not None:
            counted = torch.stack(list(maps.split(counted_BHR))).all(0)
            signed = signed.masked_fill(~counted[..., None], 0.0)
            # Signed weights may all be below the 0 of a hidden key.
            share, _ = _first_is_largest(signed.masked_fill(~tile.visible, -torch.inf))
            yield MapTile(name, signed, counted, share)


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
