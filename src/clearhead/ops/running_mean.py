"""Shaped attention and its centring term C·x: means over visible keys, by no T × T matrix."""

from itertools import accumulate

import torch
from torch import Tensor

from clearhead.ops.precision import is_exporting, without_autocast
from clearhead.ops.visibility import Visibility

# Tokens in a block that is one product.
BLOCK = 16
# Ways of summing, and the tokens of a block: a scan of the whole; scans of blocks, which TF32 does
# not round; products with a triangle of ones; an addition a token, which compiled is one pass.
WAYS = {"scan": 0, "blocks": 32, "products": BLOCK, "unrolled": BLOCK}
# Tokens of the longest text that a GPU's compiled kernel sums as it lies.
SCANNED = 512
# Queries of a tile under a window.
ROWS = 128


def shaped(
    x_BTHD: Tensor,
    o_BTHD: Tensor,
    centre_BTHD: Tensor | None,
    alpha_H: Tensor,
    beta_H: Tensor,
    gamma_H: Tensor | None,
) -> Tensor:
    """α_h x + β_h o − γ_h C x (arXiv 2311.01906, eq. 5), [B, T, H, D] in the dtype of x.

    Args:
        x_BTHD: each token's own values.
        o_BTHD: attention's output.
        centre_BTHD: C x, attention's output at W_Q = 0; None, with gamma_H, leaves it out.
    """
    # One operation a term, whose number bounds an uncompiled step of decoding.
    out = torch.addcmul(x_BTHD * alpha_H[:, None].to(x_BTHD.dtype), o_BTHD, beta_H[:, None])
    if centre_BTHD is not None and gamma_H is not None:
        out = torch.addcmul(out, centre_BTHD, gamma_H[:, None], value=-1)
    return out.to(x_BTHD.dtype)


def running_mean(
    x_BHSD: Tensor,
    queries: int,
    visibility: Visibility = Visibility(),  # noqa: B008 (a frozen value)
) -> tuple[Tensor, Tensor]:
    """m_t = Σ x_s / n_t over the n_t keys that query t sees (arXiv 2311.01906, C of eq. 5).

    The T queries are the last of the S keys.

    Returns:
        (mean, count): [B, H, T, D] and [B or 1, T], both float32 (float64 for float64). A query
        that sees no key has mean 0, count 0.
    """
    keys = x_BHSD.shape[2]
    causal, window, key_mask, segments = visibility.settled(queries, keys)
    if window is not None:
        return _windowed(x_BHSD, queries, visibility)
    if segments is not None:
        return _by_segment(x_BHSD, queries, visibility.causal, key_mask, segments)
    exact = torch.promote_types(x_BHSD.dtype, torch.float32)
    if key_mask is None and not causal:
        # Uncompiled, a step of decoding is bound by the number of operations.
        count_BT = torch.full((1, queries), keys, dtype=exact, device=x_BHSD.device)
        mean = x_BHSD.mean(2, dtype=exact, keepdim=True)
        return mean if queries == 1 else mean.expand(-1, -1, queries, -1), count_BT
    if key_mask is not None:
        x_BHSD = torch.where(key_mask[:, None, :, None], x_BHSD, 0)
    before = keys - queries if causal else keys
    sums = x_BHSD[:, :, :before].sum(2, dtype=exact, keepdim=True) if before else 0
    if causal:
        sums = sums + running_sum(x_BHSD[:, :, before:].to(exact))
    assert isinstance(sums, Tensor)
    if key_mask is None:
        count_BT = torch.arange(before + 1, keys + 1, dtype=exact, device=x_BHSD.device)[None]
    elif causal:
        count_BT = key_mask.cumsum(1)[:, before:].to(exact)
    else:
        count_BT = key_mask.sum(1, keepdim=True).to(exact)
    mean = sums / count_BT.clamp_min(1)[:, None, :, None]
    shape = (*mean.shape[:2], queries, mean.shape[3])
    return mean.expand(shape), count_BT.expand(count_BT.shape[0], queries)


