"""A rotation of the residual stream, learned from a model's weights alone.

A random rotation evens out the columns of the layers' matrices that read the stream, and leaves
their rows as long as they were: in a matrix with a row of six times the usual size, that row's
largest entry sets the one scale of all. There are far more rotations than such entries, so one is
sought that keeps them small. Rotations learned on text are SpinQuant's (arXiv 2405.16406), and as
there a Cayley transform keeps the matrix orthogonal. This one reads no text.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LIMIT = 4.5
"""Entries beyond this many times their matrix's root mean square are to shrink. Of normal numbers
one in 150,000 is as large."""
LONG = 1.2
"""Rows of this many times their matrix's root mean square take part; shorter ones hold hardly an
entry beyond the limit."""
ROWS = 128
"""Rows of a matrix that take part, at most: its longest."""
STEPS = 60
RATE = 0.05  # over √width


def learned_rotation(matrices: Iterator[Tensor], turn: Tensor) -> Tensor:
    """An orthogonal matrix, float64 [D, D], that makes the largest entries of each
    `matrix @ turn @ rotation` small.

    Args:
        matrices: weights [*, D] of the layers, which read the residual stream; the output head,
            which reads it too, takes no part.
        turn: an orthogonal matrix, float64 [D, D], from which to go on.
    """
    rows_ND = torch.cat([_long_rows(weight.float()) for weight in matrices]) @ turn.float()
    count, width = rows_ND.shape
    if not count:  # nothing to make smaller
        return torch.eye(width, dtype=torch.float64, device=rows_ND.device)
    half_DD = torch.zeros(width, width, device=rows_ND.device, requires_grad=True)
    adam = torch.optim.Adam([half_DD], lr=RATE / width**0.5)
    with torch.enable_grad():
        for _ in range(STEPS):
            beyond_ND = ((rows_ND @ _cayley(half_DD)).abs() - LIMIT).clamp(min=0)
            adam.zero_grad()
            beyond_ND.square().sum().backward()
            adam.step()
    return _cayley(half_DD.detach().double())


def _long_rows(weight_OD: Tensor) -> Tensor:
    """The longest rows of a matrix, in units of its root mean square."""
    size = weight_OD.square().mean().sqrt()
    rows_OD = weight_OD / torch.where(size > 0, size, 1.0)
    longest = rows_OD.square().mean(1).sqrt().sort(descending=True)
    return rows_OD[longest.indices[:ROWS][longest.values[:ROWS] > LONG]]


def _cayley(half_DD: Tensor) -> Tensor:
    """The rotation (I + S)⁻¹ (I − S) of the skew-symmetric S = H − Hᵀ."""
    skew_DD = half_DD - half_DD.mT
    eye_DD = torch.eye(len(half_DD), dtype=half_DD.dtype, device=half_DD.device)
    return torch.linalg.solve(eye_DD + skew_DD, eye_DD - skew_DD)
