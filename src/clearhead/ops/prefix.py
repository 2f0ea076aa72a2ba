"""Keys and values that every query sees beside its own, as a null key that has a value."""

import torch
from torch import Tensor

from clearhead.ops import groups
from clearhead.ops.sinks import by_row


def as_null(
    q_BHTD: Tensor,
    prefix: tuple[Tensor, Tensor],
    sink: float | Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each query's scores of a prefix, and what the prefix adds at that weight.

    With the output o and the log-sum-exp l over the other keys, attention over all of them is
    o · exp(l − l1) + value · exp(logit − l1), l1 = logaddexp(l, logit). So the prefix is never laid
    beside the other keys: their kernel, masks and cache stay as they are.

    Args:
        prefix: keys [B, G, N, D] and values [B, G, N, V], prepared as the others are.
        sink: as in `ops.attend`; it joins the logit, with value 0.

    Returns:
        logit [B, H, T] and value [B, H, T, V], in float32 at least.
    """
    exact = torch.promote_types(q_BHTD.dtype, torch.float32)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        k_BHND, v_BHNV = (groups.repeat(x.to(exact), q_BHTD.shape[1]) for x in prefix)
        score_BHTN = q_BHTD.to(exact) @ k_BHND.mT * scale
        logit_BHT = score_BHTN.logsumexp(-1)
        if sink is not None:
            sink = torch.as_tensor(sink, dtype=exact, device=q_BHTD.device)
            logit_BHT = torch.logaddexp(logit_BHT, by_row(sink, logit_BHT))
        return logit_BHT, torch.exp(score_BHTN - logit_BHT[..., None]) @ v_BHNV
