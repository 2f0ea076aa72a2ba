"""Memory-efficient attention on CUDA: `aten._efficient_attention_forward` and `_backward`.

It serves float32, any width of queries and any other of values, at about half the speed of flash,
for T = S only: on an H100 its gradients are wrong where T < S. Shared keys are repeated for each
query head; padded rows and documents are packed.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops import layouts
from clearhead.ops.layouts import alike
from clearhead.ops.packing import Packing
from clearhead.ops.requests import HALF, Request, Saved
from clearhead.ops.visibility import Visibility

_aten = torch.ops.aten

_FULL, _LAST = 0, 2  # the kernel's kinds of mask: none, and causal with queries the last of keys
_ROWS = 32  # of which its log-sum-exp has a multiple


def refuses(request: Request) -> str | None:
    """The reason why this kernel does not compute the request, if there is one."""
    if request.dtype not in (*HALF, torch.float32):
        return "float32, bfloat16 and float16 only"
    if request.dtype == torch.bfloat16 and (request.capability or (0, 0)) < (8, 0):
        return "bfloat16 on Ampere or newer"
    if not request.square:
        return "T = S only"
    if request.window and not request.causal:
        return "windows in causal attention only"
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
    q, k, v = (x.transpose(1, 2) for x in _ready(q_BHTD, k_BGSD, v_BGSV))
    o, lse, *_ = _aten._efficient_attention_forward(
        *(q, k, v, None, *_texts(packing, None), 0.0, _kind(visibility.causal), True),
        scale=scale,
        window_size=visibility.window,
    )
    if packing is None:
        lse = lse[:, :, : q.shape[1]]
    else:  # each text's rows, [texts, H, longest]
        lse = lse.transpose(0, 1)[:, *packing.places_q][None]
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
    shared, length = k_BGSD.shape[1:3]
    padded = *alike(grad_BHTV, o_BHTV, multiple=8), *_ready(q_BHTD, k_BGSD, v_BGSV)
    grad, o, q, k, v = (x.transpose(1, 2) for x in padded)
    # Rows that are none have log-sum-exp ∞, and so weight 0.
    if packing is None:
        lse = torch.nn.functional.pad(lse_BHT, (0, -length % _ROWS), value=torch.inf)
    else:
        rows = packing.longest_q + -packing.longest_q % _ROWS
        lse = lse_BHT.new_full((len(packing.ends_q) - 1, q.shape[2], rows), torch.inf)
        lse.transpose(0, 1)[:, *packing.places_q] = lse_BHT[0]
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(grad, q, k, v, None, o, *_texts(packing, length), lse, 0.0, *_no_dropout(q)),
        *(_kind(visibility.causal), False),
        scale=scale,
        window_size=visibility.window,
    )
    dk, dv = (layouts.add(x.transpose(1, 2), shared) for x in (dk, dv))
    depth, width = q_BHTD.shape[3], v_BGSV.shape[3]
    return dq.transpose(1, 2)[..., :depth], dk[..., :depth], dv[..., :width]


def _texts(packing: Packing | None, length: int | None) -> tuple[Any, ...]:
    """Where texts end among the queries and the keys, and the longest ones."""
    if packing is None:
        return None, None, length, length
    return packing.ends_q, packing.ends_k, packing.longest_q, packing.longest_k


def _ready(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = layouts.repeat(k, q.shape[1]), layouts.repeat(v, q.shape[1])
    (q, k), (v,) = alike(q, k, multiple=8), alike(v, multiple=8)
    return q, k, v


def _kind(causal: bool) -> int:
    return _LAST if causal else _FULL


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers, which the kernels do not read and want to be given."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    return seed, seed
