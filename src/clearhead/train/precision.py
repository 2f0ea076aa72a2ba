"""Precision of matrix products: bf16 where the hardware supports it natively; autocast."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

Resolved = Literal["bf16", "fp32"]


def resolve(precision: Literal["auto", "bf16", "fp32"], device: torch.device) -> Resolved:
    """Resolve `precision` on `device`: "auto" is bf16 only with native hardware support, since
    emulated bf16 is slower than float32 and less exact."""
    if precision != "auto":
        return precision
    native = False
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return "bf16" if native else "fp32"


def autocast(precision: Resolved, device: torch.device) -> AbstractContextManager[None]:
    """The context of a forward pass. Weights, gradients and optimizer state stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
