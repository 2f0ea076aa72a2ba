"""Differential attention (arXiv 2410.05258): two maps a head, the second subtracted λ times."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.bases import (
    SingleMaps,
    Weights,
    attention_flops,
    with_doubled_output,
    with_own_parameters,
)
from clearhead.ops.precision import widened, without_autocast
from clearhead.spec import Declaration, LayerSpec

HEAD_NORMS = ("affine", "plain", "none")


class _TwoMaps(nn.Module, SingleMaps):
    """Map 1 − λ · map 2."""

    maps = ("map 1", "map 2")

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Tensor) -> Tensor:
        first, second = self.split(weights_BHTS)
        return first - lambdas.to(first.dtype) * second

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Tensor) -> Tensor:
        first, second = (
            (1.0, 1.0) if row_sum_BHT1 is None else (row_sum_BHT1[:, 0::2], row_sum_BHT1[:, 1::2])
        )
        return first - lambdas * second


class Differential(_TwoMaps):
    """V1: λ, the per-head norm and the constant gain (arXiv 2410.05258, eqs. 2 and 3).

    λ = exp(λq1 · λk1) − exp(λq2 · λk2) + λ_init, float32, one for the layer's heads; λ_init = 0.8 −
    0.6 exp(−0.3 · layer), layer from 0, unless it is given. The four vectors start as N(0, 0.1²).
    head_norm: "affine" has a gain, "plain" none; "none" leaves the norm out and keeps 1 − λ_init.
    """

    keys_together = 2
    constants: Tensor
    cached: tuple[list[Any], Tensor, Tensor] | None

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        fixed = layer.lambda_init
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer.index) if fixed is None else fixed
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(layer.head_dim)) for _ in range(4)
        )
        self.head_norm = layer.head_norm
        if self.head_norm == "affine":
            self.norm_weight = nn.Parameter(torch.empty(2 * layer.head_dim))
        self.norm_eps = layer.norm_eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=0.1)
        if self.head_norm == "affine":
            nn.init.ones_(self.norm_weight)
        self._set_constants()

    def _set_constants(self) -> None:
        # λ_init and 1 − λ_init as tensors: numbers would give each layer a graph of its own, and
        # loading without storage would leave a buffer empty.
        device = "cpu" if self.lambda_q1.is_meta else self.lambda_q1.device
        start = self.lambda_init
        self.constants = torch.tensor([start, 1 - start], device=device, dtype=torch.float32)
        self.cached = None

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        module = super()._apply(*arguments, **options)
        self._set_constants()  # whatever the weights' dtype
        return module

    def lambdas(self, x_BTC: Tensor | None = None) -> Tensor:
        """λ, a float32 scalar, which a decoding step reuses unless weights changed."""
        if x_BTC is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._lambda()
        weights: Any = self._parameters.values()
        plain = all(type(each) is nn.Parameter and not each.is_inference() for each in weights)
        if not plain or "_hf_hook" in vars(self):
            return self._lambda()
        versions = [(each.data_ptr(), each._version) for each in weights]
        if x_BTC.shape[1] > 1 or self.cached is None or self.cached[0] != versions:
            return self._keep(versions)
        return self.cached[1]

    def _keep(self, versions: list[Any]) -> Tensor:
        """Store λ and the gain times 1 − λ_init in place, as CUDA graphs may read them."""
        lam, gain = self._lambda(), self.constants[1]
        if type(lam) is not Tensor or (lam.is_cuda and torch.cuda.is_current_stream_capturing()):
            return lam  # without a value yet
        if self.head_norm != "none":
            ones = torch.ones_like(self.lambda_q1).repeat(2)
            gain = widened(self.norm_weight if self.head_norm == "affine" else ones) * gain
        cached = None if self.cached is None else self.cached[1:]
        if cached is None or cached[0].device != lam.device or cached[1].dtype != gain.dtype:
            with torch.inference_mode(False):  # then every mode may write to them
                cached = lam.clone(), gain.clone()
        self.cached = versions, cached[0].copy_(lam), cached[1].copy_(gain)
        return self.cached[1]

    @with_own_parameters
    def _lambda(self) -> Tensor:
        with without_autocast(self.lambda_q1):
            first = torch.exp((self.lambda_q1.float() * self.lambda_k1.float()).sum())
            second = torch.exp((self.lambda_q2.float() * self.lambda_k2.float()).sum())
            return first - second + self.constants[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lambdas: Tensor, *, attend: Any, **options: Any
    ) -> Tensor:
        """[B, H/2, T, 2D]."""
        weight: Tensor | None = self.norm_weight if self.head_norm == "affine" else None
        gain: Tensor | None = self.constants[1]
        if self.head_norm != "none" and self.cached is not None and lambdas is self.cached[1]:
            weight, gain = self.cached[2], None
        return ops.differential(
            *(q, k, v, lambdas),
            norm_weight=weight,
            norm_eps=None if self.head_norm == "none" else self.norm_eps,
            gain=gain,
            attend=attend,
            **options,
        )

    def split(self, heads_BH: Tensor) -> tuple[Tensor, ...]:
        return heads_BH.chunk(2, 1)  # `attend` gets all the first ones, then all the second

    def effective_weights(self, weights_BHTS: Tensor, lambdas: Tensor) -> Tensor:
        """With no norm after it, times 1 − λ_init."""
        difference = super().effective_weights(weights_BHTS, lambdas)
        return difference * self.constants[1] if self.head_norm == "none" else difference

    def row_sum(self, row_sum_BHT1: Tensor | None, lambdas: Tensor) -> Tensor:
        return super().row_sum(row_sum_BHT1, lambdas) * self.constants[1]


class DifferentialV2(_TwoMaps):
    """V2: λ = σ(x W_λ) for each token and head, about 1/2 at first; no norm, no λ_init."""

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
        return heads_BH[:, 0::2], heads_BH[:, 1::2]


def _refuses(layer: LayerSpec) -> str | None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (value := getattr(layer, name)) % 2:
            return f"it pairs neighbouring heads, and {name}={value} is odd: choose an even number"
    if layer.head_norm not in HEAD_NORMS:
        return f"head_norm={layer.head_norm!r} is none of {', '.join(HEAD_NORMS)}"
    return None


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


_maps = partial(Declaration, "maps")
DECLARATIONS = (
    _maps(
        "differential",
        "the difference of two maps a head, over a value of twice the width (V1)",
        "arXiv 2410.05258, eqs. 1 to 3",
        Differential,
        heads=lambda layer: layer.num_attention_heads // 2,
        refuses=_refuses,
        # Both maps read a value of width 2D: a half more than the baseline of the same width.
        flops=lambda layer, length: 1.5 * attention_flops(layer, length),
    ),
    _maps(
        "differential-v2",
        "the difference of two maps a head over the same keys and values, λ by token (V2)",
        "microsoft/unilm, Diff-Transformer-V2 (2026-01)",
        DifferentialV2,
        query_heads=lambda layer: 2 * layer.num_attention_heads,
        flops=lambda layer, length: 2 * attention_flops(layer, length),
        adopt=_adopt,
    ),
)
