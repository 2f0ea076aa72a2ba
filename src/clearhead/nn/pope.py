"""PoPE (arXiv 2509.10534): scores with magnitudes from content and phases from position."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.nn.bases import numbers_per_group, visible_keys, with_own_parameters
from clearhead.ops.precision import widened
from clearhead.ops.rope import RotaryTable, cos_sin
from clearhead.spec import Declaration, LayerSpec


class Polar(nn.Module):
    """Σ_c softplus(q_c) softplus(k_c) cos((n − m) θ_c + δ_c), for a query at m and a key at n.

    A plain dot product of width 2D: real parts, then imaginary ones, with an angle for each of the
    D channels, θ_c = base^(−c/D). δ, learned for each channel of a key head from 0, is read within
    [−2π, 0]: above 0 it has no gradient, as in the paper. Keys are cached as projected.
    """

    cache_unrotated = True
    attend_unrotated = None

    def __init__(self, layer: LayerSpec, prepare: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.phase_bias = nn.Parameter(torch.empty(layer.num_key_value_heads, layer.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.phase_bias)

    def queries(self, q_BHTD: Tensor, table: RotaryTable) -> Tensor:
        """[B, H, T, 2D] in the dtype of q."""
        return _cartesian(q_BHTD, *cos_sin(table))

    @with_own_parameters
    def keys(self, k_BGSD: Tensor, table: RotaryTable) -> Tensor:
        """[B, G, S, 2D] in the dtype of k."""
        cos, sin = cos_sin(table)
        # A clamp at 0, where phases start, has no gradient there from torch 2.15 on.
        above_0 = torch.finfo(torch.float32).tiny
        delta_G1D = widened(self.phase_bias).clamp(-2 * math.pi, above_0)[:, None]
        of_cos, of_sin = delta_G1D.cos(), delta_G1D.sin()
        return _cartesian(k_BGSD, cos * of_cos - sin * of_sin, sin * of_cos + cos * of_sin)


def _cartesian(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = widened(x_BHTD)
    # Softplus: compiled, PyTorch's own has a gradient of other strides than eager.
    magnitude = torch.logaddexp(x, x.new_zeros(()))
    return torch.cat([magnitude * cos, magnitude * sin], -1).to(x_BHTD.dtype)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.position != "rope":
        return f"position={layer.position!r} has no angle for each channel: choose position='rope'"
    if layer.shaping != "none":
        return "its magnitudes are above 0 at W_Q = 0, where shaping starts: choose shaping='none'"
    return None


def _flops(layer: LayerSpec, length: int) -> float:
    """The wider half of the scores, and the products of magnitudes and phases."""
    heads, groups = layer.num_attention_heads, layer.num_key_value_heads
    return layer.head_dim * (2.0 * heads * visible_keys(layer, length) + 2 * heads + 8 * groups)


DECLARATIONS = (
    Declaration(
        "scores",
        "pope",
        "Σ softplus(q_c) softplus(k_c) cos((n−m)θ_c + δ_c) / √d, δ learned a channel, from 0",
        "arXiv 2509.10534 (PoPE)",
        Polar,
        refuses=_refuses,
        rotary_width=lambda layer: 2 * layer.head_dim,
        flops=_flops,
        cache=numbers_per_group,
    ),
)
