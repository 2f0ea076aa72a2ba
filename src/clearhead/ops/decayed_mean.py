"""Decayed mean over visible keys: the centring term C·x under ALiBi.

With content scores of 0, attention's weights are exp(−slope · distance) over their sum. A token's
sum is the last one's times a factor of at most 1, plus its own term: blocks are products with small
matrices, and one vector holds all that came before. No T × T matrix, and no exponential above 1 at
any length.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.ops.precision import without_autocast
from clearhead.ops.running_mean import picked, windowed_mean
from clearhead.ops.visibility import Span, Visibility

# Tokens in a block; blocks are summed up by blocks again.
BLOCK = 16
# Beyond all positions, which are below 2^31: what is a document apart weighs exp(−slope · 2^32), 0.
APART = 1 << 32


def decayed_mean(
    x_BHSD: Tensor,
    queries: int,
    positions_BS: Tensor,
    slopes_H: Tensor,
    visibility: Visibility = Visibility(),  # noqa: B008 (a frozen value)
) -> tuple[Tensor, Tensor]:
    """m_t = Σ w_ts x_s / Σ w_ts over the keys that query t sees, w_ts = exp(−slope · (p_t − p_s)).

    C of arXiv 2311.01906, eq. 5, with the scores of arXiv 2108.12409 at W_Q = 0.

    Args:
        x_BHSD: values, any float dtype. queries: T, the last of the S keys.
        positions_BS: int64 [B or 1, S]. slopes_H: above 0.
        visibility: causal.

    Returns:
        (mean, mass): [B, H, T, D] and Σ w_ts, [B or 1, H, T], both float32 (float64 for float64).
        A query that sees no key has mean 0 and mass 0.
    """
    exact = torch.promote_types(x_BHSD.dtype, torch.float32)
    x, place, slopes = x_BHSD.to(exact), positions_BS.long(), slopes_H.to(exact)[:, None]
    batch, _, keys, _ = x.shape
    _, window, mask, segments = visibility.settled(queries, keys)
    if window is not None:

        def fade(span: Span) -> Tensor:
            own = place[:, -queries:][:, span.start : span.stop, None]
            distance = own - place[:, None, span.first : span.end]
            return torch.exp(-_faded(distance, slopes[..., None]))

        return windowed_mean(x, queries, visibility, fade)
    back = None
    if segments is not None:
        order = segments.argsort(dim=1, stable=True)
        back = order.argsort(1)
        x = picked(x, order)
        place = place.expand(batch, -1).gather(1, order)
        mask = None if mask is None else mask.gather(1, order)
        segments = segments.gather(1, order)
    if mask is not None:
        x = torch.where(mask[:, None, :, None], x, 0)
    before = keys - queries if segments is None else 0
    # Autocast would round the sums to bfloat16.
    with without_autocast(x):
        sums, mass, exponent = _summed(x, _Keys.of(place, mask, segments), slopes, before)
    mean = sums / torch.where(mass == 0, 1, mass)
    mass = mass.squeeze(-1) * torch.exp(exponent)
    if back is not None:
        mean, mass = picked(mean, back), picked(mass[..., None], back).squeeze(-1)
    return mean[:, :, -queries:], mass[:, :, -queries:]


class _Keys(NamedTuple):
    """Keys in order, as a scan needs them: int64 [B or 1, S], and `seen` [B or 1, 1, S, 1].

    Attributes:
        at: positions, documents APART from each other.
        reach: the largest of a visible key so far: sums count distances from there, so that no
            weight is above 1 even where positions fall.
        own: `at` of visible keys, `reach` of hidden ones.
        seen: bool, which keys are visible.
    """

    at: Tensor
    reach: Tensor
    own: Tensor
    seen: Tensor

    @classmethod
    def of(cls, place: Tensor, mask: Tensor | None, segments: Tensor | None) -> "_Keys":
        at, floor = place, torch.full_like(place, -APART // 2)
        if segments is not None:
            edge = segments[:, 1:] != segments[:, :-1]
            rank = torch.nn.functional.pad(edge, (1, 0)).cumsum(1) * APART
            at, floor = at + rank, floor + rank
        seen = torch.ones_like(place, dtype=torch.bool) if mask is None else mask
        reach = torch.where(seen, at, floor).cummax(1).values
        return cls(at, reach, torch.where(seen, at, reach), seen[:, None, :, None])


def _summed(x: Tensor, keys: _Keys, slopes: Tensor, before: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the keys up to each one's own, for those that follow the first `before`.

    Sums [B, H, T, D] and mass [B or 1, H, T, 1], each to be multiplied by exp(exponent), the last,
    [B or 1, H, T].
    """
    at, reach, own, seen = keys
    count = seen.to(x.dtype).expand(-1, x.shape[1], -1, -1)
    if before:  # these are one, seen from the last of them
        last = reach[:, before - 1 : before]
        weight = torch.exp(-_faded(last[:, :, None] - own[:, None, :before], slopes[..., None]))
        x = torch.cat([weight @ x[:, :, :before], x[:, :, before:]], 2)
        count = torch.cat([weight @ count[:, :, :before], count[:, :, before:]], 2)
        own = torch.cat([last, own[:, before:]], 1)
        reach = reach[:, before - 1 :]
    sums, mass = (_scan(part, reach, own, slopes) for part in (x, count))
    if before:
        at, reach, sums, mass = at[:, before:], reach[:, 1:], sums[:, :, 1:], mass[:, :, 1:]
    return sums, mass, -_faded(at - reach, slopes)


def _scan(x_BHSD: Tensor, reach: Tensor, own: Tensor, slopes: Tensor) -> Tensor:
    """y_t = Σ_{s ≤ t} exp(−slope · (reach_t − own_s)) x_s; `reach` never falls."""
    length = x_BHSD.shape[2]
    if length <= BLOCK:
        return _triangle(reach, own, slopes[..., None]) @ x_BHSD
    if extra := -length % BLOCK:
        x_BHSD = torch.nn.functional.pad(x_BHSD, (0, 0, 0, extra))
        reach, own = (torch.cat([p, reach[:, -1:].expand(-1, extra)], 1) for p in (reach, own))
    reach, own = reach.unflatten(1, (-1, BLOCK)), own.unflatten(1, (-1, BLOCK))
    sums = _triangle(reach, own, slopes[..., None, None]) @ x_BHSD.unflatten(2, (-1, BLOCK))
    ends = reach[:, :-1, -1]
    before = _scan(sums[:, :, :-1, -1], ends, ends, slopes)
    factor = torch.exp(-_faded(reach[:, 1:] - ends[..., None], slopes[..., None]))
    later = sums[:, :, 1:] + factor[..., None] * before[:, :, :, None]
    return torch.cat([sums[:, :, :1], later], 2).flatten(2, 3)[:, :, :length]


def _triangle(reach: Tensor, own: Tensor, slopes: Tensor) -> Tensor:
    """The weights of a block's keys for its tokens, [B or 1, H, ..., tokens, keys]."""
    distance = (reach[..., :, None] - own[..., None, :]).clamp_min(0)  # above the diagonal no inf
    return torch.exp(-_faded(distance, slopes)).tril()


def _faded(distance: Tensor, slopes: Tensor) -> Tensor:
    """slope · distance: int64 [B, ...] → [B, H, ...]; slopes [H, 1, ...]."""
    return distance[:, None].to(slopes.dtype) * slopes
