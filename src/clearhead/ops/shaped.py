"""Shaped attention: the identity, attention and its centre, each times a gain a head."""

import torch
from torch import Tensor

from clearhead.ops import shaped_fused
from clearhead.ops.running_mean import running_mean


def shaped(
    x_BTHD: Tensor,
    o_BTHD: Tensor,
    centre_BTHD: Tensor | None,
    alpha_H: Tensor,
    beta_H: Tensor,
    gamma_H: Tensor | None,
) -> Tensor:
    """α_h x + β_h o − γ_h C x (arXiv 2311.01906, eq. 5), in the dtype of x.

    Args:
        x_BTHD: each token's own values. o_BTHD: attention's output.
        centre_BTHD: C x, attention's output at W_Q = 0; None, with gamma_H, leaves it out.
    """
    # One operation a term: uncompiled, a step of decoding is bound by their number.
    out = torch.addcmul(x_BTHD * alpha_H[:, None].to(x_BTHD.dtype), o_BTHD, beta_H[:, None])
    if centre_BTHD is not None and gamma_H is not None:
        out = torch.addcmul(out, centre_BTHD, gamma_H[:, None], value=-1)
    return out.to(x_BTHD.dtype)


def shaped_causal(
    x_BTHD: Tensor, o_BTHD: Tensor, alpha_H: Tensor, beta_H: Tensor, gamma_H: Tensor
) -> Tensor:
    """`shaped` where C x is the running mean of x over whole rows: Σ_{s ≤ t} x_s / t, from t = 1.

    On a GPU one kernel each way (`shaped_fused`), without a second derivative.
    """
    heads, width = x_BTHD.shape[2:]
    x_BTC = x_BTHD.flatten(2)
    if shaped_fused.supports(x_BTHD, o_BTHD):
        out_BTC = shaped_fused.forward(x_BTC, o_BTHD.flatten(2), alpha_H, beta_H, gamma_H)
        return out_BTC.unflatten(-1, (heads, width))
    # Side by side, the heads are one: their sums need no copy.
    mean_B1TC, _ = running_mean(x_BTC[:, None], x_BTC.shape[1])
    mean_BTHD = mean_B1TC[:, 0].unflatten(-1, (heads, width))
    return shaped(x_BTHD, o_BTHD, mean_BTHD, alpha_H, beta_H, gamma_H)
