"""Differential attention V2: twice the queries over the same keys and values, λ by token."""

from typing import Any

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.bases import SingleMaps, Weights, attention_flops, with_doubled_output
from clearhead.spec import Declaration, LayerSpec


class DifferentialV2(nn.Module, SingleMaps):
    """λ = σ(x W_λ) for each token and head, from attention's input; no norm, no λ_init.

    At initialisation λ is about 1/2: x is normed and W_λ is N(0, 0.02²).
    """

    maps = ("map 1", "map 2")

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.lambda_proj = nn.Linear(layer.hidden_size, layer.num_attention_heads, bias=False)

    def lambdas(self, x_BTC: Tensor) -> Tensor:
        """λ, float32 [B, H/2, T, 1]."""
        return torch.sigmoid(self.lambda_proj(x_BTC).float()).transpose(1, 2)[..., None]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lambdas: Tensor, *, attend: Any, **options: Any
    ) -> Tensor:
        """[B, H/2, T, D]; H is twice the baseline's heads."""
        return ops.differential_v2(q, k, v, lambdas, attend=attend, **options)

    def split(self, heads_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Split [B, H, …], a value for each query, into those of the first and second maps."""
        return heads_BH[:, 0::2], heads_BH[:, 1::2]

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Tensor) -> Tensor:
        """The signed difference [B, H/2, T, S]."""
        first, second = self.split(weights_BHTS)
        return first - lambdas.to(first.dtype) * second

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Tensor) -> Tensor:
        """mass 1 − λ · mass 2, by token."""
        first, second = (1.0, 1.0) if row_sum_BHT1 is None else self.split(row_sum_BHT1)
        return first - lambdas * second


def _adopt(weights: Weights, before: LayerSpec, after: LayerSpec) -> Weights:
    """Second queries (and their sinks) as the first, λ exactly ½, and W_O doubled."""
    heads, weights = after.num_attention_heads, with_doubled_output(weights, after)
    for name in ("q_proj.weight", "q_proj.bias", "normalizer.logit"):
        if name in weights:
            by_head = weights[name].unflatten(0, (heads, -1))
            weights[name] = by_head.repeat_interleave(2, 0).flatten(0, 1)
    weights["maps.lambda_proj.weight"] = weights["q_proj.weight"].new_zeros(
        heads, after.hidden_size
    )
    return weights


DECLARATION = Declaration(
    "maps",
    "differential-v2",
    "the difference of two maps a head over the same keys and values, λ by token (V2)",
    "microsoft/unilm, Diff-Transformer-V2 (2026-01)",
    DifferentialV2,
    query_heads=lambda layer: 2 * layer.num_attention_heads,
    flops=lambda layer, length: 2 * attention_flops(layer, length),
    adopt=_adopt,
)
