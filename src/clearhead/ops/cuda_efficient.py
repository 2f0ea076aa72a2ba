"""Memory-efficient attention on CUDA: `aten._efficient_attention_forward` and `_backward`.

It serves float32 and any widths, for T = S only: on an H100 its gradients are wrong where T < S.
Shared keys are repeated for each query head. A `Packing` is as in `cuda_flash`. Its mask is 0 for
none, and 2 for causal with queries the last of keys.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.packing import Packing
from clearhead.ops.requests import HALF, Call, Request, add, alike, repeat

_aten = torch.ops.aten

_ROWS = 32  # of which its log-sum-exp has a multiple


def refuses(request: Request) -> str | None:
    if request.dtype not in (*HALF, torch.float32):
        return "float32, bfloat16 and float16 only"
    if request.dtype == torch.bfloat16 and (request.capability or (0, 0)) < (8, 0):
        return "bfloat16 on Ampere or newer"
    if not request.square:
        return "T = S only"
    if request.window and not request.causal:
        return "windows in causal attention only"
    return None


def forward(call: Call, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in _ready(call))
    o, lse, *_ = _aten._efficient_attention_forward(
        *(q, k, v, None, *_texts(packing, None), 0.0, 2 * call.visibility.causal, True),
        scale=call.scale,
        window_size=call.visibility.window,
    )
    if packing is None:
        lse = lse[:, :, : q.shape[1]]
    else:  # each text's rows, [texts, H, longest]
        lse = lse.transpose(0, 1)[:, *packing.places_q][None]
    return o.transpose(1, 2)[..., : call.v.shape[3]], lse


def backward(
    call: Call, grad: Tensor, o: Tensor, lse: Tensor, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    shared, length = call.k.shape[1:3]
    padded = *alike(grad, o, multiple=8), *_ready(call)
    grad, o, q, k, v = (x.transpose(1, 2) for x in padded)
    # Rows that are none have log-sum-exp ∞, and so weight 0.
    if packing is None:
        rows = torch.nn.functional.pad(lse, (0, -length % _ROWS), value=torch.inf)
    else:
        longest = packing.longest_q + -packing.longest_q % _ROWS
        rows = lse.new_full((len(packing.ends_q) - 1, q.shape[2], longest), torch.inf)
        rows.transpose(0, 1)[:, *packing.places_q] = lse[0]
    # The random state of dropout: a required argument, not read without dropout.
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(grad, q, k, v, None, o, *_texts(packing, length), rows, 0.0, seed, seed),
        *(2 * call.visibility.causal, False),
        scale=call.scale,
        window_size=call.visibility.window,
    )
    dk, dv = (add(x.transpose(1, 2), shared) for x in (dk, dv))
    depth, width = call.q.shape[3], call.v.shape[3]
    return dq.transpose(1, 2)[..., :depth], dk[..., :depth], dv[..., :width]


def _texts(packing: Packing | None, length: int | None) -> tuple[Any, ...]:
    if packing is None:
        return None, None, length, length
    return packing.ends_q, packing.ends_k, packing.longest_q, packing.longest_k


def _ready(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (repeat(x, call.q.shape[1]) for x in (call.k, call.v))
    (q, k), (v,) = alike(call.q, k, multiple=8), alike(v, multiple=8)
    return q, k, v
