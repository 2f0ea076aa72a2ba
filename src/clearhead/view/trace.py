"""Trace of a model reading one text: attention maps, and hidden states by token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.tiles import AttentionTile, MapTile


class Head(NamedTuple):
    """One head of one layer, both from 0."""

    layer: int
    head: int


class AttentionTrace:
    """Statistics and the whole maps of every head.

    By layer, map and head, as means over the queries:

    - `first_token_share`: 1/k where the first token is one of the query's k largest weights,
      otherwise 0 (`first_token_argmax_share` of a diagnosis).
    - `null_mass`, or `prefix_mass` of learned keys that have values: the weight beside the text's
      own keys; only where there is a sink or a prefix.
    - `entropy`: of the weights and the null key's, in nats; only of maps without negative weights.
    - `negative_share`: the part of Σ|weight| that is negative; only of signed maps.

    Args:
        length: of the text, in tokens.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.causal = True
        self.maps: dict[tuple[Head, str], Tensor] = {}  # [T, T]
        self.nulls: dict[tuple[Head, str], Tensor] = {}  # [T]
        self.lambdas: dict[int, Tensor] = {}  # a scalar or [heads, T]
        self.names: dict[int, tuple[str, ...]] = {}
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = {}  # [2, heads]

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        """Add a tile of one layer's attention to the text, the first of the batch."""
        start, queries = call.before + tile.start, tile.visible.shape[2]
        rows = slice(start, start + queries)
        self.causal &= not bool(tile.visible[0].triu(rows.start + 1).any())
        self.names[call.layer] = tuple(part.name for part in tile.maps)
        for part in tile.maps:
            self._add(call, part)
            self._keep(call.layer, part, rows)
        if tile.lambdas is not None:
            own = tile.lambdas.detach().float().cpu()
            self.lambdas[call.layer] = own[0, :, :, 0] if own.ndim > 2 else own.flatten()[0]

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: each statistic of each head that has it."""
        return [
            {"metric": metric, "map": name, "layer": layer, "head": head, "value": value}
            for (layer, name), sums in sorted(self._sums.items())
            for metric, (total, weight) in sums.items()
            for head, value in enumerate((total / weight.clamp_min(1e-30)).tolist())
        ]

    def _add(self, call: AttentionCall, part: MapTile) -> None:
        weights, counted, first_is_largest, entropy, null = (
            None if value is None else value[0] for value in part[1:]
        )
        assert weights is not None
        assert counted is not None
        rows = {"first_token_share": first_is_largest, call.null_metric: null, "entropy": entropy}
        count = counted.sum(-1)
        new = {
            metric: torch.stack([torch.where(counted, value, 0).sum(-1), count])
            for metric, value in rows.items()
            if value is not None
        }
        if entropy is None:
            negative = weights.clamp(max=0.0).sum((-1, -2)).neg()
            new["negative_share"] = torch.stack([negative, weights.abs().sum((-1, -2))])
        sums = self._sums.setdefault((call.layer, part.name), {})
        for metric, value in new.items():
            value = value.double().cpu()
            sums[metric] = sums[metric] + value if metric in sums else value

    def _keep(self, layer: int, part: MapTile, rows: slice) -> None:
        heads, _, keys = part.weights[0].shape
        for index in range(heads):
            place = (Head(layer, index), part.name)
            if place not in self.maps:
                self.maps[place] = torch.zeros(self.length, self.length)
            self.maps[place][rows, :keys] = part.weights[0, index].nan_to_num(0.0, 0.0, 0.0).cpu()
            if part.null is not None:
                null_T = self.nulls.setdefault(place, torch.zeros(self.length))
                null_T[rows] = part.null[0, index].nan_to_num(0.0, 0.0, 0.0).cpu()


class HiddenTrace:
    """Hidden states before the first layer and after each, token by token.

    Attributes:
        norms: layer → ‖x‖ of each token, [T].
        largest: layer → the largest |x| of each token ÷ the median |x| of the layer, [T].
        channels: layer → where the largest |x| is, [T].
        read: called with (layer, x [T, C]).
    """

    def __init__(self, read: Any = None) -> None:
        self.norms: dict[int, Tensor] = {}
        self.largest: dict[int, Tensor] = {}
        self.channels: dict[int, Tensor] = {}
        self.read = read

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add one layer's hidden states of the text, the first of the batch."""
        x = x_BTC[0].float()
        magnitude = x.abs()
        peak, channel = magnitude.max(-1)
        self.norms[layer] = torch.linalg.vector_norm(x, dim=-1).cpu()
        self.largest[layer] = (peak / magnitude.median().clamp_min(1e-30)).cpu()
        self.channels[layer] = channel.cpu()
        if self.read is not None:
            self.read(layer, x_BTC[0])

    def lost(self) -> str:
        """Description of the first number that is not finite; "" if all are."""
        bad = [layer for layer in self.layers() if not self.norms[layer].isfinite().all()]
        names = [
            f"after layer {layer}" if layer >= 0 else "before the first layer" for layer in bad
        ]
        return names[0] if names else ""

    def layers(self) -> list[int]:
        """The layers seen, in order."""
        return sorted(self.norms)

    def measures(self) -> list[dict[str, Any]]:
        """Return nothing: the trace is by token, without means."""
        return []
