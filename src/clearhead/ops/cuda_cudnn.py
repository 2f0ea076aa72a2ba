"""cuDNN's attention on Hopper: whole texts, causal or not, values of a width of their own.

It makes a plan for every shape, which only training repays: requests without gradients go to flash.
"""

import torch
from torch import Tensor

from clearhead.ops.layouts import alike
from clearhead.ops.requests import HALF, Request, Saved
from clearhead.ops.visibility import Visibility

_aten = torch.ops.aten


def refuses(request: Request) -> str | None:
    """The reason why this kernel does not compute the request, if there is one."""
    if request.dtype not in HALF:
        return "bfloat16 and float16 only"
    if request.capability is None or request.capability[0] != 9:
        return "faster on Hopper only"
    if not request.square or request.window or request.key_mask or request.segments:
        return "T = S, without masks and windows"
    if max(request.depth, request.width) > 256:
        return "at most 256 wide"
    if not request.learning:
        return "its plan for every shape pays in training only"
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if activated is not None and activated() is not None:
        return "the user has activated another flash attention"
    return None


def forward(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp, float32 [B, H, T]."""
    (q, k), (v,) = alike(q_BHTD, k_BGSD, multiple=8), alike(v_BGSV, multiple=8)
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *(q, k, v, None, True, 0.0, visibility.causal, False), scale=scale
    )
    return o[..., : v_BGSV.shape[3]], lse.reshape(lse.shape[:3])


def backward(
    grad_BHTV: Tensor, saved: Saved, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with softmax-1's (o, lse) instead of softmax's, softmax-1's."""
    q_BHTD, k_BGSD, v_BGSV, o_BHTV, lse_BHT = saved
    q, k = alike(q_BHTD, k_BGSD, multiple=8)
    grad, v, o = alike(grad_BHTV, v_BGSV, o_BHTV, multiple=8)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, o, lse_BHT[..., None].contiguous(), seed, seed, None, None, None),
        *(q.shape[2], k.shape[2], 0.0, visibility.causal),
        scale=scale,
    )
    depth = q_BHTD.shape[3]
    return dq[..., :depth], dk[..., :depth], dv[..., : v_BGSV.shape[3]]
