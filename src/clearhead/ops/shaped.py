"""Shaped attention: the identity, attention and its centre, each times a gain a head."""

import torch
from torch import Tensor


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
