"""Whole attention maps of one short text, for heat-maps."""

from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.observation import measure
from clearhead.probe.tiles import AttentionTile, ByTile

LONGEST_MAP = 64  # tokens: nobody can read a heat-map of more


def attention_maps(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Every attention map of one short text, int64 [T], T at most 64.

    Returns:
        Payloads of "attention" records, {"layer", "head", "map", "weights"}: T rows of T numbers
        rounded to 4 digits. The caller, who has the tokenizer, adds "text", a string a token.

    Raises:
        ClearheadError: another shape, a longer text, or as `clearhead.probe.observe`.
    """
    if ids.ndim != 1 or not 1 <= len(ids) <= LONGEST_MAP:
        raise ClearheadError(
            f"an attention map is of one text of 1 to {LONGEST_MAP} tokens; "
            f"found ids of shape {list(ids.shape)}"
        )
    return measure(model, [ids], batch_size=1, attention=[ByTile(weights=[_Maps(len(ids))])])


class _Maps:
    def __init__(self, length: int) -> None:
        self._length = length
        self._maps: dict[tuple[int, str], Tensor] = {}

    def observe(self, call: AttentionCall, tile: AttentionTile) -> None:
        start = call.before + tile.start
        for part in tile.maps:
            _, heads, rows, keys = part.weights.shape
            whole = self._maps.setdefault(
                (call.layer, part.name), torch.zeros(heads, self._length, self._length)
            )
            whole[:, start : start + rows, :keys] = part.weights[0]

    def measures(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "head": head, "map": name, "weights": weights.tolist()}
            for (layer, name), whole in self._maps.items()
            for head, weights in enumerate(whole.double().round(decimals=4))
        ]
