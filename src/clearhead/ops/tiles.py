"""Attention by tiles of query rows, in plain PyTorch: any widths, masks, devices and dtypes.

A tile holds ROWS queries against every key they may see, so memory grows with T and never with
T × T. Under torch.compile the arithmetic on the scores fuses, and on a CPU the whole is about
twice as fast as PyTorch's own flash kernel at short lengths (docs/performance.md).

Scores are made in float32 whatever the inputs: rounding them to bfloat16 would put an error of
|score| / 256 into every exponent.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.ops import groups

ROWS = 128


def forward(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    causal: bool,
    scale: float,
    key_mask: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, V] in the inputs' dtype, and its log-sum-exp [B, H, T], float32.

    A row that sees no key has output 0 and log-sum-exp −inf.
    """
    _, heads, length, _ = q_BHTD.shape
    keys = k_BGSD.shape[2]
    k, v = groups.repeat(_wide(k_BGSD), heads), groups.repeat(v_BGSV, heads)
    outputs, lses = [], []
    for start, stop, end in _tiles(length, keys, causal):
        q = _wide(q_BHTD[:, :, start:stop])
        score = torch.matmul(q, _up_to(end, k).mT) * scale
        segments = query_segments, key_segments
        hidden = _hidden(length, keys, start, stop, end, causal, key_mask, segments, q)
        if hidden is not None:
            score = torch.where(hidden, -torch.inf, score)
        top = score.amax(-1, keepdim=True)
        shift = torch.where(top == -torch.inf, 0.0, top)
        weight = torch.exp(score - shift)
        total = weight.sum(-1, keepdim=True)
        weight = weight / torch.where(total == 0, 1.0, total)
        outputs.append(torch.matmul(weight.to(v.dtype), _up_to(end, v)))
        lses.append((shift + torch.log(total)).squeeze(-1))
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def backward(
    grad_BHTV: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    o_BHTV: Tensor,
    lse_BHT: Tensor,
    *,
    causal: bool,
    scale: float,
    key_mask: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with softmax-1's (o, lse) instead of softmax's, softmax-1's."""
    _, heads, length, _ = q_BHTD.shape
    shared, keys = k_BGSD.shape[1:3]
    k, v = groups.repeat(k_BGSD, heads), groups.repeat(v_BGSV, heads)
    wide_k = _wide(k)
    exact = torch.promote_types(q_BHTD.dtype, torch.float32)
    row_BHT1 = (grad_BHTV.to(exact) * o_BHTV.to(exact)).sum(-1, keepdim=True)
    dqs: list[Tensor] = []
    dks: list[Tensor] = []
    dvs: list[Tensor] = []
    for start, stop, end in _tiles(length, keys, causal):
        q = q_BHTD[:, :, start:stop]
        g = grad_BHTV[:, :, start:stop]
        segments = query_segments, key_segments
        hidden = _hidden(length, keys, start, stop, end, causal, key_mask, segments, q)
        weight, dscore = _differentiate(
            *(q, g, _up_to(end, wide_k), _up_to(end, v)),
            row_BHT1[:, :, start:stop],
            lse_BHT[:, :, start:stop, None],
            hidden,
            scale,
        )
        _add(dvs, torch.matmul(weight.mT, g))
        _add(dks, torch.matmul(dscore.mT, q))
        dqs.append(torch.matmul(dscore, _up_to(end, k)))
        del weight, dscore, hidden  # before the next, larger tile is made
    dk, dv = groups.add(torch.cat(dks, 2), shared), groups.add(torch.cat(dvs, 2), shared)
    return torch.cat(dqs, 2), dk.to(k_BGSD.dtype), dv.to(v.dtype)


def _differentiate(
    q: Tensor,
    g: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """A tile's weights, and the gradient of its scores, both in the dtype of q."""
    score = torch.matmul(_wide(q), k.mT) * scale
    weight = torch.exp(score - torch.where(lse == -torch.inf, torch.inf, lse))
    if hidden is not None:
        # Not a product with the mask: a hidden score may overflow, and inf × 0 is NaN.
        weight = torch.where(hidden, 0.0, weight)
    dweight = torch.matmul(g, v.mT).to(weight.dtype)
    return weight.to(q.dtype), (weight * (dweight - row) * scale).to(q.dtype)


def _tiles(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(first row, past the last row, past the last key that any of them sees)."""
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        yield start, stop, keys - queries + stop if causal else keys


def _up_to(end: int, x_BHSN: Tensor) -> Tensor:
    """The first keys; uncut where these are all, as Inductor cannot slice to an unknown length."""
    return x_BHSN if end == x_BHSN.shape[2] else x_BHSN[:, :, :end]


def _add(blocks: list[Tensor], part: Tensor) -> None:
    """Add a tile's gradient of the first keys to `blocks`, in float32; more keys are a new block.

    Block by block, and not by += into slices of one buffer: torch.compile turns those into
    conditions on every element, which made the backward pass half as fast.
    """
    exact = torch.promote_types(part.dtype, torch.float32)
    begin = 0
    for index, block in enumerate(blocks):
        end = begin + block.shape[2]
        blocks[index] = block + part[:, :, begin:end]
        begin = end
    if part.shape[2] > begin:
        blocks.append(part[:, :, begin:].to(exact))


def _hidden(
    queries: int,
    keys: int,
    start: int,
    stop: int,
    end: int,
    causal: bool,
    key_mask: Tensor | None,
    segments: tuple[Tensor | None, Tensor | None],
    like: Tensor,
) -> Tensor | None:
    """What a tile must not see, as bool [B or 1, 1, rows, end]; None where it sees everything."""
    hidden = None
    if causal:
        row = torch.arange(start, stop, device=like.device)[:, None] + (keys - queries)
        hidden = (torch.arange(end, device=like.device)[None, :] > row)[None, None]
    if key_mask is not None:
        padding = ~key_mask[:, None, None, :end]
        hidden = padding if hidden is None else hidden | padding
    of_queries, of_keys = segments
    if of_queries is not None and of_keys is not None:
        other = of_queries[:, None, start:stop, None] != of_keys[:, None, None, :end]
        hidden = other if hidden is None else hidden | other
    return hidden


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
