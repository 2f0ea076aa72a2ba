"""The size of attention logits.

A logit is scaled and capped, as it enters the softmax; keys that a query does not see have none.
"""

from collections import defaultdict
from typing import Any

import torch

from clearhead.diagnose.sizes import Sizes
from clearhead.probe.attention_call import AttentionCall, Scores

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
