"""Statistics of attention: first token, null key, entropy and λ by map; logits, keys and values.

Shares are of (query, head) pairs, as in arXiv 2410.17174: windows must start at a text's first
token and have no padding. All but those of keys and values run within `clearhead.probe.ByTile`.
"""

from collections import defaultdict
from itertools import product
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.means import Means, Sizes
from clearhead.nn.attention import Attention
from clearhead.probe.attention_call import AttentionCall, Scores
from clearhead.probe.tiles import AttentionTile

MEDIAN_EVERY = 16  # queries: the median of the logits is over one query in so many
METRICS = ("largest_key", "largest_value")
PARTS = ("first", "rest", "prefix")
EQUAL = 1 - 1e-5
OF_VISIBLE_KEYS = ("chance_floor", "entropy_ceiling")  # the same for all maps


class RowMeans(Means):
    """Means over queries that see a key, by map, layer and head; docs/diagnose.md defines them.

    `first_token_argmax_share`, `first_token_mass`, `null_mass` (`prefix_mass` of learned keys that
    have values) and `entropy` (nats); over all layers `chance_floor` and `entropy_ceiling`, share
    and entropy of equal weights. A row with a logit that is not finite counts in `non_finite_rows`
    alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._non_finite = 0

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        self._non_finite += tile.non_finite
        for index, part in enumerate(tile.maps):
            values = {
                "first_token_argmax_share": part.first_is_largest,
                "first_token_mass": part.weights[..., 0],
            }
            values |= {} if part.null is None else {call.null_metric: part.null}
            values |= {} if part.entropy is None else {"entropy": part.entropy}
            if index == 0:
                keys = tile.visible.sum(-1).clamp_min(1)
                values |= {"chance_floor": tile.visible[..., 0] / keys}
                values |= {"entropy_ceiling": keys.log()}
            count_H = part.counted.sum((0, 2))
            for metric, value in values.items():
                total_H = torch.where(part.counted, value, 0).sum((0, 2), dtype=torch.float64)
                named = {} if metric in OF_VISIBLE_KEYS else {"map": part.name}
                self.add(call.layer, total_H, count_H, metric=metric, **named)

    def measures(self) -> list[dict[str, Any]]:
        lines = super().measures()
        lines = [x for x in lines if "layer" not in x or x["metric"] not in OF_VISIBLE_KEYS]
        bad = {"metric": "non_finite_rows", "value": self._non_finite}
        return [*lines, bad] if self._non_finite else lines


class Lambdas(Means):
    """`lambda` of differential attention, by layer."""

    over_layers = False

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.lambdas is not None and tile.start == 0:
            every = tile.lambdas.double()  # one, or one for each text, head and token
            self.add(call.layer, every.sum(), every.numel(), metric="lambda")


class ByPosition(Means):
    """Means of queries in bands of position, 0, 1, 2 to 3, 4 to 7 …, by a band's first."""

    def add_queries(
        self, layer: int, start: int, value_BHR: Tensor, counted_BHR: Tensor, **line: Any
    ) -> None:
        position_R = torch.arange(start, start + value_BHR.shape[-1])
        band_R = torch.frexp(position_R.double()).exponent
        value_BHR = torch.where(counted_BHR, value_BHR, 0.0)
        for band in band_R.unique().tolist():
            inside = (band_R == band).to(value_BHR.device)
            total = value_BHR[..., inside].sum(dtype=torch.float64)
            count = counted_BHR[..., inside].sum()
            if bool(count):
                self.add(layer, total, count, **line, position=1 << band >> 1)


class NullMass(ByPosition):
    """`null_mass` of the maps that have a null key without a value."""

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        for part in tile.maps:
            if part.null is not None and call.null_metric == "null_mass":
                line = {"metric": "null_mass", "map": part.name}
                start = call.before + tile.start
                self.add_queries(call.layer, start, part.null, part.counted, **line)


