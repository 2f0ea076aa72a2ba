"""Torch's modes (autocast, export, fake tensors), Triton, and the RMS norm."""

import importlib.util
import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clearhead.errors import ClearheadError

_NOTHING = nullcontext()
_EXACT = (torch.float32, torch.float64)


def _startable() -> bool:
    """True if Triton is installed, and the C compiler with which it starts a kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_config_var("INCLUDEPY") or "", "Python.h")
    triton = importlib.util.find_spec("triton")
    return triton is not None and compiler is not None and headers.exists()


# Evaluated at import: torch.compile cannot trace this check.
STARTABLE = _startable()


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Disable autocast on the device of x; the meta device has none."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return _NOTHING
    return torch.autocast(x.device.type, enabled=False)


def widened(x: Tensor) -> Tensor:
    """x as float32; float64 stays float64."""
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


def refuse_second_derivative() -> None:
    """Refuse a backward pass with create_graph=True, whose own derivative would be wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ClearheadError(
            "attention and the loss have no second derivative (create_graph=True): call "
            "set_attn_implementation('eager'), and take the loss of the logits"
        )


def is_exporting() -> bool:
    """True under torch.export alone; `is_exporting()` of torch 2.11 is True under compile too."""
    return torch.compiler._is_exporting_flag


def has_numbers(x: Tensor) -> bool:
    """False if x has no values: fake tensors, under a compiler."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def readable(x: Tensor) -> bool:
    """True if values can be read without waiting for a GPU."""
    return x.device.type == "cpu" and has_numbers(x)
