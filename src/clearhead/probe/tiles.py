"""The attention maps of a layer, and their weights by tiles, computed once for all statistics.

Shape suffixes as in `clearhead.probe.attention_call`; h is the heads of one map.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.nn.attention import Attention
from clearhead.ops.attention import at_zero_queries
from clearhead.probe.attention_call import AttentionCall, Scores, normalised
from clearhead.probe.observation import Statistic, measures_of

PLAIN = "softmax"
DIFFERENCE = "difference"
SHAPED = "shaped"


class _Maps(NamedTuple):
    """The softmax maps of one layer: names, what splits and combines them (None for one map a
    head), and λ of their difference, a scalar or [B, heads, T, 1]; None where there is none."""

    names: tuple[str, ...]
    by: Any
    lambdas: Tensor | None

    def split(self, heads_BH: Tensor) -> Sequence[Tensor]:
        """Split a tensor with heads in dimension 1 into one for each map."""
        return (heads_BH,) if self.by is None else self.by.split(heads_BH)


def _maps_of(call: AttentionCall) -> _Maps:
    """The maps of clearhead's attention and of DiffLlama; any other attention has one a head."""
    if isinstance(call.module, Attention):
        return _Maps(call.module.maps.maps, call.module.maps, call.lambdas)
    if type(call.module).__name__ == "DiffLlamaAttention":
        return _Maps(_Halves.maps, _Halves, _diffllama_lambda(call.module))
    return _Maps((PLAIN,), None, None)


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
        maps = _maps_of(call)
        for scores in call.scores(TILE):
            for of_scores in self._of_scores:
                of_scores.observe(call, scores)
            tile = _softmax(call, maps, scores)
            for of_weights in self._of_weights:
                of_weights.observe(call, tile)

    def measures(self) -> list[dict[str, Any]]:
        return measures_of([*self._of_weights, *self._of_scores])


def _softmax(call: AttentionCall, maps: _Maps, scores: Scores) -> AttentionTile:
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
    tiles += _combined(call, maps, start, weights, visible, counted)
    return AttentionTile(start, visible, tiles, maps.lambdas, int((~finite & seen).sum()))


def _combined(
    call: AttentionCall,
    maps: _Maps,
    start: int,
    weights_BHRS: Tensor,
    visible: Tensor,
    counted_BHR: Tensor,
) -> Iterator[MapTile]:
    """The signed matrices that a layer makes of its softmax maps: their difference, and the
    α I + β A − γ C of a shaped block."""
    lambdas, signed = maps.lambdas, dict[str, Tensor]()
    if lambdas is not None and lambdas.ndim > 2:  # one for each token
        lambdas = lambdas[:, :, start : start + weights_BHRS.shape[2]]
    if lambdas is not None:
        signed[DIFFERENCE] = maps.by.effective_weights(weights_BHRS, lambdas)
    if isinstance(call.module, Attention) and call.module.layer.shaping != "none":

        def resting() -> Tensor:  # the softmax maps at W_Q = 0
            null = replace(call, sink=at_zero_queries(call.sink)).null_logit()
            return normalised(torch.where(visible, 0.0, -torch.inf).expand_as(weights_BHRS), null)[
                0
            ]

        first = call.k.shape[2] - call.q.shape[2] + start
        signed[SHAPED] = call.module.effective_weights(weights_BHRS, lambdas, resting, first)
    counted = torch.stack(list(maps.split(counted_BHR))).all(0)
    for name, matrix in signed.items():
        matrix = matrix.masked_fill(~counted[..., None], 0.0)
        # Signed weights may all be below the 0 of a hidden key.
        share, _ = _first_is_largest(matrix.masked_fill(~visible, -torch.inf))
        yield MapTile(name, matrix, counted, share)


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
