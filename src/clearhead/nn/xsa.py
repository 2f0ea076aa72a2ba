"""Exclusive self-attention (XSA, arXiv 2603.09078): outputs without the token's own value."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.spec import Declaration, LayerSpec


def without_own(o: Tensor, v: Tensor, strength: Tensor | float = 1.0) -> Tensor:
    """o − strength · (o · v̂) v̂ over the last dimension, v̂ = v / ‖v‖; o where v is 0.

    The arithmetic is float32 (float64 for float64); the result has the dtype of o.
    """
    exact = torch.promote_types(o.dtype, torch.float32)
    wide, v = o.to(exact), v.to(exact)
    share = (wide * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return (wide - strength * share * v).to(o.dtype)


class ExclusiveSelfAttention(nn.Module):
    """`without_own` of each head's output and the token's own value (arXiv 2603.09078).

    A head of differential attention (V1) has one value of twice the width. With `annealed_start`
    the strength, a buffer, rises from 0 in proportion to the training run, and never falls.
    """

    strength: Tensor | None

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("strength", torch.zeros(1) if layer.annealed_start else None)

    def reset_parameters(self) -> None:
        if self.strength is not None:
            nn.init.zeros_(self.strength)

    def on_step_end(self, done: float) -> None:
        if self.strength is not None:
            self.strength.clamp_(min=done)

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        o, v = (part.unflatten(-1, (self.heads, -1)) for part in (o_BTC, own()))
        strength = 1.0 if self.strength is None else self.strength
        return without_own(o, v, strength).flatten(2)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.shaping != "none":
        return f"shaping={layer.shaping!r} adds what it removes again: choose shaping='none'"
    if layer.attention_skip == "none":
        return "nothing is left of a text's first token: choose attention_skip='identity'"
    return None


DECLARATIONS = (
    Declaration(
        "epilogue",
        "xsa",
        "o − (o · v̂) v̂: a head's output without its component along the token's own value",
        "arXiv 2603.09078",
        ExclusiveSelfAttention,
        refuses=_refuses,
        anneals=True,
        flops=lambda layer, length: 6.0 * layer.width,
    ),
)
