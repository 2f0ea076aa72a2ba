"""Means over layers and by layer, from sums and counts."""

import math
from typing import Any

import torch
from torch import Tensor


def quotient(sums_2: Tensor) -> float:
    """The first sum over the second; NaN where the second is 0."""
    above, below = sums_2.tolist()
    return above / below if below else math.nan


class Means:
    """Base of statistics: they `add` sums and counts, and `measures` returns the means."""

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
        """Payloads of "measure" records: over all layers, by layer, and by head where there are
        sums by head."""
        lines: list[dict[str, Any]] = []
        for key, by_layer in self._sums.items():
            line, layers = dict(key), sorted(by_layer.items())
            whole = torch.stack([sums.reshape(2, -1).sum(-1) for _, sums in layers])
            if self.over_layers:
                lines.append({**line, "value": quotient(whole.sum(0))})
            lines += [
                {**line, "layer": layer, "value": quotient(sums)}
                for (layer, _), sums in zip(layers, whole, strict=True)
            ]
            lines += [
                {**line, "layer": layer, "head": head, "value": quotient(one)}
                for layer, sums in layers
                for head, one in enumerate(sums.T if sums.ndim == 2 else ())
            ]
        return lines
