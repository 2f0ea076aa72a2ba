"""cuDNN's attention on Hopper, T = S: its plan for every shape pays off in training only."""

import torch
from torch import Tensor

from clearhead.ops.requests import HALF, Call, Request, alike

_aten = torch.ops.aten


def refuses(request: Request) -> str | None:
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
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    (q, k), (v,) = alike(call.q, call.k, multiple=8), alike(call.v, multiple=8)
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *(q, k, v, None, True, 0.0, call.visibility.causal, False), scale=call.scale
    )
    return o[..., : call.v.shape[3]], lse.reshape(lse.shape[:3])


def backward(call: Call, grad: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = alike(call.q, call.k, multiple=8)
    grad, v, o = alike(grad, call.v, o, multiple=8)
    # A compiler may lay out the operator's inputs otherwise than traced; within it they lie still.
    run = _gradients if torch.compiler.is_compiling() else _planned
    dq, dk, dv = run(grad, q, k, v, o, lse, call.scale, call.visibility.causal)
    depth = call.q.shape[3]
    return dq[..., :depth], dk[..., :depth], dv[..., : call.v.shape[3]]


def _planned(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch keeps cuDNN's plans by the strides of q, k and v alone, and a kept plan reads o and
    its gradient with the strides of the first ones: here they have one layout for each of q."""
    by_token = q.stride(1) < q.stride(2)
    if by_token:
        grad, o = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, o))
    else:
        grad, o = grad.contiguous(), o.contiguous()
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
    gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, o, lse[..., None].contiguous(), seed, seed, None, None, None),
        *(q.shape[2], k.shape[2], 0.0, causal),
        scale=scale,
    )
    return gradients


_gradients = torch.library.custom_op("clearhead::cudnn_gradients", _planned, mutates_args=())


@_gradients.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
