"""Memory-efficient attention on CUDA: `aten._efficient_attention_forward` and `_backward`.

It serves float32, any width, and values of a width of their own, at about half the speed of flash,
for whole texts: on an H100 its gradients are wrong where T < S. Keys are repeated for the queries
that share them; padded rows and documents are packed.
"""

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
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp, float32 [B, H, T]."""
    q, k, v = (x.transpose(1, 2) for x in _ready(q_BHTD, k_BGSD, v_BGSV))
    o, lse, *_ = _aten._efficient_attention_forward(
        *(q, k, v, None, None, None, None, None, 0.0, _kind(visibility.causal), True),
        scale=scale,
        window_size=visibility.window,
    )
    return o.transpose(1, 2)[..., : v_BGSV.shape[3]], lse[:, :, : q.shape[1]]


def backward(
    grad_BHTV: Tensor, saved: Saved, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with softmax-1's (o, lse) instead of softmax's, softmax-1's."""
    q_BHTD, k_BGSD, v_BGSV, o_BHTV, lse_BHT = saved
    shared, length = k_BGSD.shape[1:3]
    padded = *alike(grad_BHTV, o_BHTV, multiple=8), *_ready(q_BHTD, k_BGSD, v_BGSV)
    grad, o, q, k, v = (x.transpose(1, 2) for x in padded)
    # Rows that are none have log-sum-exp ∞, and so weight 0.
    lse = torch.nn.functional.pad(lse_BHT, (0, -length % _ROWS), value=torch.inf)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(grad, q, k, v, None, o, None, None, length, length, lse, 0.0, *_no_dropout(q)),
        *(_kind(visibility.causal), False),
        scale=scale,
        window_size=visibility.window,
    )
    dk, dv = (layouts.add(x.transpose(1, 2), shared) for x in (dk, dv))
    depth, width = q_BHTD.shape[3], v_BGSV.shape[3]
    return dq.transpose(1, 2)[..., :depth], dk[..., :depth], dv[..., :width]


def packed_forward(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGV: Tensor,
    packing: Packing,
    *,
    scale: float,
    visibility: Visibility,
) -> tuple[Tensor, Tensor]:
    """Return o [N, H, V] and its log-sum-exp [H, N] of texts one after the other."""
    heads = q_NHD.shape[1]
    q, k, v = (_spread(x, heads) for x in (q_NHD, k_NGD, v_NGV))
    o, lse_CHM, *_ = _aten._efficient_attention_forward(
        *(q, k, v, None, packing.ends_q, packing.ends_k),
        *(packing.longest_q, packing.longest_k, 0.0, _kind(visibility.causal), True),
        scale=scale,
        window_size=visibility.window,
    )
    return o[0, ..., : v_NGV.shape[2]], lse_CHM.transpose(0, 1)[:, *packing.places_q]


def packed_backward(
    grad_NHV: Tensor, saved: Saved, packing: Packing, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of texts one after the other."""
    q_NHD, k_NGD, v_NGV, o_NHV, lse_HN = saved
    heads, shared = q_NHD.shape[1], k_NGD.shape[1]
    grad, q, k, v, o = (_spread(x, heads) for x in (grad_NHV, q_NHD, k_NGD, v_NGV, o_NHV))
    length = packing.longest_q + -packing.longest_q % _ROWS
    lse_CHM = lse_HN.new_full((len(packing.ends_q) - 1, heads, length), torch.inf)
    lse_CHM.transpose(0, 1)[:, *packing.places_q] = lse_HN
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(grad, q, k, v, None, o, packing.ends_q, packing.ends_k),
        *(packing.longest_q, packing.longest_k, lse_CHM, 0.0, *_no_dropout(q)),
        *(_kind(visibility.causal), False),
        scale=scale,
        window_size=visibility.window,
    )
    dk, dv = (layouts.add(x.transpose(1, 2), shared).transpose(1, 2) for x in (dk, dv))
    depth, width = q_NHD.shape[2], v_NGV.shape[2]
    return dq[0, ..., :depth], dk[0, ..., :depth], dv[0, ..., :width]


def _ready(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = layouts.repeat(k, q.shape[1]), layouts.repeat(v, q.shape[1])
    (q, k), (v,) = alike(q, k, multiple=8), alike(v, multiple=8)
    return q, k, v


def _spread(x_NGD: Tensor, heads: int) -> Tensor:
    """[N, G, D] → [1, N, H, D]."""
    x = layouts.repeat(x_NGD[None].transpose(1, 2), heads).transpose(1, 2)
    return alike(x, multiple=8)[0]


def _kind(causal: bool) -> int:
    return _LAST if causal else _FULL


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers, which the kernels do not read and want to be given."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    return seed, seed
