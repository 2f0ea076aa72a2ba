"""The attention maps of a layer, and the matrix composed of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.nn.attention import Attention
from clearhead.ops.attention import at_zero_queries
from clearhead.probe.attention_call import AttentionCall, Tile, normalised

PLAIN = "softmax"
DIFFERENCE = "difference"
SHAPED = "shaped"


@dataclass(frozen=True, kw_only=True)
class LayerMaps:
    """The attention maps of one layer.

    Attributes:
        names: of the maps that are rows of weights each, in the order of `split`.
        lambdas: λ of the difference, a scalar or [B, heads, T, 1]; None where there is none.
        by: the module that splits and combines; None for one map a head.
        call: of clearhead's own attention, where its shaping makes another matrix of the maps.
    """

    names: tuple[str, ...]
    lambdas: Tensor | None
    by: Any
    call: AttentionCall | None = None

    def split(self, heads_BH: Tensor) -> Sequence[Tensor]:
        """Split a tensor with heads in dimension 1 into one for each map."""
        return (heads_BH,) if self.by is None else self.by.split(heads_BH)

    def difference(self, weights_BHRS: Tensor, start: int) -> Tensor | None:
        """The signed map [B, heads, R, S] of the queries from `start` on, where there is one."""
        if self.lambdas is None:
            return None
        return self.by.effective_weights(weights_BHRS, self._of_rows(weights_BHRS, start))

    def shaped(self, tile: Tile, before: int) -> Tensor | None:
        """The matrix α I + β A − γ C, [B, heads, R, S], or None; `before`: keys before query 0."""
        call = self.call
        if call is None:
            return None
        by, first = self._of_rows(tile.weights, tile.start), before + tile.start
        attention: Any = call.module
        return attention.effective_weights(
            tile.weights, by, lambda: _at_zero_queries(call, tile), first
        )

    def _of_rows(self, weights_BHRS: Tensor, start: int) -> Tensor | None:
        lambdas = self.lambdas
        if lambdas is not None and lambdas.ndim > 2:  # one for each token
            lambdas = lambdas[:, :, start : start + weights_BHRS.shape[2]]
        return lambdas


def maps_of(call: AttentionCall) -> LayerMaps:
    """The maps of clearhead's attention and of DiffLlama; any other attention has one a head."""
    if isinstance(call.module, Attention):
        return LayerMaps(
            names=call.module.maps.maps,
            lambdas=call.lambdas,
            by=call.module.maps,
            call=call if call.module.layer.shaping != "none" else None,
        )
    if type(call.module).__name__ == "DiffLlamaAttention":
        return LayerMaps(names=_Halves.maps, lambdas=_diffllama_lambda(call.module), by=_Halves)
    return LayerMaps(names=(PLAIN,), lambdas=None, by=None)


def _at_zero_queries(call: AttentionCall, tile: Tile) -> Tensor:
    """The softmax maps [B, H, R, S] at W_Q = 0."""
    resting = replace(call, sink=at_zero_queries(call.sink))
    score = torch.zeros_like(tile.weights).masked_fill(~tile.visible, -torch.inf)
    return normalised(score, resting.null_logit())[0]


class _Halves:
    """transformers' DiffLlama pairs head i with head i + H/2."""

    maps = ("map 1", "map 2")

    @staticmethod
    def split(heads_BH: Tensor) -> tuple[Tensor, ...]:
        return heads_BH.chunk(2, 1)

    @staticmethod
    def effective_weights(weights_BHTS: Tensor, lambdas: Tensor) -> Tensor:
        first, second = weights_BHTS.chunk(2, 1)
        return first - lambdas.to(first.dtype) * second


def _diffllama_lambda(module: Any) -> Tensor:
    first = torch.exp((module.lambda_q1.float() * module.lambda_k1.float()).sum())
    second = torch.exp((module.lambda_q2.float() * module.lambda_k2.float()).sum())
    return first - second + module.lambda_init
