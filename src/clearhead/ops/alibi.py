"""Biases of the scores as a few more columns of queries and keys, without a T × T matrix.

ALiBi's columns add −slope · (i − j), a forget gate's Σ log f.
"""

import torch
from torch import Tensor

# Stock CUDA kernels want widths of whole eights: 4 columns for j, 3 for i, and one of zeros.
COLUMNS = 8
# Sums of gates reach far beyond float16, a 256th of them hardly.
_UNIT = 256.0


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi's slopes, 2^(−8h/n) for head h = 1 … n, float64 [heads] (arXiv 2108.12409).

    If n is no power of two: the slopes for p, the power below, then every other one for 2p.
    """
    power = 1 << (heads.bit_length() - 1)
    h = torch.arange(1, heads + 1, dtype=torch.float64, device=device)
    return torch.exp2(-8 / power * torch.where(h > power, h - power - 0.5, h))


def alibi_columns(
    queries_BT: Tensor, keys_BS: Tensor, slopes_H: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Columns for queries, float32 [B, H, T, 8], and keys, [B, 1, S, 8], at their positions.

    Their product times `scale` is −slope · (i − j), 0 at a token's own key, so that a sink's logit
    stays comparable. bfloat16 holds every number exactly, in at most 8 significant bits: positions
    are split in base 256 (two digits: up to 65,535), c = slope / scale is the sum of two parts, and
    c · i that of three. Keys carry no head's slope, so that heads may share them.
    """
    parts_H = bfloat16_parts(slopes_H / scale, 2)
    own_BHT = sum(parts_H)[:, None] * queries_BT[:, None].double()  # type: ignore[index]
    shape = own_BHT.shape
    columns = [(256 * digit * part)[None, :, None] for part in parts_H for digit in (1, 1 / 256)]
    columns += [-part for part in bfloat16_parts(own_BHT / 256, 3)]
    columns += [torch.zeros_like(own_BHT)]
    q_BHT8 = torch.stack([column.expand(shape) for column in columns], -1)
    high, low = keys_BS.div(256, rounding_mode="floor"), keys_BS.remainder(256)
    wide = torch.full_like(keys_BS, 256)
    k_BS8 = torch.stack([high, low, high, low, wide, wide, wide, torch.zeros_like(wide)], -1)
    return q_BHT8.float(), k_BS8[:, None].float()


def forget_columns(
    log_gates_BPSR: Tensor, queries: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Columns for queries, [B, P · R, T, N], and keys, [B, P, S, N], for scores of `dtype`.

    Their product times `scale` is c_i − c_j, c the running sum of a head's log f: the sum over the
    keys after j up to i. It is 0 at a token's own key, so a sink's logit stays comparable.

    c is summed in float64 from the last key, and split into 3 parts of 8 significant bits (7 for
    float64). A logit is off by about 2^−23 of the largest |c|. A key has the parts of all R heads
    that share it, and a query picks its own.

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


def with_columns(x_BHTD: Tensor, columns: Tensor) -> Tensor:
    """x with columns beside it, [B, H, T, D + columns]; heads that share a slope are neighbours."""
    heads = x_BHTD.shape[1]
    if columns.shape[1] > 1:
        columns = columns.repeat_interleave(heads // columns.shape[1], 1)
    batch, _, length, _ = x_BHTD.shape
    columns = columns.expand(batch, heads, length, -1)
    return torch.cat([x_BHTD, columns.to(x_BHTD.dtype)], -1)


def bfloat16_parts(x: Tensor, count: int) -> list[Tensor]:
    """x as a sum of `count` parts of 8 significant bits; only the first passes on a gradient."""
    parts = []
    for _ in range(count):
        parts.append(x.bfloat16().to(x.dtype))
        x = x - parts[-1]
    return parts
