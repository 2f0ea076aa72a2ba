"""Position-wise networks."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.init import residual_output
from clearhead.spec import Declaration, LayerSpec


class GatedMLP(nn.Module):
    """(f(x W_gate) ∘ x W_up) W_down."""

    def __init__(
        self, layer: LayerSpec, rotation: nn.Module, function: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.bias)
        self.up_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.bias)
        self.rotation = rotation
        self.down_proj = _down(layer)
        self.function = function

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide = self.function(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        return self.down_proj(self.rotation(wide))


class PlainMLP(nn.Module):
    """f(x W_up) W_down."""

    def __init__(
        self, layer: LayerSpec, rotation: nn.Module, function: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=layer.bias)
        self.rotation = rotation
        self.down_proj = _down(layer)
        self.function = function

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(self.rotation(self.function(self.up_proj(x_BTC))))


def _down(layer: LayerSpec) -> nn.Linear:
    scaled = layer.mlp_skip == "identity" and layer.mlp_gain is None
    return residual_output(layer, layer.intermediate_size, scaled=scaled)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu(x: Tensor) -> Tensor:
    """ReLU of rows, [N, C]: their compiled gradient reads the output that the next product keeps.

    Of [B, T, C] the compiler keeps the signs besides, as booleans, and a CPU stores and loads those
    one at a time: a third of the MLP's time.
    """
    return F.relu(x.flatten(0, -2)).view_as(x)


SWIGLU = Declaration(
    axis="mlp",
    name="swiglu",
    summary="silu gate times a linear branch; three matrices",
    source="arXiv 2002.05202",
    build=lambda layer, rotation: GatedMLP(layer, rotation, F.silu),
)
GEGLU = Declaration(
    axis="mlp",
    name="geglu",
    summary="exact GELU gate times a linear branch; three matrices",
    source="arXiv 2002.05202",
    build=lambda layer, rotation: GatedMLP(layer, rotation, F.gelu),
)
GELU = Declaration(
    axis="mlp",
    name="gelu",
    summary="GELU in GPT-2's tanh form; two matrices",
    source="arXiv 1606.08415",
    build=lambda layer, rotation: PlainMLP(layer, rotation, _gelu),
)
GELU_EXACT = Declaration(
    axis="mlp",
    name="gelu-exact",
    summary="GELU by the error function; two matrices",
    source="arXiv 1606.08415, as GPT-NeoX has it",
    build=lambda layer, rotation: PlainMLP(layer, rotation, F.gelu),
)
RELU = Declaration(
    axis="mlp",
    name="relu",
    summary="ReLU; two matrices",
    source="arXiv 1706.03762",
    build=lambda layer, rotation: PlainMLP(layer, rotation, _relu),
)
