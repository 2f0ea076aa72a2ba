"""Value and output projections: linear, identity, or reparametrised (arXiv 2311.01906)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.bases import PAPER
from clearhead.nn.init import STARTS, residual_output, starting
from clearhead.spec import Declaration, LayerSpec


class Reparametrised(nn.Module):
    """W = α W_init + β ΔW, from ΔW = 0 and α = 1, all three trained (arXiv 2311.01906, eq. 6).

    W_init is the identity, which costs no product, or a random matrix, stored in checkpoints.
    """

    initial: Tensor

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        shape = (layer.hidden_size, layer.hidden_size)
        self.kind = layer.value_init or "identity"
        self.std = layer.initializer_range
        self.beta_start = layer.value_gain
        self.delta = nn.Parameter(torch.empty(shape))
        self.alpha, self.beta = (nn.Parameter(torch.empty(1)) for _ in range(2))
        if self.kind != "identity":
            self.register_buffer("initial", torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.delta)
        nn.init.ones_(self.alpha)
        nn.init.constant_(self.beta, self.beta_start)
        if self.kind != "identity":
            STARTS[self.kind](self.initial, self.std)

    def forward(self, x_BTN: Tensor) -> Tensor:
        if self.kind == "identity":
            return x_BTN * self.alpha + F.linear(x_BTN, self.delta) * self.beta
        return F.linear(x_BTN, self.alpha * self.initial + self.beta * self.delta)


def _linear_value(layer: LayerSpec) -> nn.Linear:
    width = layer.num_value_heads * layer.head_dim
    linear = nn.Linear(layer.hidden_size, width, bias=layer.bias)
    return starting(linear, STARTS[layer.value_init or "normal"])


def _linear_projection(layer: LayerSpec) -> nn.Linear:
    if layer.value_init is None:
        scaled = layer.attention_skip == "identity" and layer.attention_gain is None
        return residual_output(layer, layer.width, scaled=scaled)
    linear = nn.Linear(layer.width, layer.hidden_size, bias=layer.bias)
    return starting(linear, STARTS[layer.value_init])


def _as_wide_as_the_stream(layer: LayerSpec) -> str | None:
    if layer.width != layer.hidden_size:
        found = f"the heads' {layer.width} channels are not the stream's {layer.hidden_size}"
        return f"{found}: choose num_attention_heads × head_dim = hidden_size"
    return None


def _value_refuses(layer: LayerSpec) -> str | None:
    if layer.num_value_heads != layer.num_attention_heads:
        found = f"{layer.num_attention_heads} heads cannot share {layer.num_value_heads} values"
        return f"{found}: leave num_value_heads out"
    return _as_wide_as_the_stream(layer)


def _drawn_refuses(layer: LayerSpec) -> str | None:
    if layer.value_init not in (None, *STARTS):
        return f"value_init={layer.value_init!r} is none of {', '.join(STARTS)}"
    if layer.value_init == "identity":
        return _as_wide_as_the_stream(layer)
    return None


def _linear_value_refuses(layer: LayerSpec) -> str | None:
    return _value_refuses(layer) if layer.value_init == "identity" else _drawn_refuses(layer)


# A token's values are cached.
_values = partial(Declaration, "values", cache=lambda layer: layer.num_value_heads * layer.head_dim)
_projections = partial(Declaration, "projections")
_IDENTITY, _EQ_6 = "arXiv 2311.01906, section 4.2", "arXiv 2311.01906, eq. 6"
DECLARATIONS = (
    _values("linear", "x W_V", PAPER, _linear_value, refuses=_linear_value_refuses),
    _values(
        "identity",
        "attention's input itself; no matrix",
        _IDENTITY,
        lambda layer: nn.Identity(),
        refuses=_value_refuses,
    ),
    _values(
        "reparametrised",
        "x (α W_init + β ΔW), with ΔW from 0",
        _EQ_6,
        Reparametrised,
        refuses=lambda layer: _drawn_refuses(layer) or _value_refuses(layer),
        flops=lambda layer, length: 2.0 * layer.hidden_size**2,
    ),
    _projections("linear", "heads W_P", PAPER, _linear_projection, refuses=_drawn_refuses),
    _projections(
        "identity",
        "the heads side by side; no matrix",
        _IDENTITY,
        lambda layer: nn.Identity(),
        refuses=_as_wide_as_the_stream,
    ),
    _projections(
        "reparametrised",
        "heads (α W_init + β ΔW), with ΔW from 0",
        _EQ_6,
        Reparametrised,
        refuses=lambda layer: _drawn_refuses(layer) or _as_wide_as_the_stream(layer),
        flops=lambda layer, length: 2.0 * layer.hidden_size**2,
    ),
)
