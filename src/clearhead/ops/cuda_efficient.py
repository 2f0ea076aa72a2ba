"""Memory-efficient attention on CUDA: `aten._efficient_attention_forward` and `_backward`.

It serves float32, any width, and values of a width of their own, at about half the speed of flash.
Keys are repeated for the queries that share them, but not for a lone query: its heads are the rows
of their group. There padding is an additive bias; elsewhere padded rows and documents are packed.
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
    if request.window and not request.causal:
        return "windows in causal attention only"
    return None


def refuses_lone(request: Request) -> str | None:
    """As `refuses`, for one query whose cache is padded."""
    if not request.lone or not request.key_mask or request.segments or request.window:
        return "T = 1 with padding only"
    return refuses(request)


def packs(queries: int, visibility: Visibility) -> bool:
    """True where the masks are met by packing: not for a lone query, with padding alone."""
    padded = visibility.key_mask is not None and queries > 1
    return visibility.segments is not None or padded


def forward(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp, float32 [B, H, T]."""
    heads, queries = q_BHTD.shape[1:3]
    q, k, v = _ready(q_BHTD, k_BGSD, v_BGSV)
    o, lse, *_ = _aten._efficient_attention_forward(
        *(q, k, v, _bias(q, k, visibility.key_mask), None, None, None, None, 0.0),
        *(_kind(visibility.causal), True),
        scale=scale,
        window_size=visibility.window,
    )
    width = v_BGSV.shape[3]
    o, lse = o.transpose(1, 2)[..., :width], lse[:, :, : q.shape[1]]
    # A group's rows become heads again.
    return o.reshape(len(o), heads, queries, width), lse.reshape(len(o), heads, queries)


def backward(
    grad_BHTV: Tensor, saved: Saved, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with softmax-1's (o, lse) instead of softmax's, softmax-1's."""
    q_BHTD, k_BGSD, v_BGSV, o_BHTV, lse_BHT = saved
    shared = k_BGSD.shape[1]
    depth, width = q_BHTD.shape[3], v_BGSV.shape[3]
    q, k, v = _ready(q_BHTD, k_BGSD, v_BGSV)
    rows = (len(q), q.shape[2], q.shape[1])
    padded = alike(*(x.reshape(*rows, width) for x in (grad_BHTV, o_BHTV)), multiple=8)
    grad, o = (x.transpose(1, 2) for x in padded)
    lse = _padded(lse_BHT.reshape(rows))
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(grad, q, k, v, _bias(q, k, visibility.key_mask), o, None, None),
        *(q.shape[1], k.shape[1], lse, 0.0, *_no_dropout(q), _kind(visibility.causal), False),
        scale=scale,
        window_size=visibility.window,
    )
    dq = dq.transpose(1, 2)[..., :depth].reshape(q_BHTD.shape)
    dk, dv = (layouts.add(x.transpose(1, 2), shared) for x in (dk, dv))
    return dq, dk[..., :depth], dv[..., :width]


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
    """q, k, v as the kernel has them, [B, T, H, D].

    A lone query's heads become the rows of their group; else keys are repeated.
    """
    if q.shape[2] == 1:
        q = q.reshape(len(q), k.shape[1], -1, q.shape[3])
    k, v = layouts.repeat(k, q.shape[1]), layouts.repeat(v, q.shape[1])
    (q, k), (v,) = alike(q, k, multiple=8), alike(v, multiple=8)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _spread(x_NGD: Tensor, heads: int) -> Tensor:
    """[N, G, D] → [1, N, H, D]."""
    x = layouts.repeat(x_NGD[None].transpose(1, 2), heads).transpose(1, 2)
    return alike(x, multiple=8)[0]


def _kind(causal: bool) -> int:
    return _LAST if causal else _FULL


def _bias(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """0 for a visible key, −inf for padding, [B, H, T, S] that is [B, 1, 1, S] in memory.

    The kernel reads rows of 16 numbers: there must be as many, though it uses fewer.
    """
    if key_mask is None:
        return None
    keys = key_mask.shape[1]
    zero = torch.zeros(len(key_mask), keys + -keys % 16, dtype=q.dtype, device=q.device)
    bias = zero[:, :keys].masked_fill_(~key_mask, -torch.inf)
    return bias[:, None, None].expand(-1, q.shape[2], q.shape[1], -1)


def _padded(lse_BHT: Tensor) -> Tensor:
    """Rows that are none have log-sum-exp ∞, and so weight 0."""
    return torch.nn.functional.pad(lse_BHT, (0, -lse_BHT.shape[2] % _ROWS), value=torch.inf)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers, which the kernels do not read and want to be given."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    return seed, seed
