"""The order anomaly of rotary positions (arXiv 2309.08646, section 2.2).

A pair of channels j contributes |q_j||k_j| cos(Θ_j + s θ_j) to the score of a key s positions
before the query; Θ_j, from k_j to q_j, is where it starts. With Θ_j above π the cosine *grows* over
the first (2π − Θ_j)/θ_j tokens, so that nearer keys score lower: the anomalous zone of what comes
before. Of keys after the query (bidirectional models) it is Θ_j below π.

Queries and keys are a sample of `PAIRS` pairs a text and layer, by fixed seeds, without their
rotation.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.diagnose.means import Means
from clearhead.diagnose.rotary import Rotary, rotary_of
from clearhead.probe.attention_call import AttentionCall, shown

PAIRS = 64
NEAR, FAR = 4, 12  # keys: the nearest, and those just beyond, by which order is judged
# Angles this close to 0 are rounding: collinear attention starts there exactly.
_ROUNDING = 1e-3


class RotaryOrder(Means):
    """Sums over sampled (query, key) pairs, by layer.

    - `anomalous_before`, `anomalous_after`: the share of (pair, head, rotary pair) whose initial
      angle lies in the anomalous zone of that side; a rotary pair without amplitude is not counted.
    - `anomalous_weight_before`, …: the same, each by its amplitude |q_j||k_j|.
    - `order_broken_content`: the share of (query, key, head) whose score, the content held and
      only the distance changed, is lower on average at distances 0 to 3 than at 4 to 15.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.rotary: dict[tuple[int, int], Rotary | str] = {}  # by layer and number of keys

    def observe(self, call: AttentionCall) -> None:
        place = call.layer, call.k.shape[2]
        if place not in self.rotary:
            self.rotary[place] = rotary_of(
                self.model, call.module, call.layer, call.q.shape[-1], call.k.shape[2]
            )
        rotary = self.rotary[place]
        if isinstance(rotary, str):
            return
        both = not call.causal and not getattr(call.module, "is_causal", False)
        h = self._products(call, rotary)
        self._add(call.layer, h, rotary, call.q.dtype, ("before", "after")[: 1 + both])

    def _products(self, call: AttentionCall, rotary: Rotary) -> Tensor:
        """h = q k* of sampled pairs with the rotation undone, [B, H, PAIRS, rotary pairs]."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        generator = torch.Generator().manual_seed(call.layer)
        last = keys - queries + torch.randint(queries, (PAIRS,), generator=generator)
        one = torch.rand(PAIRS, generator=generator)
        device = call.q.device
        m, one = last.to(device), one.to(device)
        # A key that the query sees, whatever the direction.
        if call.mask is None:
            first = (m + 1 - (call.visibility.window or keys)).clamp_min(0)
            n = first + ((m + 1 - first) * one).long()
        else:
            before = torch.arange(keys, device=device) <= m[:, None]
            seen = shown(call.mask[0, 0, m - (keys - queries)]) & before
            nth = (seen.sum(-1) * one).long()
            n = (seen.cumsum(-1) > nth[:, None]).int().argmax(-1)
        k = call.k[:, :, n].repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        h = rotary.pairs(call.q[:, :, m - (keys - queries)]) * rotary.pairs(k).conj()
        angle = (m - n)[:, None] * rotary.frequency
        return h * torch.polar(torch.ones_like(angle), -angle).to(h.dtype)

    def _add(
        self,
        layer: int,
        h: Tensor,
        rotary: Rotary,
        dtype: torch.dtype,
        sides: tuple[str, ...] = ("before",),
    ) -> None:
        h = h[h.abs().isfinite().all(-1)]  # [N, rotary pairs]
        size = h.abs()
        beyond = size * max(_ROUNDING, 4 * torch.finfo(dtype).eps)
        zones = {"before": h.imag < -beyond, "after": h.imag > beyond}
        for side in sides:
            zone, whole = zones[side], size.sum(dtype=torch.float64)
            self.add(layer, zone.sum(), (size > 0).sum(), metric=f"anomalous_{side}")
            weight = (size * zone).sum(dtype=torch.float64)
            self.add(layer, weight, whole, metric=f"anomalous_weight_{side}")
        near, far = (
            scores(h, rotary, torch.arange(low, high)).mean(-1)
            for low, high in ((0, NEAR), (NEAR, NEAR + FAR))
        )
        # Equal within rounding is not broken: a pair without content has the same score everywhere.
        broken = (far - near > _ROUNDING * size.sum(-1)).sum()
        self.add(layer, broken, len(h), metric="order_broken_content")

    def why_not(self) -> str | None:
        """The reason why no layer's rotary positions are known; None where one's are."""
        reasons = [reason for reason in self.rotary.values() if isinstance(reason, str)]
        return reasons[0] if reasons and len(reasons) == len(self.rotary) else None


def scores(h: Tensor, rotary: Rotary, distances: Tensor) -> Tensor:
    """Σ_j Re(h_j e^(isθ_j)), [N, distances]."""
    angle = rotary.frequency[:, None] * distances.to(rotary.frequency)
    cos, sin = (wave.to(h.real.dtype) for wave in (angle.cos(), angle.sin()))
    return h.real @ cos - h.imag @ sin
