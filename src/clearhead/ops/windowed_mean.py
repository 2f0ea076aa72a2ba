"""Weighted mean of the keys in each query's window, by tiles, as attention itself is computed."""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.ops.precision import without_autocast
from clearhead.ops.visibility import Span, Visibility

ROWS = 128


def windowed_mean(
    x_BHSD: Tensor,
    queries: int,
    visibility: Visibility,
    weigh: Callable[[Span], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """m_t = Σ w_ts x_s / Σ w_ts over the keys that query t sees; time and memory as T · window.

    Args:
        weigh: the weights w of a span, [B or 1, H or 1, rows, keys]; 1 unless given.

    Returns:
        (mean, mass): [B, H, T, D] and Σ w_ts, [B or 1, H or 1, T], both float32 (float64 for
        float64). A query that sees no key has mean 0 and mass 0.
    """
    x = x_BHSD.to(torch.promote_types(x_BHSD.dtype, torch.float32))
    if visibility.key_mask is not None:
        x = torch.where(visibility.key_mask[:, None, :, None], x, 0)
    keys = x.shape[2]
    means, masses = [], []
    # Autocast would round the sums to bfloat16.
    with without_autocast(x):
        for span in visibility.spans(queries, keys, ROWS):
            hidden = visibility.hidden(span, queries, keys, x.device)
            weight = x.new_ones(()) if weigh is None else weigh(span)
            weight = torch.where(hidden, 0, weight) if hidden is not None else weight
            mass = weight.sum(-1, keepdim=True)
            sums = weight @ x[:, :, span.first : span.end]
            means.append(sums / torch.where(mass == 0, 1, mass))
            masses.append(mass.squeeze(-1))
    return torch.cat(means, 2), torch.cat(masses, 2)
