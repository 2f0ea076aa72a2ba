"""Statistics of attention weights by map: first token, null key, entropy, reach and λ.

Shares are of (query, head) pairs, as in arXiv 2410.17174: give windows of text from its first
token on, without padding. Each statistic is fed by `clearhead.probe.ByTile`.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.diagnose.quotients import quotient, quotients
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.maps import DIFFERENCE
from clearhead.probe.tiles import AttentionTile

SINK_THRESHOLDS = (0.2, 0.3)
OF_VISIBLE_KEYS = ("chance_floor", "entropy_ceiling")  # the same for all maps


class RowMeans:
    """Means over queries by map, layer and head, of queries that see a key.

    - `first_token_argmax_share`: the share of queries whose largest weight is on key 0. Of k equal
      largest weights each counts 1/k, so that uniform attention scores its chance, not 1.
    - `first_token_mass`: the mean weight on key 0.
    - `null_mass`: the mean weight on no key; only with a sink beside the keys (softmax-1).
    - `prefix_mass`: the mean weight on learned keys that have values (`normalizer` key-value).
    - `entropy`: of a query's weights, in nats; a null key counts as a key.
    - `chance_floor`, over all layers: the argmax share without any preference, 1/(i + 1) for query
      i: for T causal queries H_T / T, with H_T the T-th harmonic number.
    - `entropy_ceiling`, over all layers: the entropy of equal weights on the visible keys.

    A row with a logit that is not finite counts in `non_finite_rows` and in nothing else.
    """

    def __init__(self) -> None:
        # (map, layer) → metric → float64 [2, heads]: the sum over queries, and their number.
        self._sums: dict[tuple[str, int], dict[str, Tensor]] = {}
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
                of_keys = (tile.visible[..., 0] / keys, keys.log())
                values |= dict(zip(OF_VISIBLE_KEYS, of_keys, strict=True))
            stacked = torch.stack([value.expand(part.counted.shape) for value in values.values()])
            totals = torch.where(part.counted, stacked, 0).sum((1, 3), dtype=torch.float64)
            count = part.counted.sum((0, 2)).double()
            sums = self._sums.setdefault((part.name, call.layer), {})
            for metric, total in zip(values, totals, strict=True):
                both = torch.stack([total, count])
                sums[metric] = sums[metric] + both if metric in sums else both

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: over all layers, by layer, and by layer and head."""
        out: list[dict[str, Any]] = []
        for name in dict.fromkeys(name for name, _ in self._sums):
            layers = {layer: sums for (n, layer), sums in sorted(self._sums.items()) if n == name}
            for metric in next(iter(layers.values())):
                by_layer = {layer: sums[metric].sum(-1) for layer, sums in layers.items()}
                if metric in OF_VISIBLE_KEYS:
                    out += quotients(by_layer, metric=metric)[:1]
                    continue
                out += quotients(by_layer, metric=metric, map=name)
                out += [
                    {"metric": metric, "map": name, "layer": layer, "head": head, "value": value}
                    for layer, sums in layers.items()
                    for head, value in enumerate(map(quotient, sums[metric].T))
                ]
        if self._non_finite:
            out.append({"metric": "non_finite_rows", "value": self._non_finite})
        return out


class SinkRate:
    """By map and layer, the share of (text, head) pairs whose mean weight on the first token
    exceeds a threshold (0.3 in arXiv 2410.10781; queries from 0 on)."""

    def __init__(self) -> None:
        # Of the texts now observed: layer → map → Σ [B, h], and the number of their queries.
        self._mass: dict[int, dict[str, Any]] = {}
        self._queries: dict[int, int] = {}
        self._counts: dict[tuple[str, int], Any] = defaultdict(int)  # [above each, pairs]

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.start == 0:  # other texts
            self._count(call.layer)
            self._queries[call.layer] = call.q.shape[2]
        mass = self._mass.setdefault(call.layer, {})
        for part in tile.maps:
            mass[part.name] = mass.get(part.name, 0) + part.weights[..., 0].sum(-1)

    def _count(self, layer: int) -> None:
        for name, mass_BH in self._mass.pop(layer, {}).items():
            mean = mass_BH / self._queries[layer]
            above = [int((mean > limit).sum()) for limit in SINK_THRESHOLDS]
            self._counts[name, layer] += torch.tensor([*above, mass_BH.numel()])

    def measures(self) -> list[dict[str, Any]]:
        for layer in list(self._mass):
            self._count(layer)
        return [
            line
            for name in dict.fromkeys(name for name, _ in self._counts)
            for index, threshold in enumerate(SINK_THRESHOLDS)
            for line in quotients(
                {at: n[[index, -1]] for (m, at), n in self._counts.items() if m == name},
                metric=f"sink_rate_{threshold}",
                map=name,
            )
        ]


