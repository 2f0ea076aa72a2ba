"""What attention looks at: how much of it goes to the first token, and to no token at all.

Shares are of (query, head) pairs, as in arXiv 2410.17174: give windows of text from its first
token on, without padding. Differential attention has three maps: "map 1" and "map 2", each a
softmax, and "difference", the signed matrix map 1 − λ · map 2 that multiplies the values. Of the
difference the argmax is that of the signed weight (a strongly negative weight is no attention) and
the mass is the mean signed weight, out of a row sum of 1 − λ under softmax.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.interface import probing
from clearhead.diagnose.maps import DIFFERENCE, SHAPED, maps_of
from clearhead.diagnose.weights import AttentionCall, Tile
from clearhead.errors import ClearheadError, choose
from clearhead.models.inspection import batches, evaluating

METRICS = ("first_token_argmax_share", "first_token_mass", "null_mass", "chance_floor")
LONGEST_MAP = 64  # tokens: beyond, nobody can read a heat-map


class AttentionStatistics:
    """Means over queries, by layer, map and head, of all that was run while it observed.

    - `first_token_argmax_share`: the share of queries whose largest weight is on key 0. Of k equal
      largest weights each counts 1/k, so that uniform attention scores its chance, not 1.
    - `first_token_mass`: the mean weight on key 0.
    - `null_mass`: the mean of 1 − row sum; only where a sink stands beside the keys (softmax-1).
    - `chance_floor`: the argmax share without any preference, 1/(i + 1) for query i: for T causal
      queries H_T / T, with H_T the T-th harmonic number.

    Queries that see no key are not counted.
    """

    def __init__(self) -> None:
        # (layer, map) → metric → float64 [2, heads]: the sum over queries, and their number.
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = {}

    def maps(self) -> list[str]:
        """The names of the maps seen."""
        return list(dict.fromkeys(name for _, name in self._sums))

    def layers(self) -> list[int]:
        """The layers seen, in order."""
        return sorted({layer for layer, _ in self._sums})

    def heads(self, metric: str, map: str, layer: int) -> Tensor | None:
        """The metric of each head of a layer, float64 [heads]; None where it has none."""
        sums = self._sums.get((layer, map), {}).get(choose("metric", metric, METRICS))
        return None if sums is None else (sums[0] / sums[1]).cpu()

    def pooled(self, metric: str, map: str, layer: int | None = None) -> float | None:
        """The metric over all (query, head) pairs of a layer, or of all; None where none has it."""
        choose("metric", metric, METRICS)
        sums = [
            found[metric].sum(-1)
            for (index, name), found in self._sums.items()
            if name == map and layer in (None, index) and metric in found
        ]
        if not sums:
            return None
        total, count = torch.stack(sums).sum(0).tolist()
        return total / count

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: pooled, by layer, and by layer and head."""
        out: list[dict[str, Any]] = []
        for metric in METRICS[:-1]:
            for name in self.maps():
                pooled = self.pooled(metric, name)
                if pooled is None:
                    continue
                out.append({"metric": metric, "value": pooled, "map": name})
                for layer in self.layers():
                    out += self._of_layer(metric, name, layer)
        # It depends on the visible keys alone, which all maps share.
        for name in self.maps()[:1]:
            out.append({"metric": "chance_floor", "value": self.pooled("chance_floor", name)})
        return out

    def _of_layer(self, metric: str, name: str, layer: int) -> Iterator[dict[str, Any]]:
        heads = self.heads(metric, name, layer)
        if heads is None:
            return
        place = {"metric": metric, "map": name, "layer": layer}
        yield {**place, "value": self.pooled(metric, name, layer)}
        for head, value in enumerate(heads.tolist()):
            yield {**place, "head": head, "value": value}

    def observe(self, call: AttentionCall) -> None:
        """Add one layer's attention."""
        for tile in call.tiles():
            for name, weights, null in named_maps(call, tile):
                sums = self._sums.setdefault((call.layer, name), {})
                for metric, values in _of_rows(weights, tile.visible, null).items():
                    sums[metric] = sums[metric] + values if metric in sums else values


