"""Measures over all layers and by layer."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def quotient(sums_2: Tensor) -> float:
    """The first sum over the second; NaN where the second is 0."""
    above, below = sums_2.tolist()
    return above / below if below else math.nan


def quotients(sums_by_layer: Mapping[int, Tensor], **line: Any) -> list[dict[str, Any]]:
    """Payloads of "measure" records like `line`: of all layers together, and by layer."""
    if not sums_by_layer:
        return []
    whole = torch.stack(list(sums_by_layer.values())).sum(0)
    return [
        {**line, "value": quotient(whole)},
        *(
            {**line, "layer": layer, "value": quotient(sums)}
            for layer, sums in sorted(sums_by_layer.items())
        ),
    ]


def over_layers(
    values: Mapping[int, float], pool: Callable[[Tensor], Tensor] = torch.nanmean, **line: Any
) -> list[dict[str, Any]]:
    """Payloads of "measure" records like `line`: the values pooled, and each by itself."""
    if not values:
        return []
    whole = pool(torch.tensor(list(values.values()), dtype=torch.float64))
    by_layer = [{**line, "layer": layer, "value": value} for layer, value in values.items()]
    return [{**line, "value": float(whole)}, *by_layer]
