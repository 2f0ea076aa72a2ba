"""Normalisation layers: of the stream, and of queries and keys."""

import torch
from torch import Tensor, nn

from clearhead.ops import rms_norm
from clearhead.ops.precision import without_autocast
from clearhead.spec import Declaration, LayerSpec


class RMSNorm(nn.Module):
    """x / rms(x), times a gain for each channel; float32 inside, the input's dtype outside."""

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
        return (
            "beside W_Q = 0 it would multiply the gradient of W_Q by 1/eps: choose "
            "qk_norm='none', or a query_range above 0"
        )
    if layer.scores != "dot":
        return (
            f"scores={layer.scores!r} read lengths of queries and keys, which it takes out: choose "
            "scores='dot'"
        )
    return None


def _qk_flops(layer: LayerSpec, length: int) -> float:
    return 4.0 * (layer.num_attention_heads + layer.num_key_value_heads) * layer.head_dim


DECLARATIONS = (
    Declaration(
        "norm", "rmsnorm", "root mean square, a gain for each channel", "arXiv 1910.07467", RMSNorm
    ),
    Declaration(
        "norm",
        "rmsnorm-single",
        "root mean square, one gain for all channels (part of the OrthoAdam recipe)",
        "arXiv 2410.17174, RMSNorm-S",
        RMSNormSingle,
    ),
    Declaration(
        "norm",
        "layernorm",
        "mean and variance, gain and bias for each channel",
        "arXiv 1607.06450",
        LayerNorm,
    ),
    Declaration(
        "norm",
        "none",
        "nothing, but LayerNorm in the first layer and after the last",
        "arXiv 2311.01906, section 4.4, as its authors' code does",
        lambda width, eps: nn.Identity(),
    ),
    Declaration(
        "qk_norm",
        "none",
        "queries and keys as projected",
        "arXiv 1706.03762",
        lambda layer, width: None,
    ),
    Declaration(
        "qk_norm",
        "rmsnorm",
        "each head's queries and keys by root mean square, one gain a channel for all heads",
        "arXiv 2010.04245, as Qwen3 has it",
        lambda layer, width: RMSNorm(width, layer.norm_eps),
        refuses=_qk_refuses,
        flops=_qk_flops,
    ),
)
