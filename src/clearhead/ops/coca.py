"""Collinear constrained attention (CoCA): queries and keys that start from the same direction.

Three functions share the paper's name (arXiv 2309.08646); all are plain dot products of width D, so
that any attention kernel serves, without the N × N × D tensor that the paper believes necessary.
With A_j = q_j² + q_(j+D/2)² and t = relu(x W_T), of width D/2:

| form | score · √D | queries | keys |
| --- | --- | --- | --- |
| exact (eqs. 9, 17) | Σ_j t_j A_j cos((m−n)θ_j) | R_m [A; 0] | R_n [t; 0] |
| strict (q's halves equal) | the same, A_j = 2 q_j² | R_m [A; 0] | R_n [t; 0] |
| slack (eq. 10; the authors' code) | no function of m − n | q ∘ R_m q | R_n [t; t] |

Squares, t and rotations are float32, rounded once to the input's dtype: A overflows float16 where
|q| is above 181.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.ops import lone
from clearhead.ops.precision import is_exporting, widened, without_autocast
from clearhead.ops.rope import cos_sin, rotate
from clearhead.ops.visibility import Visibility

Form = Literal["exact", "strict", "slack"]
RotaryTable = tuple[Tensor, Tensor]


def coca_queries(q_BHTD: Tensor, table: RotaryTable, form: Form) -> Tensor:
    """q̃, [B, H, T, D] in the dtype of q. q is [B, H, T, D], for "strict" [B, H, T, D/2]."""
    q = widened(q_BHTD)
    if form == "slack":
        return (q * rotate(q, table)).to(q_BHTD.dtype)
    if form == "strict":
        amplitude = 2 * q.square()
    else:
        first, second = q.square().chunk(2, -1)
        amplitude = first + second
    cos, sin = cos_sin(table)
    return torch.cat([amplitude * cos, amplitude * sin], -1).to(q_BHTD.dtype)


def coca_keys(t_BGSE: Tensor, table: RotaryTable, form: Form) -> Tensor:
    """k̃, [B, G, S, D] in the dtype of t, from x W_T before the relu, [B, G, S, D/2]."""
    t = widened(t_BGSE).relu()
    cos, sin = cos_sin(table)
    if form == "slack":
        cos, sin = cos - sin, cos + sin
    return torch.cat([t * cos, t * sin], -1).to(t_BGSE.dtype)


def attend_unrotated(
    q_BHTD: Tensor,
    t_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    table: RotaryTable,
    form: Form,
    attend: Any,
    visibility: Visibility,
    sink: float | Tensor | None,
    scale: float,
    **options: Any,
) -> Tensor:
    """`attend` over `coca_keys(t, table, form)`; a lone query turns t as it reads it.

    Args:
        q_BHTD: as in `coca_queries`. t_BGSE: x W_T before the relu, [B, G, S, D/2].
        table: of the last S keys, or of more.
        attend: attention function, called with `options`, for all else.

    Returns:
        [B, H, T, V].
    """
    queries, keys = q_BHTD.shape[2], t_BGSE.shape[2]
    table = table[0][..., -keys:, :], table[1][..., -keys:, :]
    settled = visibility.settled(queries, keys)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHTD, t_BGSE, v_BGSV))
    aside = learns or is_exporting() or options.get("prefix") is not None
    if aside or not lone.serves(q_BHTD, settled):
        k_BGSD = coca_keys(t_BGSE, table, form)
        options |= {"visibility": visibility, "sink": sink, "scale": scale}
        return attend(q_BHTD, k_BGSD, v_BGSV, **options)
    if form == "slack":  # q · R [t; t] as q′ · R [t; 0]
        first_half, second_half = q_BHTD.chunk(2, -1)
        q_BHTD = torch.cat([first_half + second_half, second_half - first_half], -1)
    with without_autocast(q_BHTD):
        return lone.unrotated(
            q_BHTD, t_BGSE, v_BGSV, table, sink=sink, scale=scale, visibility=settled
        )


def folded_authors_weight(weight_HC: Tensor, head_dim: int) -> Tensor:
    """W_T of the authors' code, [G · D, C], as ours, [G · D/2, C]: the mean of a head's halves.

    Their code averages the two halves of x W_T before the relu, so that half of its weights are
    redundant.
    """
    return weight_HC.unflatten(0, (-1, 2, head_dim // 2)).mean(1).flatten(0, 1)
