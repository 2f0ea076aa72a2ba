"""Attention by tiles of query rows, in plain PyTorch: any widths, masks, devices and dtypes.

A tile holds ROWS queries against every key they may see, so memory grows with T and never with
T × T. Scores are float32: in bfloat16 every exponent would have an error of |score| / 256.
"""

import torch
from torch import Tensor

from clearhead.ops.precision import widened
from clearhead.ops.requests import Call, Request, add, repeat

ROWS = 128


def refuses(request: Request) -> None:
    """Refuses nothing."""


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; 0 and −inf for a row that sees no key."""
    q_BHTD, k_BGSD, v_BGSV, scale, visibility = call
    heads, queries, keys = *q_BHTD.shape[1:3], k_BGSD.shape[2]
    k, v = repeat(widened(k_BGSD), heads), repeat(v_BGSV, heads)
    outputs, lses = [], []
    for span in visibility.spans(queries, keys, ROWS):
        start, stop, first, end = span
        q = widened(q_BHTD[:, :, start:stop])
        score = torch.matmul(q, _within(k, first, end).mT) * scale
        hidden = visibility.hidden(span, queries, keys, q.device)
        if hidden is not None:
            score = torch.where(hidden, -torch.inf, score)
        top = score.amax(-1, keepdim=True)
        shift = torch.where(top == -torch.inf, 0.0, top)
        weight = torch.exp(score - shift)
        total = weight.sum(-1, keepdim=True)
        weight = weight / torch.where(total == 0, 1.0, total)
        outputs.append(torch.matmul(weight.to(v.dtype), _within(v, first, end)))
        lses.append((shift + torch.log(total)).squeeze(-1))
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def backward(call: Call, grad: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_BHTD, k_BGSD, v_BGSV, scale, visibility = call
    heads, queries, shared, keys = *q_BHTD.shape[1:3], *k_BGSD.shape[1:3]
    k, v = repeat(k_BGSD, heads), repeat(v_BGSV, heads)
    wide_k = widened(k)
    row_BHT1 = (widened(grad) * widened(o)).sum(-1, keepdim=True)
    dqs: list[Tensor] = []
    dks: list[Tensor] = []
    dvs: list[Tensor] = []
    for span in visibility.spans(queries, keys, ROWS):
        start, stop, first, end = span
        q, g = q_BHTD[:, :, start:stop], grad[:, :, start:stop]
        hidden = visibility.hidden(span, queries, keys, q.device)
        score = torch.matmul(widened(q), _within(wide_k, first, end).mT) * scale
        least = lse[:, :, start:stop, None]
        weight = torch.exp(score - torch.where(least == -torch.inf, torch.inf, least))
        if hidden is not None:
            # Not a product with the mask: a hidden score may overflow, and inf × 0 is NaN.
            weight = torch.where(hidden, 0.0, weight)
        dweight = torch.matmul(g, _within(v, first, end).mT).to(weight.dtype)
        rounded = weight.to(q.dtype)
        dscore = (weight * (dweight - row_BHT1[:, :, start:stop]) * scale).to(q.dtype)
        del score, weight, dweight, hidden  # before products, and the next, larger tile
        _add(dvs, torch.matmul(rounded.mT, g), first)
        _add(dks, torch.matmul(dscore.mT, q), first)
        dqs.append(torch.matmul(dscore, _within(k, first, end)))
        del rounded, dscore
    dk, dv = add(torch.cat(dks, 2), shared), add(torch.cat(dvs, 2), shared)
    return torch.cat(dqs, 2), dk.to(k_BGSD.dtype), dv.to(v.dtype)


def _within(x_BHSN: Tensor, first: int, end: int) -> Tensor:
    """Keys of a span; x itself if it is all: Inductor cannot slice an unknown number of keys."""
    whole = first == 0 and end == x_BHSN.shape[2]
    return x_BHSN if whole else x_BHSN[:, :, first:end]


def _add(blocks: list[Tensor], part: Tensor, first: int) -> None:
    """Add a tile's gradient of the keys from `first` on to `blocks`, in float32.

    torch.compile turns += into slices of one buffer into conditions on every element. A block in
    which a window begins is cut there; keys beyond the last block become a new one.
    """
    begin, whole = 0, list(blocks)
    blocks.clear()
    for block in whole:
        end = begin + block.shape[2]
        cut = min(max(first - begin, 0), block.shape[2])
        if cut:
            blocks.append(block[:, :, :cut])
        if cut < block.shape[2]:
            blocks.append(block[:, :, cut:] + part[:, :, begin + cut - first : end - first])
        begin = end
    if first + part.shape[2] > begin:
        blocks.append(widened(part[:, :, begin - first :]))
