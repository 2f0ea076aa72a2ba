"""Adding a sink or a prefix, as a null key, to attention's output: (o, lse) → (o1, lse1).

With lse1 = logaddexp(lse, s) the output is o1 = o · exp(lse − lse1), plus value · exp(s − lse1)
where the sink has a value. A softmax kernel's *own* backward gives the exact gradient from
(o1, lse1): it recomputes P = exp(score − lse1) and the row term rowsum(dO ∘ o1).
"""

import torch
from torch import Tensor

from clearhead.ops.precision import without_autocast


def join(
    o_BHTV: Tensor, lse_BHT: Tensor, sink: Tensor, value_BHTV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o1, lse1) from softmax's (o, lse), which may be overwritten."""
    null_BHT = by_row(sink, lse_BHT)
    lse1_BHT = torch.logaddexp(lse_BHT, null_BHT)
    # In place: one pass, whose arithmetic is float32 and whose result has the dtype of o.
    o_BHTV = o_BHTV.mul_(torch.exp(lse_BHT - lse1_BHT)[..., None])
    if value_BHTV is not None:
        o_BHTV = o_BHTV.addcmul_(torch.exp(null_BHT - lse1_BHT)[..., None], value_BHTV)
    return o_BHTV, lse1_BHT


def by_row(sink: Tensor, lse_BHT: Tensor) -> Tensor:
    """The logit (one, [H], or [B, H, T]) broadcast against the log-sum-exp."""
    sink = sink.to(lse_BHT.dtype)
    return sink[:, None] if sink.ndim == 1 else sink


def gradients(
    sink: Tensor, value_BHTV: Tensor | None, grad: Tensor, o_BHTV: Tensor, lse_BHT: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of sink and value: p · rowsum(dO ∘ (value − o)), p · dO; p = exp(sink − lse).

    o and lse include the sink; the first has its shape. Without a value: −p · rowsum(dO ∘ o), None.
    """
    p_BHT = torch.exp(by_row(sink, lse_BHT) - lse_BHT)
    # In the dtype of the sum, without copies of half-precision tensors: two passes, not five.
    zero = lse_BHT.new_zeros(1)
    product = torch.addcmul(zero, grad, o_BHTV, value=-1)
    if value_BHTV is not None:
        product = product.addcmul_(grad, value_BHTV)
    gradient_BHT = p_BHT * product.sum(-1)
    dsink = (gradient_BHT if sink.ndim == 3 else gradient_BHT.sum((0, 2))).to(sink.dtype)
    return dsink, None if value_BHTV is None else (p_BHT[..., None] * grad).to(value_BHTV.dtype)


def as_null(
    q_BHTD: Tensor, prefix: tuple[Tensor, Tensor], sink: float | Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """A prefix as one null key for each query: logit [B, H, T] and value [B, H, T, V] for `join`.

    Both are float32 at least. The sink of `ops.attend` joins the logit, with value 0.
    """
    exact = torch.promote_types(q_BHTD.dtype, torch.float32)
    with without_autocast(q_BHTD):
        k_BGND, v_BGNV = (x.to(exact) for x in prefix)
        # The queries of a group are rows over its keys.
        q_BGRD = q_BHTD.to(exact).reshape(q_BHTD.shape[0], k_BGND.shape[1], -1, q_BHTD.shape[3])
        score_BGRN = q_BGRD @ k_BGND.mT * scale
        logit_BGR = score_BGRN.logsumexp(-1)
        logit_BHT = logit_BGR.view(q_BHTD.shape[:3])
        if sink is not None:
            sink = torch.as_tensor(sink, dtype=exact, device=q_BHTD.device)
            logit_BHT = torch.logaddexp(logit_BHT, by_row(sink, logit_BHT))
            logit_BGR = logit_BHT.view(logit_BGR.shape)
        value_BGRV = torch.exp(score_BGRN - logit_BGR[..., None]) @ v_BGNV
        return logit_BHT, value_BGRV.view(*q_BHTD.shape[:3], -1)
