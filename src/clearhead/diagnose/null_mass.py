"""Weight on no key by the query's position, of null keys and of gates.

A null key of fixed logit stands against more keys with every position; a learned one or a gate may
answer to the query.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.quotients import quotients
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.tiles import AttentionTile

BANDS = 64


class _ByPosition:
    """Means by map and layer of queries in bands of position: 0, 1, 2 to 3, 4 to 7 …

    A band's `position` is its first.
    """

    metric: str

    def __init__(self) -> None:
        # map → layer → float64 [2, bands]: the sum over queries, and their number.
        self._sums: dict[str, dict[int, Tensor]] = {}

    def _add(self, name: str, layer: int, start: int, value_BHR: Tensor, counted: Tensor) -> None:
        position_R = torch.arange(start, start + value_BHR.shape[-1], dtype=torch.float64)
        band_R = torch.frexp(position_R).exponent.long().to(value_BHR.device)
        both = torch.stack([torch.where(counted, value_BHR, 0.0), counted.to(value_BHR.dtype)])
        of_rows = both.sum((1, 2), dtype=torch.float64)
        sums = of_rows.new_zeros(2, BANDS).index_add_(1, band_R, of_rows)
        layers = self._sums.setdefault(name, {})
        layers[layer] = layers[layer] + sums if layer in layers else sums

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: by band, over all layers and by layer."""
        return [
            line
            for name, layers in self._sums.items()
            for band in range(BANDS)
            if any(bool(sums[1, band]) for sums in layers.values())
            for line in quotients(
                {layer: sums[:, band] for layer, sums in layers.items()},
                metric=self.metric,
                map=name,
                position=1 << band >> 1,
            )
        ]


class NullMass(_ByPosition):
    """`null_mass` of the maps that have a null key without a value, by position."""

    metric = "null_mass"

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        for part in tile.maps:
            if part.null is not None and call.null_metric == self.metric:
                start = call.before + tile.start
                self._add(part.name, call.layer, start, part.null, part.counted)


class ClosedGates(_ByPosition):
    """`gate_closed`, one minus the mean over channels of a gate on the heads' outputs, by
    position."""

    metric = "gate_closed"

    def observe(self, layer: int, gate_BTC: Tensor) -> None:
        closed_BHT = 1 - gate_BTC.mean(-1)[:, None]
        self._add("gate", layer, 0, closed_BHT, torch.ones_like(closed_BHT, dtype=torch.bool))
