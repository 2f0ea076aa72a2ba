"""Two ways to one result: the same outputs, and the same gradients of every input."""

from collections.abc import Sequence

import torch
from torch import Tensor


def agree(
    got: Tensor,
    want: Tensor,
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor] | None = None,
    *,
    bound: float,
    shown: Tensor | None = None,
    least: float = 1e-3,
) -> None:
    """Compare `got`, of `inputs`, with `want`, of `exact`: those in float64, or the same ones.

    Args:
        bound: of the largest difference, relative to the largest number or `least`.
        shown: 1 where the output counts, and 0 elsewhere.
    """
    kept = torch.ones((), dtype=torch.bool) if shown is None else shown.bool()
    grad = (torch.randn(want.shape) * kept).to(got.dtype)
    found = [got * kept, *torch.autograd.grad(got, inputs, grad)]
    wanted = torch.autograd.grad(want, inputs if exact is None else exact, grad.to(want.dtype))
    for index, (a, b) in enumerate(zip(found, [want * kept, *wanted], strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b.double()).abs().max() / b.abs().max().clamp_min(least)
        assert error < bound, f"tensor {index}: {error:.2e}"
