"""Layers that act on each position alone: norms, MLPs, OSP's EmbProj (arXiv 2506.19697)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.bases import PAPER, nothing
from clearhead.nn.init import orthogonal, residual_output
from clearhead.ops import rms_norm
from clearhead.ops.precision import without_autocast
from clearhead.spec import Declaration, LayerSpec


class RMSNorm(nn.Module):
    """x / rms(x), times a gain for each channel; computed in float32, in the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RMSNormSingle(RMSNorm):
    """RMSNorm with one gain for all channels."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(1, eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with gain and bias, in float32 under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            return super().forward(x)


def _qk_refuses(layer: LayerSpec) -> str | None:
    from_zero = layer.shaping in ("shaped", "skipinit")
    if layer.query_range == 0 or (layer.query_range is None and from_zero):
        return "W_Q = 0 would have its gradient times 1/eps: choose a query_range above 0"
    if layer.scores != "dot":
        return f"scores={layer.scores!r} read lengths, which it removes: choose scores='dot'"
    return None


class MLP(nn.Module):
    """f(x W_up) W_down, or with a gate (f(x W_gate) ∘ x W_up) W_down; f by `layer.mlp`."""

    def __init__(
        self,
        layer: LayerSpec,
        rotation: nn.Module | None,
        *,
        function: Callable[[Tensor], Tensor],
        gated: bool,
    ) -> None:
        super().__init__()
        width = layer.intermediate_size
        if gated:
            self.gate_proj = nn.Linear(layer.hidden_size, width, bias=layer.bias)
        self.up_proj = nn.Linear(layer.hidden_size, width, bias=layer.bias)
        self.rotation = rotation
        scaled = layer.mlp_skip == "identity" and layer.mlp_gain is None
        self.down_proj = residual_output(layer, width, scaled=scaled)
        self.function, self.gated = function, gated

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.gated:
            gate, wide = self.function(self.gate_proj(x_BTC)), self.up_proj(x_BTC)
            # In the gate's memory where no gradient needs it: fresh memory costs a CPU most of it.
            wide = gate * wide if torch.is_grad_enabled() else gate.mul_(wide)
        else:
            wide = self.function(self.up_proj(x_BTC))
        return self.down_proj(wide if self.rotation is None else self.rotation(wide))


class EmbeddingProjection(nn.Module):
    """x Pᵀ, for x [..., C] and P [C, C], from a random orthogonal P (arXiv 2506.19697, EmbProj).

    P is no `nn.Linear`: quantisation leaves it in full precision, as embedding and head.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        orthogonal(self.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu(x: Tensor) -> Tensor:
    """ReLU of rows, [N, C]: of [B, T, C] a compiled gradient keeps the signs, which is slow."""
    return F.relu(x.flatten(0, -2)).view_as(x)


def _mlp(
    name: str, summary: str, source: str, function: Callable[[Tensor], Tensor], gated: bool = False
) -> Declaration:
    return Declaration("mlp", name, summary, source, partial(MLP, function=function, gated=gated))


_norm, _qk_norm = partial(Declaration, "norm"), partial(Declaration, "qk_norm")
_GATED, _TWO = "gate times a linear branch; three matrices", "two matrices"
DECLARATIONS = (
    _norm("rmsnorm", "root mean square, a gain for each channel", "arXiv 1910.07467", RMSNorm),
    _norm(
        "rmsnorm-single",
        "root mean square, one gain for all channels (part of the OrthoAdam recipe)",
        "arXiv 2410.17174, RMSNorm-S",
        RMSNormSingle,
    ),
    _norm(
        "layernorm",
        "mean and variance, gain and bias for each channel",
        "arXiv 1607.06450",
        LayerNorm,
    ),
    _norm(
        "none",
        "nothing, but LayerNorm in the first layer and after the last",
        "arXiv 2311.01906, section 4.4, as its authors' code does",
        lambda width, eps: nn.Identity(),
    ),
    _qk_norm("none", "queries and keys as projected", PAPER, nothing),
    _qk_norm(
        "rmsnorm",
        "RMSNorm of each head's queries and keys, with one gain a channel for all heads",
        "arXiv 2010.04245, as Qwen3 has it",
        lambda layer, width: RMSNorm(width, layer.norm_eps),
        refuses=_qk_refuses,
        flops=lambda layer, length: (
            4.0 * (layer.num_attention_heads + layer.num_key_value_heads) * layer.head_dim
        ),
    ),
    _mlp("swiglu", f"silu {_GATED}", "arXiv 2002.05202", F.silu, gated=True),
    _mlp("geglu", f"exact GELU {_GATED}", "arXiv 2002.05202", F.gelu, gated=True),
    _mlp("gelu", f"GELU in GPT-2's tanh form; {_TWO}", "arXiv 1606.08415", _gelu),
    _mlp(
        "gelu-exact",
        f"GELU by the error function; {_TWO}",
        "arXiv 1606.08415, as GPT-NeoX has it",
        F.gelu,
    ),
    _mlp("relu", f"ReLU; {_TWO}", PAPER, _relu),
)
