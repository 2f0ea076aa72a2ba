"""Functions of the heads' outputs before `o_proj`: shaped attention, gates, and XSA."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.bases import Weights, with_doubled_output
from clearhead.nn.registry import REGISTRY
from clearhead.spec import Declaration, LayerSpec


class SkipInit(nn.Module):
    """α I + β A, a trained α and β for each head, from 1 and 0 (arXiv 2302.10322). A base.

    W_Q, and so every score, starts at 0, unless `query_range` says otherwise.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def gains(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gains of the identity, of attention and of its centre, [H]."""
        return self.alpha, self.beta, None

    def forward(self, x_BTC: Tensor, o_BTC: Tensor, centring: Callable[[Tensor], Tensor]) -> Tensor:
        """The heads' outputs, from values x, attention's output o, and C x from [B, T, H, D]."""
        alpha, beta, gamma = self.gains()
        x, o = (each.unflatten(-1, (len(alpha), -1)) for each in (x_BTC, o_BTC))
        centre = None if gamma is None else centring(x)
        return ops.shaped(x, o, centre, alpha, beta, gamma).flatten(2)

    def effective_weights(
        self, weights_BHRS: Tensor, own_BHRS: Tensor, centring: Callable[[], Tensor]
    ) -> Tensor:
        """The matrix that multiplies the values, from A, `own` (rows of the identity), and C."""
        (alpha, beta, gamma), dtype = self.gains(), weights_BHRS.dtype
        mixed = alpha.to(dtype)[:, None, None] * own_BHRS
        mixed = mixed + beta.to(dtype)[:, None, None] * weights_BHRS
        return mixed if gamma is None else mixed - gamma.to(dtype)[:, None, None] * centring()


class Shaped(SkipInit):
    """α I + β A − γ C, three trained gains for each head, all from 1 (arXiv 2311.01906, eq. 5).

    C is A at W_Q = 0, where W_Q starts, so that the whole is the identity (footnote 3): C x is the
    mean of the n visible values under softmax, their sum / (n + exp(b)) under a sink b.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.beta, self.gamma = (nn.Parameter(torch.ones(heads)) for _ in range(2))

    def reset_parameters(self) -> None:
        for gain in self.parameters():
            nn.init.ones_(gain)

    def gains(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.alpha, self.beta, self.gamma


def _shaping_refuses(layer: LayerSpec) -> str | None:
    if layer.scores != "dot" and not layer.query_range:
        return "from W_Q = 0 no gradient ever moves such scores: give query_range=0.02"
    if layer.num_value_heads != layer.num_attention_heads:
        return "each head adds its own value: leave num_value_heads out, and only keys are shared"
    if layer.maps == "differential" and layer.head_norm != "none":
        return "a head's norm leaves no matrix to mix with the identity: choose head_norm='none'"
    return None


class Gate(nn.Module):
    """o ∘ σ(x W_G), a number for each token and channel, or for each token and head.

    W_G starts as any matrix, so gates near ½ (arXiv 2505.06708, G1, elementwise and headwise).
    """

    def __init__(self, layer: LayerSpec, heads: int, *, headwise: bool) -> None:
        super().__init__()
        width = heads if headwise else layer.width
        self.gate_proj = nn.Linear(layer.hidden_size, width, bias=False)

    def forward(self, o_BTC: Tensor, x_BTC: Tensor, own: Callable[[], Tensor]) -> Tensor:
        gate_BTN = torch.sigmoid(self.gate_proj(x_BTC))
        return (o_BTC.unflatten(-1, (gate_BTN.shape[-1], -1)) * gate_BTN[..., None]).flatten(-2)


def _gate(name: str, summary: str, *, headwise: bool) -> Declaration:
    def adopt(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
        """Gates of exactly ½, and W_O doubled."""
        heads = REGISTRY.find("maps", after.maps).heads(after)
        gates = heads if headwise else after.width
        gate = weights["q_proj.weight"].new_zeros(gates, after.hidden_size)
        return {**with_doubled_output(weights, after), "epilogue.gate_proj.weight": gate}

    return Declaration(
        *("epilogue", name, f"o ∘ σ(x W_G), a gate for each {summary}", "arXiv 2505.06708 (G1)"),
        partial(Gate, headwise=headwise),
        flops=lambda layer, length: float(layer.width),
        adopt=adopt,
    )


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


def _xsa_refuses(layer: LayerSpec) -> str | None:
    if layer.shaping != "none":
        return f"shaping={layer.shaping!r} adds what it removes again: choose shaping='none'"
    if layer.attention_skip == "none":
        return "nothing is left of a text's first token: choose attention_skip='identity'"
    return None


_shaping = partial(Declaration, "shaping", refuses=_shaping_refuses)
DECLARATIONS = (
    _shaping(
        "skipinit",
        "α I + β A, from α = 1 and β = 0, a pair for each head; W_Q from 0",
        "arXiv 2302.10322; 2311.01906, eq. 4",
        SkipInit,
        flops=lambda layer, length: 3.0 * layer.width,
    ),
    _shaping(
        "shaped",
        "α I + β A − γ C, all from 1, three gains a head; C is A at W_Q = 0, where W_Q starts",
        "arXiv 2311.01906, eq. 5",
        Shaped,
        flops=lambda layer, length: 8.0 * layer.width,  # the running mean beside the three gains
    ),
    _gate("gate", "channel", headwise=False),
    _gate("gate-headwise", "head", headwise=True),
    Declaration(
        "epilogue",
        "xsa",
        "o − (o · v̂) v̂: a head's output without its component along the token's own value",
        "arXiv 2603.09078",
        ExclusiveSelfAttention,
        refuses=_xsa_refuses,
        anneals=True,
        flops=lambda layer, length: 6.0 * layer.width,
    ),
)
