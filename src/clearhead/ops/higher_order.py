"""Second derivatives of operations whose own backward pass has only the first."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def requested() -> bool:
    """True if a backward pass runs with create_graph=True, so that its results are differentiated.

    False under torch.compile, which itself refuses to differentiate twice.
    """
    return not torch.compiler.is_compiling() and torch.is_grad_enabled()


def gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of a plain `function` with their own graph; None for inputs that need none."""
    # Views, so that an input computed from another one passes no gradient on to it here.
    views = [None if x is None else x.view_as(x) for x in inputs]
    out = function(*views)
    wanted = [x for x, wants in zip(views, needed, strict=True) if wants and x is not None]
    computed = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), create_graph=True))
    return tuple(next(computed) if wants else None for wants in needed)
