"""Arithmetic whose precision is not autocast's to choose; RMS norms."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Hold off autocast on the device of x; the meta device has none."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension (arXiv 1910.07467), in the dtype of x.

    Args:
        x: [..., N], any float dtype; the arithmetic is float32 (float64 for float64).
        weight: [N], a scalar shared by all channels, or None.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)