class ClosedGates(ByPosition):
    """`gate_closed`, one minus the mean over channels of a gate on the heads' outputs."""

    def observe(self, layer: int, gate_BTC: Tensor) -> None:
        closed_BHT = 1 - gate_BTC.mean(-1)[:, None]
        every = torch.ones_like(closed_BHT, dtype=torch.bool)
        self.add_queries(layer, 0, closed_BHT, every, metric="gate_closed", map="gate")


class LogitSizes:
    """The largest visible |logits| of all maps (several ranks over all layers, the largest by
    layer), and their median over one query in 16."""

    def __init__(self) -> None:
        self._layers: dict[int, Sizes] = defaultdict(Sizes)

    def observe(self, call: AttentionCall, scores: Scores) -> None:
        start, score, visible, clear = scores
        # Masks added to the scores of hidden keys are no logits, and would be the largest of all.
        shown = score if clear else score.masked_fill(~visible, 0.0)
        bound = torch.maximum(shown.amax(-1), -shown.amin(-1))
        sizes = self._layers[call.layer]
        sizes.add(score, bound, visible)
        before = call.k.shape[2] - call.q.shape[2] + start
        few = score[:, :, -before % MEDIAN_EVERY :: MEDIAN_EVERY]
        if few.numel():
            seen = visible[:, :, -before % MEDIAN_EVERY :: MEDIAN_EVERY].expand(few.shape)
            sizes.count(few[seen])

    def measures(self) -> list[dict[str, Any]]:
        if not self._layers:
            return []
        return Sizes(self._layers.values()).measures("logit") + [
            {"metric": "logit_top_1", "layer": layer, "value": sizes.ranks().get(1)}
            for layer, sizes in sorted(self._layers.items())
        ]


class KeyValueSizes:
    """`largest_key` and `largest_value`: the largest |k| and |v| of all texts, and where it is, for
    the first token, the others, and the learned keys of a prefix.

    Keys are taken with their positions applied, without the columns that ALiBi and FoX add.
    """

    def __init__(self) -> None:
        # Metric, part of the text and layer → the value, and its (token, head, channel).
        self._largest: dict[tuple[str, str, int], tuple[float, list[int]]] = {}

    def observe(self, call: AttentionCall) -> None:
        own = call.module.layer.head_dim if isinstance(call.module, Attention) else None
        for i, (metric, x_BGSD) in enumerate(zip(METRICS, (call.k, call.v), strict=True)):
            if x_BGSD is None:
                continue
            prefix = None if call.prefix is None else call.prefix[i]
            parts = (x_BGSD[:, :, :1], x_BGSD[:, :, 1:], prefix)
            for part, first, x in zip(PARTS, (0, 1, 0), parts, strict=True):
                if x is not None and x.numel():
                    value, (token, head, channel) = _largest(x if i else x[..., :own])
                    largest, key = (
                        (value, [token + first, head, channel]),
                        (metric, part, call.layer),
                    )
                    both = (largest, self._largest.get(key, largest))
                    top = max(value for value, _ in both)
                    equal = (one for one in both if not one[0] < EQUAL * top)
                    self._largest[key] = min(equal, key=lambda one: one[1])

    def measures(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for names in product(METRICS, PARTS):
            line = dict(zip(("metric", "tokens"), names, strict=True))
            by_layer = list[dict[str, Any]]()
            for (*own, layer), (value, (token, head, channel)) in sorted(self._largest.items()):
                if own == [*names]:
                    where = f"head {head}, channel {channel}, token {token}"
                    by_layer.append({**line, "layer": layer, "value": value, "where": where})
            if by_layer:
                top = max(by_layer, key=lambda one: one["value"])
                where = f"layer {top['layer']}, {top['where']}"
                lines += [{**line, "value": top["value"], "where": where}, *by_layer]
        return lines


def _largest(x_BGSD: Tensor) -> tuple[float, list[int]]:
    """The largest |x|, with its token, head and channel: of numbers equal up to rounding, the
    earliest token's, whatever the batch."""
    top_SGD = x_BGSD.abs().amax(0).transpose(0, 1)
    value = float(top_SGD.max())
    places = (top_SGD >= EQUAL * value).nonzero()[:1].tolist() or [[0, 0, 0]]  # none of a NaN
    return value, places[0]
