"""Softmax attention by `F.scaled_dot_product_attention`, its backward included.

Requests are limited to those for which PyTorch has a kernel: its fallback makes T × S scores.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops import split_decode
from clearhead.ops.precision import without_autocast
from clearhead.ops.requests import HALF, Call, Request, repeat


def refuses(request: Request) -> str | None:
    if request.sink:
        return "no log-sum-exp, which a sink or a prefix needs"
    if request.dtype not in (*HALF, torch.float32) or (request.capability or (0, 0)) < (8, 0):
        return "float32, bfloat16 and float16 on Ampere or newer"
    if request.window or request.segments or (request.key_mask and not request.lone):
        return "no windows, no documents, padding at T = 1 only"
    if request.causal and not request.square:
        return "causal with T = S only"
    if request.depth % 8 or request.width % 8:
        return "widths that are multiples of 8 only"
    if request.width != request.depth and not request.lone:
        return "values as wide as keys only"
    by_flash = request.dtype in HALF and not request.key_mask
    if request.lone and not by_flash and split_decode.refuses(request) is None:
        return "of a lone query only flash divides the keys, as split-decode does"
    return None


def attend(call: Call) -> Tensor:
    """Return o [B, H, T, V], differentiable; padding for T = 1 only."""
    q, k, v, scale, visibility = call
    (batch, heads, queries, depth), groups = q.shape, k.shape[1]
    options: dict[str, bool] = {"is_causal": visibility.causal}
    if heads != groups:
        if queries == 1:  # heads that share a key are rows over it
            q = q.reshape(batch, groups, -1, depth)
        elif q.dtype in HALF and depth <= 256:
            options["enable_gqa"] = True
        else:  # PyTorch's other kernels read no shared keys
            k, v = repeat(k, heads), repeat(v, heads)
    mask = None if visibility.key_mask is None else visibility.key_mask[:, None, None]
    with without_autocast(q):
        o = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **options)
    return o.reshape(batch, heads, queries, -1) if q is not call.q else o
