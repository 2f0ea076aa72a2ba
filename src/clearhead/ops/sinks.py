"""A sink beside every row of keys: its exchange of (o, lse) for (o1, lse1), and its gradient.

With lse1 = logaddexp(lse, s) the output is o1 = o · exp(lse − lse1). Handing (o1, lse1) to a
softmax kernel's *own* backward in place of (o, lse) gives the exact gradient, since that kernel
recomputes P = exp(score − lse1) and the row term rowsum(dO ∘ o1).
"""

import torch
from torch import Tensor


def join(o_BHTV: Tensor, lse_BHT: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o1, lse1) of softmax's own (o, lse), which are given up; unchanged without a sink."""
    if sink is None:
        return o_BHTV, lse_BHT
    lse1_BHT = torch.logaddexp(lse_BHT, by_row(sink, lse_BHT))
    # In place: one pass, whose arithmetic is float32 and whose result has the dtype of o.
    return o_BHTV.mul_(torch.exp(lse_BHT - lse1_BHT)[..., None]), lse1_BHT


def by_row(sink: Tensor, lse_BHT: Tensor) -> Tensor:
    """A logit a head, [H], or a query, [B, H, T], as it meets the log-sum-exp."""
    sink = sink.to(lse_BHT.dtype)
    return sink if sink.ndim == 3 else sink[:, None]


def gradient(sink: Tensor, grad: Tensor, o_BHTV: Tensor, lse_BHT: Tensor) -> Tensor:
    """−exp(sink − lse) · rowsum(dO ∘ o), summed to the sink's shape; o and lse: with the sink."""
    row_BHT = (grad.to(lse_BHT.dtype) * o_BHTV.to(lse_BHT.dtype)).sum(-1)
    gradient_BHT = -torch.exp(by_row(sink, lse_BHT) - lse_BHT) * row_BHT
    return (gradient_BHT if sink.ndim == 3 else gradient_BHT.sum((0, 2))).to(sink.dtype)
