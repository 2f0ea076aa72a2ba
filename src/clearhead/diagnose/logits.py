"""Statistics of attention logits: their size, and the order of near and far keys.

A logit is scaled and capped, as it enters the softmax; keys that a query does not see have none.
Each statistic is fed by `clearhead.probe.ByTile`.
"""

from collections import defaultdict
from typing import Any

import torch

from clearhead.diagnose.means import Means
from clearhead.diagnose.sizes import Sizes
from clearhead.probe.attention_call import AttentionCall, Scores

NEAR, FAR = 4, 12  # keys: the nearest, and those just beyond, by which order is judged
MEDIAN_EVERY = 16  # queries: the median of the logits is over one query in so many


class LogitSizes:
    """The largest |logit| of all maps (ranks over all layers, and the first by layer), and their
    median, over one query in 16."""

    def __init__(self) -> None:
        self._layers: dict[int, Sizes] = defaultdict(Sizes)

    def observe(self, call: AttentionCall, scores: Scores) -> None:
        start, score, visible, clear = scores
        # Masks added to the scores of hidden keys are no logits, and would be the largest of all.
        shown = score if clear else score.masked_fill(~visible, 0.0)
        bound = torch.maximum(shown.amax(-1), -shown.amin(-1))
        sizes = self._layers[call.layer]
        sizes.add(score, bound, visible)
        before = call.k.shape[2] - call.q.shape[2] + start
        few = score[:, :, -before % MEDIAN_EVERY :: MEDIAN_EVERY]
        if few.numel():
            seen = visible[:, :, -before % MEDIAN_EVERY :: MEDIAN_EVERY].expand(few.shape)
            sizes.count(few[seen])

    def measures(self) -> list[dict[str, Any]]:
        if not self._layers:
            return []
        return Sizes(self._layers.values()).measures("logit") + [
            {"metric": "logit_top_1", "layer": layer, "value": sizes.ranks().get(1)}
            for layer, sizes in sorted(self._layers.items())
        ]


class NearestKeys(Means):
    """`order_broken_before` and, in bidirectional models, `order_broken_after`, by layer.

    The share of (query, head) pairs whose 4 nearest keys have a lower mean logit than the next 12,
    where 16 keys are visible on that side. Without any preference for near or far it is a half.
    Nothing of a side that a mask hides.
    """

    def observe(self, call: AttentionCall, scores: Scores) -> None:
        start, score, visible, _ = scores
        rows, keys = score.shape[2:]
        before = call.k.shape[2] - call.q.shape[2] + start
        row = torch.arange(before, before + rows, device=score.device)[:, None]
        offsets = torch.arange(NEAR + FAR, device=score.device)
        sides = {"before": row - offsets} | ({} if call.causal else {"after": row + offsets})
        for side, column in sides.items():
            inside = ((column >= 0) & (column < keys)).all(-1)
            column = column[inside]
            nearest = score[:, :, inside].gather(-1, column.expand(*score.shape[:2], -1, -1))
            seen = visible[:, :, inside].gather(-1, column.expand(*visible.shape[:2], -1, -1))
            near, far = nearest[..., :NEAR].mean(-1), nearest[..., NEAR:].mean(-1)
            counted = seen.all(-1) & near.isfinite() & far.isfinite()
            if bool(counted.any()):
                broken = ((near < far) & counted).sum()
                self.add(call.layer, broken, counted.sum(), metric=f"order_broken_{side}")
