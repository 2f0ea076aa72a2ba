"""Flash attention on CUDA: `aten._flash_attention_forward` and `_backward`, dense and packed.

These are FlashAttention-2, or whatever the user has put in its place with
`torch.nn.attention.activate_flash_attention_impl`. The kernel's causal mask aligns the last query
with the last key; grouped queries and windows are built in. It needs V = D, a multiple of 8 up to
256: narrower tensors are padded with zeros.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.layouts import alike
from clearhead.ops.packing import Packing
from clearhead.ops.requests import HALF, Request, Saved
from clearhead.ops.visibility import Visibility

_aten = torch.ops.aten


def refuses(request: Request) -> str | None:
    """The reason why this kernel does not compute the request, if there is one."""
    if request.dtype not in HALF:
        return "bfloat16 and float16 only"
    if (request.capability or (0, 0)) < (8, 0):
        return "Ampere or newer"
    if max(request.depth, request.width) > 256:
        return "at most 256 wide"
    return None


def forward(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp, float32 [B, H, T].

    With `packing` the one row, B = 1, holds texts one after the other.
    """
    q, k, v = (_tokens_first(x, packing) for x in alike(q_BHTD, k_BGSD, v_BGSV, multiple=8))
    o, lse, *_ = _aten._flash_attention_forward(
        *(q, k, v, *_texts(q, k, packing), 0.0, visibility.causal, False),
        scale=scale,
        **_window(visibility),
    )
    if packing is not None:
        o, lse = o[None], lse[None]
    return o.transpose(1, 2)[..., : v_BGSV.shape[3]], lse


def backward(
    grad_BHTV: Tensor,
    saved: Saved,
    *,
    scale: float,
    visibility: Visibility,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: softmax-1's if `saved` holds the o and lse of softmax-1."""
    q_BHTD, k_BGSD, v_BGSV, o_BHTV, lse_BHT = saved
    padded = alike(grad_BHTV, q_BHTD, k_BGSD, v_BGSV, o_BHTV, multiple=8)
    grad, q, k, v, o = (_tokens_first(x, packing) for x in padded)
    lse = (lse_BHT if packing is None else lse_BHT[0]).contiguous()
    gradients = _aten._flash_attention_backward(
        *(grad, q, k, v, o, lse, *_texts(q, k, packing), 0.0, visibility.causal, *_no_dropout(q)),
        scale=scale,
        **_window(visibility),
    )
    dq, dk, dv = ((x if packing is None else x[None]).transpose(1, 2) for x in gradients)
    depth = q_BHTD.shape[3]
    return dq[..., :depth], dk[..., :depth], dv[..., : v_BGSV.shape[3]]


def _tokens_first(x_BHTD: Tensor, packing: Packing | None) -> Tensor:
    x_BTHD = x_BHTD.transpose(1, 2)
    return x_BTHD if packing is None else x_BTHD[0]


def _texts(q: Tensor, k: Tensor, packing: Packing | None) -> tuple[Any, Any, int, int]:
    """Where texts end among the queries and the keys, and the longest ones."""
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    # With a longest text of 1 the kernel takes grouped queries for a batch of such texts, one each.
    return packing.ends_q, packing.ends_k, max(2, packing.longest_q), max(2, packing.longest_k)


def _window(visibility: Visibility) -> dict[str, int | None]:
    """Keys before and after a query's own that it sees; causality wins over those after."""
    before = None if visibility.window is None else visibility.window - 1
    return {"window_size_left": before, "window_size_right": 0 if visibility.causal else before}


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers, which the kernels do not read and want to be given."""
    seed = torch.empty((2,), dtype=torch.uint64, device=q.device)
    return seed, seed[0]
