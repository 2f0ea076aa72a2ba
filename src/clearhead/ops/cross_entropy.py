"""Language-model loss by chunks of rows; on CUDA one operator, each chunk's work compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clearhead.ops.precision import STARTABLE, refuse_second_derivative, without_autocast
from clearhead.ops.requests import HALF

# Logits of one chunk stay near a core's caches at a vocabulary of some thousands.
ROWS = 1024
# Logits of one chunk on CUDA: 256 MiB in half precision.
LOGITS = 2**27


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Σ −log softmax(x Wᵀ)[target] over the rows whose target is not `ignore_index`.

    The [N, V] logits never exist at once: each chunk's gradient is computed with its loss. Products
    run in the dtype of x, the softmax in float32. There is no second derivative.

    Args:
        weight_VD: the output embedding; cast to the dtype of x.
        target_N: int64 class of each row.

    Returns:
        The sum, float32 scalar (float64 for float64 inputs).
    """
    if not x_ND.is_meta and torch.is_autocast_enabled(x_ND.device.type):
        x_ND = x_ND.to(torch.get_autocast_dtype(x_ND.device.type))
    return _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int
    ) -> Tensor:
        learning = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        compute = _on_cuda if x_ND.is_cuda else _by_chunks
        with without_autocast(x_ND):
            total, dx, dweight = compute(x_ND, weight_VD, target_N, ignore_index, learning)
        if learning:
            ctx.save_for_backward(dx, dweight)
        ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        dx, dweight = ctx.saved_tensors
        return (dx * grad).to(dx.dtype), (dweight * grad).to(ctx.dtype), None, None


def _by_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    ignore_index: int,
    learning: bool,
    rows: int = ROWS,
    chunk: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of x and, in float32, of the weight; empty if not `learning`."""
    exact = torch.promote_types(x_ND.dtype, torch.float32)
    weight = weight_VD.to(x_ND.dtype)
    total = torch.zeros((), dtype=exact, device=x_ND.device)
    dx: list[Tensor] = []
    dweight = torch.zeros(weight_VD.shape if learning else (0,), dtype=exact, device=x_ND.device)
    for x, target in zip(x_ND.split(rows), target_N.split(rows), strict=True):
        logits = torch.matmul(x, weight.T)
        total = total + (chunk or _chunk)(logits, target, ignore_index, learning)
        if learning:
            dx.append(torch.matmul(logits, weight))
            if x.is_cuda and x.dtype in HALF:
                torch.addmm(dweight, logits.T, x, out_dtype=exact, out=dweight)
            else:
                dweight += torch.matmul(logits.T, x)
        del logits  # before the next chunk's
    return total, torch.cat(dx) if dx else x_ND.new_empty(0), dweight


def _chunk(logits: Tensor, target: Tensor, ignore_index: int, learning: bool) -> Tensor:
    """The loss of some rows; if `learning`, their logits become its gradient."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (target != ignore_index)[:, None]
    index = torch.where(counted, target[:, None], 0)
    lse = torch.logsumexp(wide, -1, keepdim=True)
    loss = torch.where(counted, lse - wide.gather(1, index), 0.0).sum()
    if not learning:
        return loss
    if torch.compiler.is_compiling():  # a comparison fuses, a scatter writes float32 logits
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = torch.exp(wide - lse) - (columns == index).to(lse.dtype)
        logits.copy_(torch.where(counted, gradient, 0.0))
        return loss
    wide.sub_(lse).exp_().scatter_add_(1, index, -torch.ones_like(lse)).masked_fill_(~counted, 0.0)
    if wide is not logits:
        logits.copy_(wide)
    return loss


@torch.library.custom_op("clearhead::linear_cross_entropy", mutates_args=())
def _on_cuda(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, learning: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x_ND, weight_VD = x_ND.detach(), weight_VD.detach()
    with torch.no_grad():
        rows = max(ROWS // 4, LOGITS // weight_VD.shape[0])
        return _by_chunks(x_ND, weight_VD, target_N, ignore_index, learning, rows, _compiled())


@_on_cuda.register_fake
def _(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, learning: bool) -> Any:
    exact = torch.promote_types(x.dtype, torch.float32)
    gradients = (x.shape, weight.shape) if learning else ((0,), (0,))
    dx, dweight = x.new_empty(gradients[0]), weight.new_empty(gradients[1], dtype=exact)
    return x.new_empty((), dtype=exact), dx, dweight


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_chunk) if STARTABLE else _chunk