def running_sum(x_BHTD: Tensor, way: str | None = None) -> Tensor:
    """Σ_{s ≤ t} x_s over the last dimension but one, in the dtype of x, by one of `WAYS`."""
    way = way or fastest(x_BHTD)
    if way == "scan":
        return x_BHTD.cumsum(2)
    length, block = x_BHTD.shape[2], WAYS[way]
    if length % block:
        x_BHTD = torch.nn.functional.pad(x_BHTD, (0, 0, 0, -length % block))
    x_BHNKD = x_BHTD.unflatten(2, (-1, block))
    if way == "blocks":
        sums = x_BHNKD.cumsum(3)
    elif way == "unrolled":
        sums = torch.stack(list(accumulate(x_BHNKD.unbind(3), torch.add)), 3)
    else:
        triangle = torch.ones(block, block, dtype=x_BHTD.dtype, device=x_BHTD.device).tril()
        with without_autocast(x_BHTD):  # which would round the sums to bfloat16
            sums = torch.matmul(triangle, x_BHNKD)
    totals = sums[:, :, :, -1]
    sums = sums + (totals.cumsum(2) - totals)[:, :, :, None]
    return sums.flatten(2, 3)[:, :, :length]


def fastest(x_BHTD: Tensor) -> str:
    """The way of summing: a CPU's cumsum takes three times as long as products.

    A compiled scan is one kernel with what is before and after it; longer ones are split between
    programs, which torch 2.11 fails to compile together with a norm.
    """
    if is_exporting() or x_BHTD.shape[2] <= BLOCK:
        return "scan"
    compiled = torch.compiler.is_compiling()
    if x_BHTD.device.type == "cpu":
        return "unrolled" if compiled else "products"
    return "scan" if compiled and x_BHTD.shape[2] <= SCANNED else "blocks"


def _windowed(x_BHSD: Tensor, queries: int, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """`running_mean` under a window; time and memory as T · window."""
    x = x_BHSD.to(torch.promote_types(x_BHSD.dtype, torch.float32))
    if visibility.key_mask is not None:
        x = torch.where(visibility.key_mask[:, None, :, None], x, 0)
    keys = x.shape[2]
    means, counts = [], []
    with without_autocast(x):  # which would round the sums to bfloat16
        for span in visibility.spans(queries, keys, ROWS):
            hidden = visibility.hidden(span, queries, keys, x.device)
            assert hidden is not None
            seen = (~hidden).to(x.dtype)
            count = seen.sum(-1, keepdim=True)
            means.append(seen @ x[:, :, span.first : span.end] / count.clamp_min(1))
            counts.append(count[:, 0, :, 0])
    return torch.cat(means, 2), torch.cat(counts, 1)


def _by_segment(
    x_BHSD: Tensor, queries: int, causal: bool, key_mask: Tensor | None, segments_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """A running sum over keys sorted by segment, minus the sum before the own segment."""
    exact = torch.promote_types(x_BHSD.dtype, torch.float32)
    order = segments_BS.argsort(dim=1, stable=True)
    mask = torch.ones_like(segments_BS, dtype=torch.bool) if key_mask is None else key_mask
    x = torch.where(mask[:, None, :, None], x_BHSD.to(exact), 0)
    # The count of keys is a channel like the others.
    count = mask.to(exact)[:, None, :, None].expand(*x.shape[:3], 1)
    x = _picked(torch.cat([x, count], -1), order)
    segment = segments_BS.gather(1, order)
    sums = running_sum(x)
    at = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    edge = segment[:, 1:] != segment[:, :-1]
    first = torch.nn.functional.pad(edge, (1, 0), value=True)
    start = torch.where(first, at, 0).cummax(1).values
    base = _picked(sums - x, start)
    if not causal:
        last = torch.nn.functional.pad(edge, (0, 1), value=True)
        end = torch.where(last, at, at.shape[1]).flip(1).cummin(1).values.flip(1)
        sums = _picked(sums, end)
    sums = _picked(sums - base, order.argsort(1))[:, :, -queries:]
    count_BHT1 = sums[..., -1:]
    return sums[..., :-1] / count_BHT1.clamp_min(1), count_BHT1[:, 0, :, 0]


def _picked(x_BHSN: Tensor, index_BS: Tensor) -> Tensor:
    """x at these places of its last dimension but one; both may have a batch of 1."""
    index = index_BS[:, None, :, None].expand(-1, *x_BHSN.shape[1:2], -1, x_BHSN.shape[3])
    return x_BHSN.expand(len(index), -1, -1, -1).gather(2, index)
