"""PyTorch's flash kernel for CPUs, called below autograd to obtain its log-sum-exp.

Grouped queries and key padding are built in. It wants V = D, so narrower values are padded with
zeros; its causal form aligns the first query with the first key, so it serves only T = S.
"""

import torch
from torch import Tensor

from clearhead.ops.layouts import alike
from clearhead.ops.requests import HALF, SHORT, Request, Saved
from clearhead.ops.visibility import Visibility

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Up to about so many keys the backward kernel takes longer in bfloat16 than in float32.
_FEW = 256


def refuses(request: Request) -> str | None:
    """The reason why this kernel is not exact for the request, or slower than tiles; or None."""
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


def forward(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp [B, H, T], float32 (float64 for float64).

    A row that sees no key has output 0 and log-sum-exp 0, the kernel's own convention.
    """
    width, mask = v_BGSV.shape[3], visibility.key_mask
    if (
        width != q_BHTD.shape[3]
        or not q_BHTD.stride(3) == k_BGSD.stride(3) == v_BGSV.stride(3) == 1
    ):
        q_BHTD, k_BGSD, v_BGSV = alike(q_BHTD, k_BGSD, v_BGSV)
    o, lse = _flash(
        *(q_BHTD, k_BGSD, v_BGSV, 0.0, visibility.causal),
        attn_mask=None if mask is None else _padding_bias(q_BHTD, mask),
        scale=scale,
    )
    return o if o.shape[3] == width else o[..., :width], lse


def backward(
    grad_BHTV: Tensor, saved: Saved, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: softmax-1's if `saved` holds the o and lse of softmax-1."""
    q_BHTD, k_BGSD, v_BGSV, o_BHTV, lse_BHT = saved
    if q_BHTD.dtype in HALF and k_BGSD.shape[2] <= _FEW:
        wide = Saved(*(x.float() for x in saved))
        dq, dk, dv = backward(grad_BHTV.float(), wide, scale=scale, visibility=visibility)
        return dq.to(q_BHTD.dtype), dk.to(k_BGSD.dtype), dv.to(v_BGSV.dtype)
    width = v_BGSV.shape[3]
    q_BHTD, k_BGSD, grad_BHTD, v_BGSD, o_BHTD = alike(q_BHTD, k_BGSD, grad_BHTV, v_BGSV, o_BHTV)
    mask = visibility.key_mask
    dq, dk, dv = _flash_backward(
        *(grad_BHTD, q_BHTD, k_BGSD, v_BGSD, o_BHTD, lse_BHT, 0.0, visibility.causal),
        attn_mask=None if mask is None else _padding_bias(q_BHTD, mask),
        scale=scale,
    )
    return dq, dk, dv[..., :width]


def _padding_bias(q_BHTD: Tensor, key_mask: Tensor) -> Tensor:
    """0 for a visible key, −inf for padding: [B, 1, 1, S], broadcast by the kernel, never T × T."""
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    zero = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return zero.masked_fill(~key_mask, -torch.inf)[:, None, None, :]
