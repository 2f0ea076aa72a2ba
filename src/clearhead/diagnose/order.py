"""The order anomaly of rotary positions (arXiv 2309.08646, section 2.2).

A pair of channels j contributes |q_j||k_j| cos(Θ_j + s θ_j) to the score of a key s positions
before the query; Θ_j is the initial angle from k_j to q_j. With Θ_j above π the cosine *grows* over
the first (2π − Θ_j)/θ_j tokens, so that nearer keys score lower: the anomalous zone of earlier
keys. For keys after the query (bidirectional models) it is Θ_j below π.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.diagnose.means import Means
from clearhead.errors import ClearheadError
from clearhead.models.planning import counterpart
from clearhead.nn import REGISTRY
from clearhead.nn.attention import Attention
from clearhead.probe.attention_call import AttentionCall, shown

PAIRS = 64  # (query, key) pairs sampled for each text and layer, by fixed seeds
NEAR, FAR = 4, 12  # keys: the nearest, and those just beyond, by which order is judged
# Angles this close to 0 are rounding: collinear attention starts there exactly.
_ROUNDING = 1e-3


class RotaryOrder(Means):
    """By layer, over sampled (query, key) pairs: `anomalous_before` and `anomalous_after`, the
    share of (pair, head, rotary pair) whose initial angle lies in the anomalous zone of that side,
    also weighted by the amplitude |q_j||k_j|; `order_broken_content`, the share of (query, key,
    head) whose score, with the content fixed, is lower on average at distances 0 to 3 than 4 to 15.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.rotary: dict[tuple[int, int], Tensor | str] = {}  # by layer and number of keys

    def observe(self, call: AttentionCall) -> None:
        keys = call.k.shape[2]
        if (call.layer, keys) not in self.rotary:
            rotary = rotary_of(self.model, call.module, call.layer, keys)
            self.rotary[call.layer, keys] = rotary
        rotary = self.rotary[call.layer, keys]
        if isinstance(rotary, Tensor):
            both = not call.causal and not getattr(call.module, "is_causal", False)
            sides = ("before", "after")[: 1 + both]
            self._add(call.layer, self._products(call, rotary), rotary, call.q.dtype, sides)

    def _products(self, call: AttentionCall, rotary: Tensor) -> Tensor:
        """h = q k* of sampled pairs with the rotation undone, [B, H, PAIRS, rotary pairs]."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        generator = torch.Generator().manual_seed(call.layer)
        m = keys - queries + torch.randint(queries, (PAIRS,), generator=generator)
        m, one = m.to(call.q.device), torch.rand(PAIRS, generator=generator).to(call.q.device)
        # A key that the query sees, whatever the direction.
        place, window = torch.arange(keys, device=m.device), call.visibility.window or keys
        seen = (place <= m[:, None]) & (place > m[:, None] - window)
        if call.mask is not None:
            seen &= shown(call.mask[0, 0, m - (keys - queries)])
        nth = (seen.sum(-1) * one).long()
        n = (seen.cumsum(-1) > nth[:, None]).int().argmax(-1)

        def paired(x: Tensor) -> Tensor:  # channels j and j + pairs as one complex number
            x = x[..., : 2 * len(rotary)].to(torch.promote_types(x.dtype, torch.float32))
            return torch.complex(*x.chunk(2, -1))

        k = call.k[:, :, n].repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        h = paired(call.q[:, :, m - (keys - queries)]) * paired(k).conj()
        angle = (m - n)[:, None] * rotary
        return h * torch.polar(torch.ones_like(angle), -angle).to(h.dtype)

    def _add(
        self, layer: int, h: Tensor, rotary: Tensor, dtype: torch.dtype, sides: Sequence[str]
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
        near, far = scores(h, rotary, torch.arange(NEAR + FAR)).split([NEAR, FAR], -1)
        near, far = near.mean(-1), far.mean(-1)
        # Equal within rounding is not broken: a pair without content has the same score everywhere.
        broken = (far - near > _ROUNDING * size.sum(-1)).sum()
        self.add(layer, broken, len(h), metric="order_broken_content")

    def why_not(self) -> str | None:
        """The reason why no layer's rotary positions are known; None if those of any layer are."""
        reasons = [reason for reason in self.rotary.values() if isinstance(reason, str)]
        return reasons[0] if reasons and len(reasons) == len(self.rotary) else None


def scores(h: Tensor, rotary: Tensor, distances: Tensor) -> Tensor:
    """Σ_j Re(h_j e^(isθ_j)), [N, distances]."""
    angle = rotary[:, None] * distances.to(rotary)
    cos, sin = (wave.to(h.real.dtype) for wave in (angle.cos(), angle.sin()))
    return h.real @ cos - h.imag @ sin


def rotary_of(model: Any, module: nn.Module, layer: int, keys: int) -> Tensor | str:
    """Frequencies θ of a layer on a text of `keys` tokens, float64 [rotary pairs], or the reason
    why they are unknown: `clearhead convert` reads the model in another layout, or not at all."""
    if isinstance(module, Attention):
        spec = module.layer
    else:
        unknown = f"the order of a {type(model).__name__} is not measured"
        try:
            spec = counterpart(model.config).layer(layer)
        except ClearheadError:
            return f"{unknown}: `clearhead convert` does not read it"
        if spec.rope_parameters["rope_type"] == "proportional":  # converted in another layout
            return f"{unknown}: diagnose the folder that `clearhead convert` makes of it"
    if spec.position != "rope":
        return f"the order of position={spec.position!r} is not measured"
    if spec.scores == "coca-slack":
        return "coca-slack scores are no function of the distance"
    places = torch.arange(keys, device=next(module.parameters()).device)[None]
    position: Any = REGISTRY.find("position", "rope").build(spec, 1)
    frequency: Tensor = position.tables(places[:, -1:], places).keys.frequency
    return frequency.flatten().double()