class SignedDifference:
    """Of differential attention, by layer: λ, and `negative_share`, the part of Σ|weight| of the
    signed difference that is negative."""

    def __init__(self) -> None:
        self._lambdas: dict[int, Any] = defaultdict(int)  # [Σ, number]
        self._signed: dict[int, Any] = defaultdict(int)  # [Σ negative part, Σ |weight|]

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        if tile.lambdas is not None and tile.start == 0:
            every = tile.lambdas.double().cpu()  # one, or one for each text, head and token
            total = torch.stack([every.sum(), torch.tensor(float(every.numel())).double()])
            self._lambdas[call.layer] += total
        for part in tile.maps:
            if part.name == DIFFERENCE:
                sums = [part.weights.clamp_max(0).abs().sum(), part.weights.abs().sum()]
                self._signed[call.layer] += torch.stack(sums).double()

    def measures(self) -> list[dict[str, Any]]:
        return [
            {"metric": metric, "layer": layer, "value": quotient(sums)}
            for metric, found in (("lambda", self._lambdas), ("negative_share", self._signed))
            for layer, sums in sorted(found.items())
        ]


class Reach:
    """Attention weight by distance, query − key; of a signed map the signed weights, over their
    sum."""

    def __init__(self) -> None:
        # (map, layer, keys) → Σ weights at the distances −keys to keys.
        self._sums: dict[tuple[str, int, int], Tensor] = {}

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        keys = call.k.shape[2]
        for part in tile.maps:
            by_distance = _by_distance(part.weights.sum((0, 1))).double().cpu()
            total = self._sums.setdefault(
                (part.name, call.layer, keys), torch.zeros(2 * keys + 1, dtype=torch.float64)
            )
            # The last row's first key is the farthest.
            high = keys + (keys - call.q.shape[2] + tile.start + part.weights.shape[2] - 1)
            total[high - len(by_distance) + 1 : high + 1] += by_distance.flip(-1)

    def measures(self) -> list[dict[str, Any]]:
        """Return nothing: reach is a curve."""
        return []

    def curves(self) -> list[dict[str, Any]]:
        """Payloads of "curve" records: the share of a map's weight by distance, over all layers,
        and of the first, middle and last layer."""
        out = []
        layers = sorted({layer for _, layer, _ in self._sums})
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]}) if layers else []
        for name in dict.fromkeys(name for name, _, _ in self._sums):
            for layer in (None, *shown):
                totals = [
                    total
                    for (n, index, _), total in self._sums.items()
                    if n == name and layer in (None, index)
                ]
                line: dict[str, Any] = {"curve": "share_by_distance", "map": name}
                line |= {} if layer is None else {"layer": layer}
                out.append({**line, **_bands(totals)})
        return out


def _by_distance(weights_RS: Tensor) -> Tensor:
    """Sums along the diagonals, [S + R − 1]: the first has the last row's first key."""
    rows, keys = weights_RS.shape
    # Rows upside down and one number longer than the result: read as rows of its width, each is
    # shifted by one against the last.
    width = keys + rows - 1
    wide = F.pad(weights_RS.flip(0), (0, rows)).flatten()[: rows * width]
    return wide.unflatten(0, (rows, width)).sum(0)


def _bands(totals: list[Tensor]) -> dict[str, Any]:
    """Shares by band of |distance|: 0, 1, 2 to 3, 4 to 7 …"""
    width = max(len(total) for total in totals)
    whole = torch.zeros(width, dtype=torch.float64)
    for total in totals:
        offset = (width - len(total)) // 2
        whole[offset : offset + len(total)] += total
    centre = width // 2
    after, before = whole[:centre].flip(0), whole[centre + 1 :]
    both = torch.cat([whole[centre : centre + 1], before + after])
    share = both / both.sum()
    edges = [0, 1]
    while edges[-1] < centre:
        edges.append(2 * edges[-1])
    names, values = [], []
    for low, high in zip(edges, [*edges[1:], 2 * edges[-1]], strict=True):
        part = share[low:high]
        if len(part) and low < centre:
            names.append(str(low) if high - low == 1 else f"{low}–{high - 1}")
            values.append(float(part.sum()))
    return {"x": names, "y": values}
