"""Flash attention on CUDA: `aten._flash_attention_forward` and `_backward`, dense and packed.

It needs V = D, a multiple of 8 up to 256: narrower tensors are padded with zeros. With a `Packing`
one row, B = 1, holds texts one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.packing import Packing
from clearhead.ops.requests import HALF, Call, Request, alike

_aten = torch.ops.aten


def refuses(request: Request) -> str | None:
    if request.segments or request.key_mask:
        return "no documents, no padding"
    if request.dtype not in HALF:
        return "bfloat16 and float16 only"
    if (request.capability or (0, 0)) < (8, 0):
        return "Ampere or newer"
    if max(request.depth, request.width) > 256:
        return "at most 256 wide"
    return None


def forward(call: Call, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (_tokens_first(x, packing) for x in alike(*call[:3], multiple=8))
    o, lse, *_ = _aten._flash_attention_forward(
        *(q, k, v, *_texts(q, k, packing), 0.0, call.visibility.causal, False), **_options(call)
    )
    if packing is not None:
        o, lse = o[None], lse[None]
    return o.transpose(1, 2)[..., : call.v.shape[3]], lse


def backward(
    call: Call, grad: Tensor, o: Tensor, lse: Tensor, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    padded = alike(grad, *call[:3], o, multiple=8)
    grad, q, k, v, o = (_tokens_first(x, packing) for x in padded)
    lse = (lse if packing is None else lse[0]).contiguous()
    # The random state of dropout: a required argument, not read without dropout.
    seed = torch.empty((2,), dtype=torch.uint64, device=q.device)
    gradients = _aten._flash_attention_backward(
        *(grad, q, k, v, o, lse, *_texts(q, k, packing), 0.0, call.visibility.causal),
        *(seed, seed[0]),
        **_options(call),
    )
    dq, dk, dv = ((x if packing is None else x[None]).transpose(1, 2) for x in gradients)
    depth = call.q.shape[3]
    return dq[..., :depth], dk[..., :depth], dv[..., : call.v.shape[3]]


def _tokens_first(x_BHTD: Tensor, packing: Packing | None) -> Tensor:
    x_BTHD = x_BHTD.transpose(1, 2)
    return x_BTHD if packing is None else x_BTHD[0]


def _texts(q: Tensor, k: Tensor, packing: Packing | None) -> tuple[Any, Any, int, int]:
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    # With a longest text of 1 the kernel takes grouped queries for a batch of such texts, one each.
    return packing.ends_q, packing.ends_k, max(2, packing.longest_q), max(2, packing.longest_k)


def _options(call: Call) -> dict[str, Any]:
    """The scale, and the keys before and after a query's own that it sees."""
    causal, window, *_ = call.visibility
    before = None if window is None else window - 1
    after = 0 if causal else before
    return {"scale": call.scale, "window_size_left": before, "window_size_right": after}
