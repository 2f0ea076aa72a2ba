"""Attention in full: sinks, entropy, reach, logits and order, in few passes over a tile at a time.

Every number but the median of the logits is over every query and head. What runs costs about a
dozen passes over a tile of scores that fits into a processor's cache; no map is ever whole.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.diagnose.largest import Histogram, Largest, median_of, ranks_of, together
from clearhead.diagnose.maps import DIFFERENCE, Maps, maps_of
from clearhead.diagnose.weights import AttentionCall, Scores

TILE = 1 << 20  # scores held at once; 4 MiB
SINK_THRESHOLDS = (0.2, 0.3)
NEAR, FAR = 4, 12  # keys: the nearest, and those just beyond, which order is judged by
MEDIAN_EVERY = 16  # queries: the median of the logits is over one query in so many
_HIDDEN = -1e30  # finite, so that weight × score of a hidden key is 0 and not NaN


class AttentionProfile:
    """Sums over all queries of every layer that was observed, by map and head.

    By map (`maps.Maps.names`) and head, as means over queries that see a key:

    - `first_token_argmax_share`, `first_token_mass`, `null_mass`: as in
      `clearhead.diagnose.attention`.
    - `entropy`: of a query's weights, nats; a null key counts as a key. Beside it
      `entropy_ceiling`, the entropy of equal weights on the visible keys.

    By map and layer, `sink_rate`: the share of (text, head) pairs whose mean weight on the first
    token exceeds a threshold (0.3 in arXiv 2410.10781; queries from 0 on).
    Of the signed `difference`: its argmax share and mass by signed weight, `negative_share`, the
    part of Σ|weight| that is negative, and λ.
    By layer: the largest |logit| (scaled, before the softmax; visible keys, all maps) and their
    median; `order_broken`, the share of (query, head) pairs whose 4 nearest keys have a lower mean
    logit than the next 12, where 16 keys are visible on that side. Half of them would without any
    preference for near or far.

    A row with a logit that is not finite counts in `non_finite_rows` and in nothing else.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], dict[str, Tensor]] = {}  # metric → [2, heads]
        self.reach: dict[tuple[int, str], Tensor] = {}  # [heads, distances], from −S to S
        self.sinks: dict[tuple[int, str], dict[float, list[int]]] = {}
        self.lambdas: dict[int, list[float]] = {}
        self.largest: dict[int, Largest] = {}
        self.magnitudes: dict[int, Histogram] = {}
        self.order: dict[tuple[int, str], Tensor] = {}  # [broken, counted]
        self.bad: dict[int, int] = {}
        self.signed: dict[int, Tensor] = {}  # Σ negative part, Σ |weight|

    def observe(self, call: AttentionCall) -> None:
        """Add one layer's attention."""
        maps, layer = maps_of(call), call.layer
        if maps.lambdas is not None:
            mean = float(maps.lambdas.float().mean())
            self.lambdas.setdefault(layer, []).append(mean)
        masses: dict[str, Tensor] = {}  # map → Σ over queries of the first token's weight
        for tile in call.scores(TILE):
            self._logits(call, tile)
            self._order(call, tile)
            weights, rows, kept = _softmax(tile, call.null_logit(tile.start, tile.scores.shape[2]))
            self.bad[layer] = self.bad.get(layer, 0) + int((~kept & rows["seen"].bool()).sum())
            kept = kept & rows["seen"].bool()
            parts = {name: list(maps.split(value)) for name, value in rows.items()}
            for index, name in enumerate(maps.names):
                here = {metric: values[index] for metric, values in parts.items()}
                split = maps.split(kept)[index]
                self._add(layer, name, here, split)
                mass = (here["first_token_mass"] * split).sum(-1)
                masses[name] = masses.get(name, 0) + mass
            if bool((~kept).any()):
                weights.masked_fill_(~kept[..., None], 0.0)
            for name, part in zip(maps.names, maps.split(weights), strict=True):
                self._reach(layer, name, call, tile, part)
            self._difference(layer, call, maps, tile, weights, kept)
        for name, mass in masses.items():
            self._sink(layer, name, mass / call.q.shape[2])

    def _add(self, layer: int, name: str, values: dict[str, Tensor], kept: Tensor) -> None:
        count = kept.sum((0, 2)).double()
        sums = self.rows.setdefault((layer, name), {})
        for metric, value in values.items():
            if metric == "seen":
                continue
            total = torch.where(kept, value, 0).sum((0, 2), dtype=torch.float64)
            found = torch.stack([total, count])
            sums[metric] = sums[metric] + found if metric in sums else found

    def _sink(self, layer: int, name: str, mass_BH: Tensor) -> None:
        counts = self.sinks.setdefault((layer, name), {t: [0, 0] for t in SINK_THRESHOLDS})
        for threshold, count in counts.items():
            count[0] += int((mass_BH > threshold).sum())
            count[1] += mass_BH.numel()

    def _logits(self, call: AttentionCall, tile: Scores) -> None:
        scores, visible = tile.scores, tile.visible
        largest = self.largest.setdefault(call.layer, Largest())
        # Masks added to the scores of hidden keys are no logits, and would be the largest of all.
        shown = scores if tile.clear else scores.masked_fill(~visible, 0.0)
        bound = torch.maximum(shown.amax(-1), -shown.amin(-1))
        largest.add(scores, bound, visible)
        before = call.k.shape[2] - call.q.shape[2] + tile.start
        rows = slice(-before % MEDIAN_EVERY, None, MEDIAN_EVERY)
        few = scores[:, :, rows]
        if few.numel():
            shown = visible[:, :, rows].expand(few.shape)
            self.magnitudes.setdefault(call.layer, Histogram()).add(few[shown])

    def _order(self, call: AttentionCall, tile: Scores) -> None:
        """Compare the mean logit of the nearest keys with that of the next ones, on each side."""
        scores, visible = tile.scores, tile.visible
        keys, device = scores.shape[-1], scores.device
        before = call.k.shape[2] - call.q.shape[2] + tile.start
        row = torch.arange(before, before + scores.shape[2], device=device)[:, None]
        offsets = torch.arange(NEAR + FAR, device=device)
        sides = {"before": row - offsets}
        if not call.causal:
            sides["after"] = row + offsets
        for side, column in sides.items():
            inside = ((column >= 0) & (column < keys)).all(-1)
            if not bool(inside.any()):
                continue
            column = column[inside]
            chosen = scores[:, :, inside].gather(-1, column.expand(*scores.shape[:2], -1, -1))
            shown = visible[:, :, inside].expand(*visible.shape[:2], -1, -1)
            shown = shown.gather(-1, column.expand(*visible.shape[:2], -1, -1)).all(-1)
            near, far = chosen[..., :NEAR].mean(-1), chosen[..., NEAR:].mean(-1)
            counted = shown & near.isfinite() & far.isfinite()
            found = torch.stack([((near < far) & counted).sum(), counted.sum()])
            key = (call.layer, side)
            self.order[key] = self.order.get(key, 0) + found

    def _reach(
        self, layer: int, name: str, call: AttentionCall, tile: Scores, weights: Tensor
    ) -> None:
        """Add weights by distance, query − key."""
        sheared = _by_distance(weights.sum(0))
        heads, width = sheared.shape
        rows, keys = weights.shape[2], call.k.shape[2]
        # Column c of the first row is at distance `start − c`; the last of sheared is the least.
        start = keys - call.q.shape[2] + tile.start
        total = self.reach.setdefault(
            (layer, name), torch.zeros(heads, 2 * keys + 1, dtype=torch.float64)
        )
        if total.shape[1] != 2 * keys + 1:  # another length: line their zeros up
            grown = torch.zeros(heads, max(total.shape[1], 2 * keys + 1), dtype=torch.float64)
            offset = (grown.shape[1] - total.shape[1]) // 2
            grown[:, offset : offset + total.shape[1]] = total
            total = self.reach[layer, name] = grown
        centre = total.shape[1] // 2
        high = start + rows - 1
        low = high - width + 1
        total[:, centre + low : centre + high + 1] += sheared.flip(-1).double().cpu()

    def _difference(
        self,
        layer: int,
        call: AttentionCall,
        maps: Maps,
        tile: Scores,
        weights: Tensor,
        kept: Tensor,
    ) -> None:
        signed = maps.difference(weights, tile.start)
        if signed is None:
            return
        kept = torch.stack(list(maps.split(kept))).all(0)
        signed = signed.masked_fill(~kept[..., None], 0.0)
        shown = signed.masked_fill(~tile.visible, -torch.inf)
        share, _ = _first_is_largest(shown)
        values = {"first_token_argmax_share": share, "first_token_mass": signed[..., 0]}
        self._add(layer, DIFFERENCE, values, kept)
        self._reach(layer, DIFFERENCE, call, tile, signed)
        sums = torch.stack([signed.clamp_max(0).abs().sum(), signed.abs().sum()]).double()
        self.signed[layer] = self.signed.get(layer, 0) + sums

    def layers(self) -> list[int]:
        """The layers seen, in order."""
        return sorted({layer for layer, _ in self.rows})

    def maps(self) -> list[str]:
        """The names of the maps seen."""
        return list(dict.fromkeys(name for _, name in self.rows))

    def value(
        self, metric: str, map: str, layer: int | None = None, head: int | None = None
    ) -> float | None:
        """A mean over queries, and over the heads and layers that are not named."""
        sums = [
            found[metric] if head is None else found[metric][:, head : head + 1]
            for (index, name), found in self.rows.items()
            if name == map and layer in (None, index) and metric in found
        ]
        if not sums:
            return None
        total, count = torch.stack([part.sum(-1) for part in sums]).sum(0).tolist()
        return total / count if count else math.nan

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records."""
        out: list[dict[str, Any]] = []
        for name in self.maps():
            metrics = dict.fromkeys(m for (_, n), f in self.rows.items() if n == name for m in f)
            for metric in metrics:
                place: dict[str, Any] = {"metric": metric, "map": name}
                if metric in ("chance_floor", "entropy_ceiling"):  # of the visible keys alone
                    if name == self.maps()[0]:
                        out.append({"metric": metric, "value": self.value(metric, name)})
                    continue
                out.append({**place, "value": self.value(metric, name)})
                for layer in self.layers():
                    if metric not in self.rows.get((layer, name), {}):
                        continue
                    out.append({**place, "layer": layer, "value": self.value(metric, name, layer)})
                    if metric == "first_token_argmax_share":
                        heads = self.rows[layer, name][metric].shape[1]
                        out += [
                            {**place, "layer": layer, "head": head}
                            | {"value": self.value(metric, name, layer, head)}
                            for head in range(heads)
                        ]
        return out + self._sink_measures() + self._logit_measures() + self._other_measures()

    def _sink_measures(self) -> list[dict[str, Any]]:
        out = []
        for name in dict.fromkeys(name for _, name in self.sinks):
            for threshold in SINK_THRESHOLDS:
                metric = f"sink_rate_{threshold}"
                counts = {
                    layer: found[threshold] for (layer, n), found in self.sinks.items() if n == name
                }
                above, total = (sum(column) for column in zip(*counts.values(), strict=True))
                out.append({"metric": metric, "map": name, "value": above / total})
                out += [
                    {"metric": metric, "map": name, "layer": layer, "value": count / number}
                    for layer, (count, number) in sorted(counts.items())
                ]
        return out

    def _logit_measures(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        whole = ranks_of(together(list(self.largest.values())))
        out += [{"metric": f"logit_top_{rank}", "value": value} for rank, value in whole.items()]
        if self.magnitudes:
            counts = torch.stack([h.counts for h in self.magnitudes.values()]).sum(0)
            out.append({"metric": "logit_median", "value": median_of(counts)})
        for layer, largest in sorted(self.largest.items()):
            top = largest.ranks().get(1)
            out.append({"metric": "logit_top_1", "layer": layer, "value": top})
        return out

    def _other_measures(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for side in dict.fromkeys(side for _, side in self.order):
            counts = {layer: n.tolist() for (layer, s), n in self.order.items() if s == side}
            broken, total = (sum(column) for column in zip(*counts.values(), strict=True))
            if not total:  # a mask hides that side
                continue
            metric = f"order_broken_{side}"
            out.append({"metric": metric, "value": broken / total})
            out += [
                {"metric": metric, "layer": layer, "value": found / number if number else math.nan}
                for layer, (found, number) in sorted(counts.items())
            ]
        for layer, found in sorted(self.lambdas.items()):
            value = sum(found) / len(found)
            out.append({"metric": "lambda", "layer": layer, "value": value})
        for layer, sums in sorted(self.signed.items()):
            negative, whole = sums.tolist()
            value = negative / whole if whole else math.nan
            out.append({"metric": "negative_share", "layer": layer, "value": value})
        if bad := sum(self.bad.values()):
            out.append({"metric": "non_finite_rows", "value": bad})
        return out

    def curves(self) -> list[dict[str, Any]]:
        """Payloads of "curve" records: the share of a map's weight by distance, over all layers,
        and of the first, middle and last layer; the signed weights of a difference sum to 1 too."""
        out = []
        layers = self.layers()
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]}) if layers else []
        for name in dict.fromkeys(name for _, name in self.reach):
            for layer in (None, *shown):
                total = [
                    found.sum(0)
                    for (index, n), found in self.reach.items()
                    if n == name and layer in (None, index)
                ]
                line: dict[str, Any] = {"curve": "share_by_distance", "map": name}
                if layer is not None:
                    line["layer"] = layer
                out.append({**line, **_bands(total)})
        return out


def _softmax(tile: Scores, sink: float | Tensor | None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Weights [B, H, R, S] in the memory of the scores, what is known of each row [B, H, R], and
    which rows are finite."""
    scores, visible = tile.scores, tile.visible
    clear = tile.clear if tile.clear < scores.shape[-1] else scores.shape[-1]
    if clear < scores.shape[-1]:
        hidden = scores[..., clear:]
        hidden.masked_fill_(~visible[..., clear:], _HIDDEN)
    seen = visible.any(-1).expand(scores.shape[:-1])
    share, top = _first_is_largest(scores)
    logit = None
    if sink is not None:
        logit = torch.as_tensor(sink, dtype=top.dtype, device=top.device)
        logit = logit.squeeze(-1) if logit.ndim else logit
        top = torch.maximum(top, logit)
    scores.sub_(top[..., None])
    weights = torch.exp(scores)
    total = weights.sum(-1)
    # −Σ p log p = log total − Σ p (s − top), the sink being one of them
    products = scores.mul_(weights).sum(-1)
    null = None
    if logit is not None:
        null = torch.exp(logit - top)
        total = total + null
        products = products + torch.where(null > 0, null * (logit - top), 0)
        null = null / total
    entropy = total.log() - products / total
    weights.mul_((1 / total)[..., None])
    finite = total.isfinite() & entropy.isfinite()
    keys = visible.sum(-1).clamp_min(1)
    rows = {
        "first_token_argmax_share": share,
        "first_token_mass": weights[..., 0],
        "entropy": entropy,
        "chance_floor": (visible[..., 0] / keys).expand(entropy.shape),
        "entropy_ceiling": keys.double().log().to(entropy.dtype).expand(entropy.shape),
        "seen": seen,
    }
    if null is not None:
        rows["null_mass"] = null
    return weights, rows, finite


def _first_is_largest(scores_BHRS: Tensor) -> tuple[Tensor, Tensor]:
    """1 / (number of largest keys) where key 0 is one of them, else 0; and the row's largest."""
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


def _by_distance(weights_HRS: Tensor) -> Tensor:
    """Sums along the diagonals, [H, S + R − 1]: the first has the last row's first key."""
    _, rows, keys = weights_HRS.shape
    # Rows upside down and one number longer than the result: read as rows of its width, each is
    # shifted by one against the last.
    width = keys + rows - 1
    wide = F.pad(weights_HRS.flip(1), (0, rows)).flatten(1)[:, : rows * width]
    return wide.unflatten(1, (rows, width)).sum(1)


def _bands(totals: list[Tensor]) -> dict[str, Any]:
    """Shares by band of |distance|: 0, 1, 2 to 3, 4 to 7 …; and on which side."""
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
