"""PyTorch's own fused attention kernels, called below autograd so that lse is at hand.

| device | dtype | kernel |
| --- | --- | --- |
| CPU | all | flash for CPU: grouped queries and key padding built in |
| CUDA | bfloat16, float16 | flash, unpadded |
| CUDA | float32 | memory-efficient, unpadded |

All of them want V = D, so the narrower side is padded with zeros: values, and on CUDA, where its
products are nearly free, queries and keys too. Their causal form aligns the first query with the
first key, so it serves only T = S. Everything else goes to `clearhead.ops.tiles`. The CUDA kernels
are not trusted to share keys among heads, so those are repeated and their gradients summed.
"""

import torch
from torch import Tensor

from clearhead.ops import groups
from clearhead.ops.visibility import Visibility

_aten = torch.ops.aten

# Up to about so many keys the CPU's backward kernel takes longer in bfloat16 than in float32.
_SHORT = 256


def supports(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, visibility: Visibility) -> bool:
    """True where one of these kernels computes the request exactly."""
    if visibility.segments is not None or visibility.window is not None:
        return False
    if visibility.causal and q_BHTD.shape[2] != k_BGSD.shape[2]:
        return False
    if q_BHTD.device.type == "cpu":
        return v_BGSV.shape[3] <= q_BHTD.shape[3]
    if q_BHTD.device.type != "cuda" or visibility.key_mask is not None:
        return False
    width = max(q_BHTD.shape[3], v_BGSV.shape[3])
    if q_BHTD.dtype in (torch.bfloat16, torch.float16):
        return width <= 256 and width % 8 == 0
    return q_BHTD.dtype == torch.float32 and width % 4 == 0


def forward(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float,
    visibility: Visibility,
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, T, V] and its log-sum-exp [B, H, T], float32 (float64 on CPU for float64).

    A row that sees no key has output 0 and log-sum-exp −inf.
    """
    width, causal = v_BGSV.shape[3], visibility.causal
    q_BHTD, k_BGSD, v_BGSD = _alike(q_BHTD, k_BGSD, v_BGSV)
    if q_BHTD.device.type == "cpu":
        bias = _padding_bias(q_BHTD, visibility.key_mask)
        o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTD, k_BGSD, v_BGSD, 0.0, causal, attn_mask=bias, scale=scale
        )
        if (mask := visibility.key_mask) is not None:  # the kernel's own lse is 0 there
            seen_BT = mask.cumsum(-1) > 0 if causal else mask.any(-1, keepdim=True)
            lse = lse.masked_fill(~seen_BT[:, None], -torch.inf)
        return o[..., :width], lse
    k, v = groups.repeat(k_BGSD, q_BHTD.shape[1]), groups.repeat(v_BGSD, q_BHTD.shape[1])
    if q_BHTD.dtype == torch.float32:
        o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BHTD, k, v, None, True, 0.0, causal, scale=scale
        )
    else:
        o, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q_BHTD, k, v, 0.0, causal, False, scale=scale
        )
    return o[..., :width], lse[:, :, : q_BHTD.shape[2]]  # the efficient kernel pads its rows


def backward(
    grad_BHTV: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    o_BHTV: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    visibility: Visibility,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; with softmax-1's (o, lse) instead of softmax's, softmax-1's."""
    if _quicker_in_float32(q_BHTD, k_BGSD):
        wide = (x.float() for x in (grad_BHTV, q_BHTD, k_BGSD, v_BGSV, o_BHTV))
        dq, dk, dv = backward(*(*wide, lse_BHT), scale=scale, visibility=visibility)
        return dq.to(q_BHTD.dtype), dk.to(k_BGSD.dtype), dv.to(v_BGSV.dtype)
    depth, width, causal = q_BHTD.shape[3], v_BGSV.shape[3], visibility.causal
    q_BHTD, k_BGSD, grad_BHTD, v_BGSD, o_BHTD = _alike(q_BHTD, k_BGSD, grad_BHTV, v_BGSV, o_BHTV)
    if q_BHTD.device.type == "cpu":
        bias = _padding_bias(q_BHTD, visibility.key_mask)
        if bias is not None:  # −inf less −inf is NaN
            lse_BHT = lse_BHT.masked_fill(lse_BHT == -torch.inf, 0.0)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad_BHTD, q_BHTD, k_BGSD, v_BGSD, o_BHTD, lse_BHT, 0.0, causal),
            attn_mask=bias,
            scale=scale,
        )
        return dq, dk, dv[..., :width]
    heads, shared = q_BHTD.shape[1], k_BGSD.shape[1]
    k, v = groups.repeat(k_BGSD, heads), groups.repeat(v_BGSD, heads)
    length = q_BHTD.shape[2]
    # Without dropout the kernels read neither seed nor offset, but they want to be given some.
    seed = offset = torch.zeros((), dtype=torch.int64, device=q_BHTD.device)
    if q_BHTD.dtype == torch.float32:
        lse = torch.nn.functional.pad(lse_BHT, (0, -length % 32), value=torch.inf)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad_BHTD, q_BHTD, k, v, None, o_BHTD, lse, seed, offset, 0.0),
            *((True, True, True, False), causal),
            scale=scale,
        )
    else:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *(grad_BHTD, q_BHTD, k, v, o_BHTD, lse_BHT.contiguous(), None, None),
            *(length, k.shape[2], 0.0, causal, seed, offset),
            scale=scale,
        )
    dk = groups.add(dk[..., :depth], shared)
    return dq[..., :depth], dk, groups.add(dv[..., :width], shared)


def _quicker_in_float32(q_BHTD: Tensor, k_BGSD: Tensor) -> bool:
    low = q_BHTD.dtype in (torch.bfloat16, torch.float16)
    return q_BHTD.device.type == "cpu" and low and k_BGSD.shape[2] <= _SHORT


def _alike(*tensors: Tensor) -> list[Tensor]:
    """The same tensors, their last dimensions contiguous and as wide as the widest, by zeros.

    The kernels read rows as if a row's numbers were neighbours, and check nothing when they are
    called below `scaled_dot_product_attention`. Padding may keep a layout whose rows are not.
    """
    width = max(x.shape[3] for x in tensors)
    padded = (
        x if x.shape[3] == width else torch.nn.functional.pad(x, (0, width - x.shape[3]))
        for x in tensors
    )
    return [x if x.stride(3) == 1 else x.contiguous() for x in padded]


def _padding_bias(q_BHTD: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """0 for a visible key, −inf for padding: [B, 1, 1, S], broadcast by the kernel, never T × T."""
    if key_mask is None:
        return None
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    zero = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return zero.masked_fill(~key_mask, -torch.inf)[:, None, None, :]
