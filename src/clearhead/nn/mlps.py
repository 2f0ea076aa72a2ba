"""Position-wise networks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.init import residual_output
from clearhead.spec import Declaration, LayerSpec


class MLP(nn.Module):
    """f(x W_up) W_down, or where it is gated (f(x W_gate) ∘ x W_up) W_down."""

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


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu(x: Tensor) -> Tensor:
    """ReLU of rows, [N, C]: their compiled gradient reads the output that the next product keeps.

    Of [B, T, C] the compiler keeps the signs besides, as booleans, and a CPU stores and loads those
    one at a time: a third of the MLP's time.
    """
    return F.relu(x.flatten(0, -2)).view_as(x)


def _mlp(
    name: str, summary: str, source: str, function: Callable[[Tensor], Tensor], *, gated: bool
) -> Declaration:
    return Declaration("mlp", name, summary, source, partial(MLP, function=function, gated=gated))


_GATED, _TWO = "gate times a linear branch; three matrices", "two matrices"
DECLARATIONS = (
    _mlp("swiglu", f"silu {_GATED}", "arXiv 2002.05202", F.silu, gated=True),
    _mlp("geglu", f"exact GELU {_GATED}", "arXiv 2002.05202", F.gelu, gated=True),
    _mlp("gelu", f"GELU in GPT-2's tanh form; {_TWO}", "arXiv 1606.08415", _gelu, gated=False),
    _mlp(
        "gelu-exact",
        f"GELU by the error function; {_TWO}",
        "arXiv 1606.08415, as GPT-NeoX has it",
        F.gelu,
        gated=False,
    ),
    _mlp("relu", f"ReLU; {_TWO}", "arXiv 1706.03762", _relu, gated=False),
)
