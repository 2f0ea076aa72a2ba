"""PyTorch's flash kernel for CPUs, called below autograd to obtain its log-sum-exp.

It wants V = D, so narrower values are padded with zeros; its causal form aligns the first query
with the first key, so it serves only T = S. A row that sees no key has output and log-sum-exp 0.
"""

import torch
from torch import Tensor

from clearhead.ops.requests import HALF, SHORT, Call, Request, alike

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Up to about so many keys the backward kernel takes longer in bfloat16 than in float32.
_FEW = 256


def refuses(request: Request) -> str | None:
    if request.segments or request.window:
        return "no documents, no window"
    if request.causal and not request.square:
        return "causal with T = S only"
    if request.lone and request.dtype in HALF:
        return "two products are faster for a lone query in half precision"
    if request.width > request.depth:
        return "values no wider than keys"
    if request.short:
        return f"compiled tiles are faster up to {SHORT:,} keys"
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    q, k, v, scale, (causal, _, key_mask, _) = call
    width = v.shape[3]
    if width != q.shape[3] or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        q, k, v = alike(q, k, v)
    bias = None if key_mask is None else _padding_bias(q, key_mask)
    o, lse = _flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return o if o.shape[3] == width else o[..., :width], lse


def backward(call: Call, grad: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, scale, (causal, _, key_mask, _) = call
    if q.dtype in HALF and k.shape[2] <= _FEW:
        wide = call._replace(q=q.float(), k=k.float(), v=v.float())
        dq, dk, dv = backward(wide, grad.float(), o.float(), lse.float())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    width = v.shape[3]
    q, k, grad, v, o = alike(q, k, grad, v, o)
    bias = None if key_mask is None else _padding_bias(q, key_mask)
    dq, dk, dv = _flash_backward(grad, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv[..., :width]


def _padding_bias(q_BHTD: Tensor, key_mask: Tensor) -> Tensor:
    """0 for a visible key, −inf for padding: [B, 1, 1, S]."""
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    zero = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return zero.masked_fill(~key_mask, -torch.inf)[:, None, None, :]
