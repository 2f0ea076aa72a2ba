"""Means over layers and by layer; the largest magnitudes and the median in constant memory."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

RANKS = (1, 2, 3, 10, 100)  # of the Differential Transformer's Table 5
KEPT = RANKS[-1]
_SHIFT = 14  # a bin is the first 18 bits of a float32: 2^-9 of the value wide


class Means:
    """Base class of statistics that `add` sums with counts, and return means by `measures`."""

    over_layers = True  # whether a mean over all layers means anything

    def __init__(self) -> None:
        # A line without value and layer → layer → float64 [2, ...]: the sums, and their counts.
        self._sums: dict[tuple[tuple[str, Any], ...], dict[int, Tensor]] = {}

    def add(self, layer: int, total: Tensor, count: Tensor | int, **line: Any) -> None:
        """Add a sum over `count` numbers, or a sum for each head, [H], with its count."""
        counts = torch.as_tensor(count, device=total.device).expand_as(total)
        both = torch.stack([total.double(), counts.double()])
        layers = self._sums.setdefault(tuple(line.items()), {})
        layers[layer] = layers[layer] + both if layer in layers else both

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records: over all layers, by layer, and by head where it is known;
        NaN where nothing was counted."""
        lines: list[dict[str, Any]] = []
        for key, by_layer in self._sums.items():
            line, layers = dict(key), sorted(by_layer.items())
            whole = torch.stack([sums.reshape(2, -1).sum(-1) for _, sums in layers])
            places: list[tuple[dict[str, int], Tensor]] = []
            if self.over_layers:
                places.append(({}, whole.sum(0)))
            places += [({"layer": n}, sums) for (n, _), sums in zip(layers, whole, strict=True)]
            places += [
                ({"layer": layer, "head": head}, one)
                for layer, sums in layers
                for head, one in enumerate(sums.T if sums.ndim == 2 else ())
            ]
            for place, sums in places:
                above, below = sums.tolist()
                lines.append({**line, **place, "value": above / below if below else math.nan})
        return lines


class Sizes:
    """The `KEPT` largest |x| of all rows added, and the median of all numbers counted."""

    def __init__(self, parts: "Iterable[Sizes]" = ()) -> None:
        self.values = torch.zeros(0)
        self.counts = torch.zeros(1 << (32 - _SHIFT - 1), dtype=torch.int64)
        for part in parts:
            values = torch.cat([self.values, part.values.float().cpu()])
            self.values = values.topk(min(KEPT, len(values))).values
            self.counts = self.counts + part.counts

    def add(self, rows: Tensor, bound: Tensor, visible: Tensor | None = None) -> None:
        """Add the visible numbers of rows [..., N]; bound [...] is at least each row's largest |x|,
        and a row is left out where it is not finite."""
        floor = self.values[-1] if len(self.values) == KEPT else -1.0
        candidates = (bound > floor) & bound.isfinite()
        if not bool(candidates.any()):
            return
        largest = rows[candidates].abs()
        if visible is not None:
            largest = largest.masked_fill(~visible.expand(rows.shape)[candidates], -1.0)
        largest = torch.cat([self.values.to(largest), largest.flatten()])
        largest = largest[largest >= 0]
        self.values = largest.topk(min(KEPT, len(largest))).values

    def count(self, x: Tensor) -> None:
        """Count the finite |x| for the median."""
        x = x.detach().abs().float().flatten()
        bins = x[x.isfinite()].view(torch.int32) >> _SHIFT
        self.counts += torch.bincount(bins, minlength=len(self.counts)).to(self.counts.device)

    def ranks(self) -> dict[int, float]:
        """{rank: value} for the `RANKS` that exist."""
        return {r: float(self.values[r - 1]) for r in RANKS if r <= len(self.values)}

    def median(self) -> float:
        """The middle of the bin that holds the median, to 0.2 %; NaN where nothing was counted."""
        total = self.counts.cumsum(0)
        if not int(total[-1]):
            return math.nan
        index = int(torch.searchsorted(total, (total[-1] + 1) // 2))
        if index == 0:
            return 0.0
        edges = (torch.tensor([index, index + 1], dtype=torch.int32) << _SHIFT).view(torch.float32)
        return float(edges.mean())

    def measures(self, name: str) -> list[dict[str, Any]]:
        """Payloads of "measure" records: NAME_top_1 and further ranks, and NAME_median."""
        tops = [{"metric": f"{name}_top_{r}", "value": x} for r, x in self.ranks().items()]
        return [*tops, {"metric": f"{name}_median", "value": self.median()}]
