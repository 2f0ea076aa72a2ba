"""Hadamard rotation of blocks of channels."""

import torch
from torch import Tensor

WIDEST = 512  # channels of a block: wider ones spread an outlier little further


def block_of(width: int) -> int:
    """The largest power of two that divides `width`, at most `WIDEST`."""
    return min(width & -width, WIDEST)


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of ±1, float32, size a power of two: H = Hᵀ, H H = size · I."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        rows = torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)
        matrix = torch.cat(rows)
    return matrix


def factors(block: int) -> tuple[Tensor, Tensor]:
    """Two matrices of nearly equal size whose Kronecker product is `hadamard(block)`."""
    exponent = block.bit_length() - 1
    return hadamard(1 << exponent // 2), hadamard(1 << -(-exponent // 2))


def rotate_blocks(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x H / √block along the last dimension, block by block, for H = left ⊗ right; its own inverse.

    A block as a matrix [len(left), len(right)] is multiplied from both sides.
    """
    rows, columns = left.shape[0], right.shape[0]
    turned = torch.mm(x.reshape(-1, columns), right).view(-1, rows, columns)
    left = left.expand(turned.shape[0], rows, rows)
    scale = (rows * columns) ** -0.5
    # 0 times the first argument, which is not read, and a scale within the product.
    return torch.baddbmm(turned.detach(), left, turned, beta=0, alpha=scale).view(x.shape)


def rotate_channels(x: Tensor) -> Tensor:
    """x H / √block along the last dimension with block = `block_of(width)`, in x's dtype."""
    return rotate_blocks(x, *(one.to(x) for one in factors(block_of(x.shape[-1]))))
