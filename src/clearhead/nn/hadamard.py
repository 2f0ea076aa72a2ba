"""Hadamard rotation of the input of an MLP's output matrix (QuaRot, arXiv 2404.00456)."""

from functools import partial

from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.nn.bases import PAPER, Weights, nothing
from clearhead.ops.hadamard import block_of, factors, rotate_blocks, rotate_channels
from clearhead.spec import Declaration, LayerSpec


class Hadamard(nn.Module):
    """x H: each channel becomes a signed sum of its block's channels, so none stays large.

    The matrix behind it is rotated too, which keeps the function (QuaRot, arXiv 2404.00456).
    """

    left: Tensor
    right: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = block_of(width)
        for name, matrix in zip(("left", "right"), factors(self.block), strict=True):
            self.register_buffer(name, matrix, persistent=False)

    def reset_parameters(self) -> None:
        for buffer, matrix in zip((self.left, self.right), factors(self.block), strict=True):
            buffer.copy_(matrix)

    def forward(self, x: Tensor) -> Tensor:
        return rotate_blocks(x, self.left.to(x.dtype), self.right.to(x.dtype))


def _refuses(layer: LayerSpec) -> str | None:
    if layer.intermediate_size % 2:
        return f"intermediate_size={layer.intermediate_size} is odd: choose mlp_rotation='none'"
    return None


def _turned(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
    """W_down times the rotation, which is its own inverse: into it or out of it."""
    down_OI = weights.get("mlp.down_proj.weight")
    if down_OI is None:
        raise ClearheadError(f"mlp={after.mlp!r} has no down_proj to turn: leave --rotate out")
    turned = rotate_channels(down_OI.double())
    return {**weights, "mlp.down_proj.weight": turned.to(down_OI.dtype)}


def _flops(layer: LayerSpec, length: int) -> float:
    width = layer.intermediate_size
    return 2.0 * width * sum(map(len, factors(block_of(width))))


_rotation = partial(Declaration, "mlp_rotation", adopt=_turned)
DECLARATIONS = (
    _rotation("none", "the MLP's output matrix reads the hidden channels", PAPER, nothing),
    _rotation(
        "hadamard",
        "the hidden channels times a Hadamard matrix in blocks of up to 512, for few bits",
        "arXiv 2404.00456 (QuaRot)",
        Hadamard,
        refuses=_refuses,
        flops=_flops,
    ),
)
