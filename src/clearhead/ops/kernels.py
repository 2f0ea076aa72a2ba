"""Which kernel computes a request of attention: PyTorch's stock ones where they can, or tiles."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.ops import stock, tiles

# Compiled tiles beat PyTorch's CPU flash kernel up to here (docs/performance.md); beyond, unrolled
# tiles also take long to compile.
LONGEST_COMPILED_TILES = 1024


class Options(NamedTuple):
    """What a kernel is told beside its tensors.

    Attributes:
        key_mask: bool [B, S], False for keys that nobody sees.
        query_segments, key_segments: int [B, T] and [B, S]; both or neither. A query sees only the
            keys of its own segment.
    """

    causal: bool
    scale: float
    key_mask: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None

    def of_oracle(self) -> dict[str, Any]:
        """The same as `oracles.attend` takes it: queries are the last of the keys there."""
        masks = {"key_mask": self.key_mask, "segments": self.key_segments}
        return {"causal": self.causal, "scale": self.scale, **masks}


def chosen(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, options: Options) -> Any:
    """The module whose `forward` and `backward` compute this: `stock` or `tiles`."""
    short = k_BGSD.shape[2] <= LONGEST_COMPILED_TILES
    if torch.compiler.is_compiling() and q_BHTD.device.type == "cpu" and short:
        return tiles
    return stock if stock.takes(q_BHTD, k_BGSD, v_BGSV, options) else tiles


def sink_gradient(sink_H: Tensor, grad: Tensor, o_BHTV: Tensor, lse_BHT: Tensor) -> Tensor:
    """−Σ exp(sink − lse) · rowsum(dO ∘ o) [H], o and lse those with the sink."""
    row_BHT = (grad.to(lse_BHT.dtype) * o_BHTV.to(lse_BHT.dtype)).sum(-1)
    weight_BHT = torch.exp(sink_H.to(lse_BHT.dtype)[:, None] - lse_BHT)
    return -(weight_BHT * row_BHT).sum((0, 2)).to(sink_H.dtype)
