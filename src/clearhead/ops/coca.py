"""Collinear constrained attention (CoCA, arXiv 2309.08646), as plain dot products of width D.

With A_j = q_j² + q_(j+D/2)² and t = relu(x W_T), of width D/2:

| form | score · √D | queries | keys |
| --- | --- | --- | --- |
| exact (eqs. 9, 17) | Σ_j t_j A_j cos((m−n)θ_j) | R_m [A; 0] | R_n [t; 0] |
| strict (q's halves equal) | the same, A_j = 2 q_j² | R_m [A; 0] | R_n [t; 0] |
| slack (eq. 10; the authors' code) | no function of m − n | q ∘ R_m q | R_n [t; t] |

Squares, t and rotations are float32, rounded once to the input's dtype.
"""

from typing import Literal

import torch
from torch import Tensor

from clearhead.ops.precision import widened
from clearhead.ops.rope import RotaryTable, cos_sin, rotate

Form = Literal["exact", "strict", "slack"]


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