@contextmanager
def attention_statistics(model: Any) -> Iterator[AttentionStatistics]:
    """Observe all that `model` is run on in the body; its outputs stay the same, bit for bit.

    Scores are made again from queries and keys, in float32 and by tiles of at most 16 MiB, never a
    whole T × T map.

    Raises:
        ClearheadError: as `clearhead.diagnose.interface.probing`.
    """
    statistics = AttentionStatistics()
    with probing(model, statistics.observe):
        yield statistics


def attention_maps(
    model: Any, ids: Tensor, layers: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Every attention map of one short text, for heat-maps.

    Args:
        ids: int64 [T], T at most 64.
        layers: which layers; all unless given.

    Returns:
        Payloads of "attention" records, {"layer", "head", "map", "weights"}: T rows of T numbers
        rounded to 4 digits. The caller, who has the tokenizer, adds "text", a string a token.

    Raises:
        ClearheadError: another shape, a longer text, a layer that the model does not have, or as
            `attention_statistics`.
    """
    if ids.ndim != 1 or not 1 <= len(ids) <= LONGEST_MAP:
        raise ClearheadError(
            f"an attention map is of one text of 1 to {LONGEST_MAP} tokens; "
            f"found ids of shape {list(ids.shape)}"
        )
    maps: dict[tuple[int, str], Tensor] = {}
    seen: set[int] = set()

    def observe(call: AttentionCall) -> None:
        seen.add(call.layer)
        if layers is not None and call.layer not in layers:
            return
        for tile in call.tiles():
            for name, weights, _ in named_maps(call, tile):
                _, heads, rows, keys = weights.shape
                whole = maps.setdefault((call.layer, name), torch.zeros(heads, len(ids), len(ids)))
                # Under dynamic-causal a call has some of the queries, the last of its keys.
                start = tile.start + (call.k.shape[2] - call.q.shape[2] if call.causal else 0)
                whole[:, start : start + rows, :keys] = weights[0]

    with evaluating(model), probing(model, observe):
        for batch in batches(model, [ids], 1):
            model(input_ids=batch, use_cache=False)
    if missing := set(layers or ()) - seen:
        raise ClearheadError(f"no attention in layer {min(missing)}: found layers {sorted(seen)}")
    return [
        {"layer": layer, "head": head, "map": name, "weights": _rounded(weights)}
        for (layer, name), whole in maps.items()
        for head, weights in enumerate(whole)
    ]


def named_maps(call: AttentionCall, tile: Tile) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, weights [B, heads, R, S], null weight [B, heads, R] or None) of each map of a tile."""
    maps = maps_of(call)
    nulls: Sequence[Tensor | None] = [None] * len(maps.names)
    if tile.null is not None:
        nulls = maps.split(tile.null)
    yield from zip(maps.names, maps.split(tile.weights), nulls, strict=True)
    difference = maps.difference(tile.weights, tile.start)
    if difference is not None:
        yield DIFFERENCE, difference, None
    shaped = maps.shaped(tile, call.k.shape[2] - call.q.shape[2])
    if shaped is not None:
        yield SHAPED, shaped, None


def _of_rows(weights_BHRS: Tensor, visible: Tensor, null_BHR: Tensor | None) -> dict[str, Tensor]:
    """Metric → [sum over the rows, their number], float64 [2, heads]."""
    visible = visible.expand(weights_BHRS.shape[0], -1, -1, -1)
    counted = visible.any(-1)
    # Signed weights may all be below the 0 of a hidden key.
    shown = weights_BHRS.masked_fill(~visible, -torch.inf)
    largest = shown.amax(-1)
    ties = (shown == largest[..., None]).sum(-1)
    keys = visible.sum(-1).clamp_min(1)
    values = {
        "first_token_argmax_share": (shown[..., 0] == largest) / ties,
        "first_token_mass": weights_BHRS[..., 0],
        "chance_floor": (visible[..., 0] / keys).expand_as(largest),
    }
    if null_BHR is not None:
        values["null_mass"] = null_BHR
    count = counted.expand_as(largest).sum((0, 2)).double()
    return {
        metric: torch.stack([(value * counted).sum((0, 2), dtype=torch.float64), count])
        for metric, value in values.items()
    }


def _rounded(weights_TT: Tensor) -> list[list[float]]:
    return [[round(weight, 4) for weight in row] for row in weights_TT.tolist()]
