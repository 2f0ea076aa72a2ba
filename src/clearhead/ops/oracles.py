"""Reference attention in float64, straight from the formula, for "eager" and the self-tests.

An oracle has the signature of the operation that it checks, and shares no code with it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Visible keys of each query, bool [B or 1, 1, T, S]; queries are the last of the keys."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed & (torch.arange(keys, device=device)[None, :] <= position)
    if window is not None:
        distance = position - torch.arange(keys, device=device)[None, :]
        allowed = allowed & (distance.abs() < window)
    if key_mask is not None:
        allowed = allowed & key_mask.bool()[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, -queries:, None] == segments[:, None, None, :])
    return allowed


def weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    causal: bool = True,
    sink: float | Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    **masks: Any,
) -> Tensor:
    """Attention weights, float64 [B, H, T, S]: exp(s) / (exp(sink) + Σ exp(s)), no sink: softmax.

    Those on a prefix's keys come first, [B, H, T, N + S]. A row that sees no key is zero.
    """
    q, k = q_BHTD.double(), _beside(prefix, 0, k_BGSD)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = visible(q.shape[2], k_BGSD.shape[2], causal=causal, device=q.device, **masks)
    before = scores.shape[-1] - allowed.shape[-1]
    allowed = torch.nn.functional.pad(allowed, (before, 0), value=True)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is None:
        shift = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        numerator = torch.exp(scores - shift)
        total = numerator.sum(-1, keepdim=True)
        return numerator / total.clamp_min(torch.finfo(torch.float64).tiny)
    null = torch.as_tensor(sink, dtype=torch.float64, device=q.device)
    null = null[..., None] if null.ndim == 3 else null.reshape(1, -1, 1, 1)
    shift = torch.maximum(scores.detach().amax(-1, keepdim=True), null.detach())
    numerator = torch.exp(scores - shift)
    return numerator / (torch.exp(null - shift) + numerator.sum(-1, keepdim=True))


def softpick_weights(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    scale: float,
    sink: None = None,
    prefix: None = None,
    **masks: Any,
) -> Tensor:
    """relu(e^s − 1) / Σ |e^s − 1|, float64 [B, H, T, S] (arXiv 2504.20966); 0/0 is 0.

    Scores above 700 overflow.
    """
    k = k_BGSD.double().repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    scores = q_BHTD.double() @ k.mT * scale
    seen = visible(*scores.shape[2:], device=scores.device, **masks)
    term = scores.masked_fill(~seen, 0).exp() - 1
    total = term.abs().sum(-1, keepdim=True)
    return term.clamp_min(0) / total.masked_fill(total == 0, 1)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    by: Callable[..., Tensor] = weights,
    **options: object,
) -> Tensor:
    """Attention, float64 [B, H, T, V]; options as for `weights`, which `by` replaces."""
    v = _beside(options.get("prefix"), 1, v_BGSV)
    v = v.repeat_interleave(q_BHTD.shape[1] // v.shape[1], dim=1)
    return by(q_BHTD, k_BGSD, **options) @ v


def _beside(prefix: object, index: int, x_BGSN: Tensor) -> Tensor:
    """Keys (0) or values (1), float64, after a prefix's."""
    x = x_BGSN.double()
    return torch.cat([prefix[index].double(), x], 2) if isinstance(prefix, tuple) else x
