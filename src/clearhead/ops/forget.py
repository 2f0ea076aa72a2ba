"""Learned decay without a T × T bias: extra columns of queries and keys carry Σ log f."""

import torch
from torch import Tensor

from clearhead.ops.alibi import bfloat16_parts

# Sums of gates reach far beyond float16, a 256th of them hardly.
_UNIT = 256.0


def forget_columns(
    log_gates_BPSR: Tensor, queries: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Columns for queries, [B, P · R, T, N], and keys, [B, P, S, N], for scores of `dtype`.

    Their product times `scale` is c_i − c_j, c the running sum of a head's log f: the sum over the
    keys after j up to i. It is 0 at a token's own key, so a sink's logit stays comparable.

    c is summed in float64, counted from the last key, and split into parts of 8 significant bits,
    which every dtype holds: 3 of them, or 7 for float64. A logit is off by about 2^−23 of the
    largest |c|. A key has the parts of all R heads that share it, and a query picks its own.

    Args:
        log_gates_BPSR: log f of each key, for the R heads that read each of P keys; 0 for padding.
        queries: T, the last of the keys.
    """
    heads_of_a_key = log_gates_BPSR.shape[-1]
    sums = log_gates_BPSR.double().cumsum(2)
    sums = (sums - sums[:, :, -1:].detach()) / (scale * _UNIT)
    parts = torch.stack(bfloat16_parts(sums, 7 if dtype == torch.float64 else 3), -1)
    own_BHTN = parts[:, :, -queries:].permute(0, 1, 3, 2, 4).flatten(1, 2)
    of_keys = parts.flatten(3)
    one = torch.eye(heads_of_a_key, dtype=sums.dtype, device=sums.device)
    picked_HN = one.repeat_interleave(parts.shape[-1], 1).repeat(parts.shape[1], 1)
    picked = (-_UNIT * picked_HN)[:, None].expand(*own_BHTN.shape[:3], -1)
    unit = of_keys.new_full((), _UNIT).expand(*of_keys.shape[:3], parts.shape[-1])
    spare = -(of_keys.shape[-1] + parts.shape[-1]) % 8  # stock CUDA kernels want whole eights
    q, k = torch.cat([own_BHTN, picked], -1), torch.cat([unit, of_keys], -1)
    return tuple(torch.nn.functional.pad(x, (0, spare)).to(dtype) for x in (q, k))  # type: ignore[return-value]
