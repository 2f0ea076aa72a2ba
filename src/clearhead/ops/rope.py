"""Rotary position embedding as a pure function of the positions: no buffers, no state."""

import torch
from torch import Tensor


def rotary_table(positions_BT: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin of position · theta^(−2j/width), float32 [B, 1, T, width/2] (arXiv 2104.09864)."""
    exponent = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32) / width
    angle = positions_BT[:, None, :, None].float() * theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x_BHTD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pair (x_j, x_(j+D/2)) by its angle: the half-split layout of transformers' Llama.

    The arithmetic is float32 (float64 for float64); the result has the dtype of x.
    """
    cos, sin = table
    first, second = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32)).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x_BHTD.dtype)
