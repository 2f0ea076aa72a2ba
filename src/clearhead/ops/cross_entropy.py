"""The loss of a language model without its logits: by chunks of rows, gradient made on the way."""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops import higher_order, oracles
from clearhead.ops.precision import transformed, without_autocast

# Logits of one chunk stay near a core's caches at a vocabulary of some thousands.
ROWS = 1024


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Σ −log softmax(x Wᵀ)[target] over the rows whose target is not `ignore_index`.

    The [N, V] logits are never held: each chunk's gradient is computed beside its loss and only
    scaled in the backward pass. Products run in the dtype of x, the softmax in float32. Under
    create_graph=True the backward pass is the oracle's instead, with all logits in float64.

    Args:
        x_ND: hidden states.
        weight_VD: the output embedding; cast to the dtype of x.
        target_N: int64 class of each row.

    Returns:
        The sum, float32 scalar (float64 for float64 inputs).
    """
    if not x_ND.is_meta and torch.is_autocast_enabled(x_ND.device.type):
        x_ND = x_ND.to(torch.get_autocast_dtype(x_ND.device.type))
    if transformed():
        logits_NV = torch.matmul(x_ND, weight_VD.to(x_ND.dtype).T)
        return torch.nn.functional.cross_entropy(
            logits_NV.to(torch.promote_types(x_ND.dtype, torch.float32)),
            target_N,
            ignore_index=ignore_index,
            reduction="sum",
        )
    return _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int
    ) -> Tensor:
        exact = torch.promote_types(x_ND.dtype, torch.float32)
        weight = weight_VD.to(x_ND.dtype)
        total = torch.zeros((), dtype=exact, device=x_ND.device)
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx = []
        dweight = torch.zeros_like(weight_VD, dtype=exact) if wants_gradient else None
        with without_autocast(x_ND):
            for x, target in zip(x_ND.split(ROWS), target_N.split(ROWS), strict=True):
                logits = torch.matmul(x, weight.T).to(exact)
                kept = (target != ignore_index)[:, None]
                index = torch.where(kept, target[:, None], 0)
                lse = torch.logsumexp(logits, -1, keepdim=True)
                total = total + torch.where(kept, lse - logits.gather(1, index), 0.0).sum()
                if dweight is not None:
                    dlogits = torch.exp(logits - lse)
                    dlogits = dlogits.scatter_add(1, index, -torch.ones_like(lse))
                    dlogits = torch.where(kept, dlogits, 0.0).to(x.dtype)
                    dx.append(torch.matmul(dlogits, weight))
                    dweight = dweight + torch.matmul(dlogits.T, x)
        if wants_gradient:
            ctx.save_for_backward(torch.cat(dx), dweight, x_ND, weight_VD, target_N)
        ctx.ignore_index = ignore_index
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dweight, x, weight, target = ctx.saved_tensors
        if higher_order.requested():

            def plain(x: Tensor, weight: Tensor) -> Tensor:
                return oracles.linear_cross_entropy(
                    x, weight, target, ignore_index=ctx.ignore_index
                )

            needed = ctx.needs_input_grad[:2]
            return *higher_order.gradients(plain, (x, weight), needed, grad), None, None
        return (dx * grad).to(dx.dtype), (dweight * grad).to(weight.dtype), None, None
