"""The largest keys and values, by layer, at the sink and elsewhere: a cache in few bits must
hold them."""

from itertools import product
from typing import Any

from torch import Tensor

from clearhead.nn.attention import Attention
from clearhead.probe.attention_call import AttentionCall

METRICS = ("largest_key", "largest_value")
PARTS = ("first", "rest", "prefix")
EQUAL = 1 - 1e-5


class KeyValueSizes:
    """`largest_key` and `largest_value`: the largest |k| and |v| of all texts, and where it is.

    Of the first token, of the others, and of the learned keys of a prefix. Keys are as they are
    compared, with their positions, without the columns that ALiBi and FoX add.
    """

    def __init__(self) -> None:
        self._largest: dict[tuple[str, str, int], tuple[float, tuple[int, ...]]] = {}

    def observe(self, call: AttentionCall) -> None:
        own = call.module.layer.head_dim if isinstance(call.module, Attention) else None
        for i, (metric, x_BGSD) in enumerate(zip(METRICS, (call.k, call.v), strict=True)):
            if x_BGSD is None:
                continue
            prefix = None if call.prefix is None else call.prefix[i]
            parts = (x_BGSD[:, :, :1], x_BGSD[:, :, 1:], prefix)
            for part, first, x in zip(PARTS, (0, 1, 0), parts, strict=True):
                if x is not None and x.numel():
                    self._add((metric, part, call.layer), x if i else x[..., :own], first)

    def _add(self, key: tuple[str, str, int], x_BGSD: Tensor, first: int) -> None:
        """Of numbers that are equal to rounding the earliest token's counts, whatever the batch."""
        top_SGD = x_BGSD.abs().amax(0).transpose(0, 1)
        value = float(top_SGD.max())
        token, head, channel = (top_SGD >= EQUAL * value).nonzero()[:1].flatten().tolist() or (
            0,
        ) * 3
        place = (token + first, head, channel)
        largest, earlier = self._largest.get(key, (-1.0, place))
        if value * EQUAL > largest or (not value < EQUAL * largest and place < earlier):
            self._largest[key] = value, place

    def measures(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for metric, part in product(METRICS, PARTS):
            layers = {
                layer: (value, f"head {head}, channel {channel}, token {token}")
                for (name, tokens, layer), (value, place) in sorted(self._largest.items())
                for token, head, channel in (place,)
                if (name, tokens) == (metric, part)
            }
            if not layers:
                continue
            top = max(layers, key=lambda layer: layers[layer][0])
            line = {"metric": metric, "tokens": part}
            where = f"layer {top}, {layers[top][1]}"
            lines.append({**line, "value": layers[top][0], "where": where})
            lines += [
                {**line, "layer": layer, "value": value, "where": where}
                for layer, (value, where) in layers.items()
            ]
        return lines
