"""Arithmetic whose precision is not autocast's to choose; RMS norms."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()
_EXACT = (torch.float32, torch.float64)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Hold off autocast on the device of x; the meta device has none."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return _NOTHING
    return torch.autocast(x.device.type, enabled=False)


def widened(x: Tensor) -> Tensor:
    """x in float32; float64 stays."""
    return x if x.dtype in _EXACT else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension (arXiv 1910.07467), in the dtype of x.

    Args:
        x: [..., N], any float dtype; the arithmetic is float32 (float64 for float64).
        weight: [N], a scalar shared by all channels, or None.
    """
    if weight is not None and weight.shape == x.shape[-1:] and weight.dtype == x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps).to(x.dtype)  # in one call
    wide = widened(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def transformed() -> bool:
    """True under torch.func (grad, vmap, jvp), which differentiates plain operations alone."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
