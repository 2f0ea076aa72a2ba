"""Choice of the kernel for a request of attention: PyTorch's own where they can, or tiles."""

from typing import Any

import torch
from torch import Tensor

from clearhead.ops import aten_kernels, tiles
from clearhead.ops.visibility import Visibility

# Compiled tiles beat PyTorch's CPU flash kernel up to here (docs/performance.md); beyond, unrolled
# tiles also take long to compile.
LONGEST_COMPILED_TILES = 1024


def select_kernel(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, visibility: Visibility) -> Any:
    """The module whose `forward` and `backward` compute this: `aten_kernels` or `tiles`."""
    if torch.compiler.is_exporting():
        return tiles  # of any length, on any device
    short = k_BGSD.shape[2] <= LONGEST_COMPILED_TILES
    if torch.compiler.is_compiling() and q_BHTD.device.type == "cpu" and short:
        return tiles
    return aten_kernels if aten_kernels.supports(q_BHTD, k_BGSD, v_BGSV, visibility) else tiles


def sink_by_row(sink: Tensor, lse_BHT: Tensor) -> Tensor:
    """A logit a head, [H], or a query, [B, H, T], as it meets the log-sum-exp."""
    sink = sink.to(lse_BHT.dtype)
    return sink if sink.ndim == 3 else sink[:, None]


def sink_gradient(sink: Tensor, grad: Tensor, o_BHTV: Tensor, lse_BHT: Tensor) -> Tensor:
    """−exp(sink − lse) · rowsum(dO ∘ o), summed to the sink's shape; o and lse: with the sink."""
    row_BHT = (grad.to(lse_BHT.dtype) * o_BHTV.to(lse_BHT.dtype)).sum(-1)
    gradient_BHT = -torch.exp(sink_by_row(sink, lse_BHT) - lse_BHT) * row_BHT
    return (gradient_BHT if sink.ndim == 3 else gradient_BHT.sum((0, 2))).to(sink.dtype)
