"""Attention by position on a text longer than those of the training.

After arXiv 2309.08646 (the figures its first version shows): one text of about four training
lengths; the layers at a quarter, a half and three quarters of the depth against the last.
"""

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.means import Means, by_layer_alone
from clearhead.models.inspection import decoder_layers, evaluating, opened, run_backbone
from clearhead.probe.attention_call import AttentionCall, Scores, normalised
from clearhead.probe.observation import observe
from clearhead.probe.tiles import TILE

LAST = 32  # queries, at the end of the training length and at the end of the text
NEAR = 64  # keys
BINS = 64  # of a curve over positions


class Extrapolation(Means):
    """Of one text, by layer and position; beyond `trained` the model has seen no position.

    - `near_weight_trained`, `near_weight_beyond`: the weight on the 64 nearest keys, mean over the
      last 32 queries within the training length, and of the text; `near_weight_chance`, what equal
      weights would give them within it.
    - curves `largest_logit_by_position`: the largest |logit| of a query, mean over heads, by the
      query's position; `logit_by_position`: the logit of each key, mean over heads and the last
      queries of the text. Mean over positions in bins.
    """

    def __init__(self, depth: int, trained: int, length: int) -> None:
        super().__init__()
        self._shown = shown_layers(depth)
        self._stops = {"beyond": length, "trained": trained}
        self._positions: dict[tuple[str, int], Tensor] = {}  # by curve and layer, [T]

    def observe(self, call: AttentionCall) -> None:
        """Add one layer of the text."""
        if call.layer not in self._shown:
            return
        peaks = torch.cat([_peaks(tile) for tile in call.scores(TILE)])
        self._positions["largest_logit_by_position", call.layer] = peaks.cpu()
        sums_2T = torch.zeros(2, self._stops["beyond"])  # Σ of the last queries, and their number
        for name, stop in self._stops.items():
            for tile in call.scores(TILE, first=max(0, stop - LAST)):
                rows, width = min(tile.scores.shape[2], stop - tile.start), tile.scores.shape[-1]
                if rows <= 0:
                    break
                scores, visible = tile.scores[:, :, :rows], tile.visible[:, :, :rows]
                place = torch.arange(max(width, tile.start + rows), device=scores.device)
                near = (place[tile.start :][:rows, None] - place[:width]).abs() < NEAR
                logits = scores.masked_fill(~visible, -torch.inf)
                weights, _ = normalised(logits, call.null_logit(tile.start, rows))
                share = (weights * near).sum(-1)
                self.add(call.layer, share.nansum(), share.numel(), metric=f"near_weight_{name}")
                if name == "beyond":
                    total = scores.masked_fill(~visible, 0.0).mean((0, 1)).sum(0)
                    sums_2T[0, :width] += total.float().cpu()
                    sums_2T[1, :width] += visible.expand(scores.shape)[0, 0].sum(0).cpu()
        total_T, count_T = sums_2T
        self._positions["logit_by_position", call.layer] = total_T / count_T.clamp_min(1)

    def measures(self) -> list[dict[str, Any]]:
        length, trained = self._stops.values()
        return [
            *({**line, "length": length} for line in by_layer_alone(super().measures())),
            {"metric": "near_weight_chance", "value": min(1.0, NEAR / trained)},
            {"metric": "trained_length", "value": trained},
        ]

    def curves(self) -> list[dict[str, Any]]:
        """Payloads of "curve" records."""
        return [
            {"curve": name, "layer": layer, **_binned(values)}
            for (name, layer), values in sorted(self._positions.items())
        ]


def extrapolate(model: Any, ids_T: Tensor, trained: int) -> Extrapolation:
    """Run one text, int64 [T] with T above `trained`, and observe its attention.

    Raises:
        ClearheadError: as `clearhead.probe.observe`.
    """
    statistics = Extrapolation(len(decoder_layers(model)), trained, len(ids_T))
    with evaluating(model), observe(model, attention=[statistics]):
        run_backbone(model, opened(model, ids_T[None]).to(model.device))
    return statistics


def shown_layers(depth: int) -> list[int]:
    """A quarter, a half and three quarters down, and the last: 5, 11, 17, 23 of 24."""
    return sorted({max(0, math.ceil(depth * part) - 1) for part in (0.25, 0.5, 0.75, 1.0)})


def _peaks(tile: Scores) -> Tensor:
    """The largest |logit| of each query, mean over heads, [R]."""
    return tile.scores.abs().masked_fill(~tile.visible, 0.0).amax(-1).mean((0, 1))


def _binned(values: Tensor) -> dict[str, Any]:
    width = max(1, math.ceil(len(values) / BINS))
    parts = values.split(width)
    middles = [index * width + (len(part) - 1) / 2 for index, part in enumerate(parts)]
    return {"x": middles, "y": [float(part.mean()) for part in parts]}
