"""Attention, whatever the mechanism: prepare → attend → combine."""

from typing import Any

from torch import Tensor, nn

from clearhead.nn.init import residual_output
from clearhead.nn.positions import Table
from clearhead.nn.registry import REGISTRY
from clearhead.spec import LayerSpec


class Attention(nn.Module):
    """Projections around the mechanisms that the layer's axes name.

    Differential attention pairs neighbouring heads of the baseline's queries, keys and values
    instead of adding any; V2 has twice its queries. The output is as wide for every choice.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer
        maps = REGISTRY.find("maps", layer.maps)
        queries, groups = maps.query_heads(layer), layer.num_key_value_heads
        width = layer.head_dim
        self.q_proj = nn.Linear(layer.hidden_size, queries * width, bias=layer.bias)
        self.k_proj = nn.Linear(layer.hidden_size, groups * width, bias=layer.bias)
        self.v_proj = nn.Linear(layer.hidden_size, groups * width, bias=layer.bias)
        self.o_proj = residual_output(layer, layer.num_attention_heads * width)
        self.prepare = REGISTRY.find("position", layer.position).build.prepare  # type: ignore[attr-defined]
        self.normalizer = REGISTRY.find("normalizer", layer.normalizer).build(queries)
        self.maps = maps.build(layer)

    def forward(
        self,
        x_BTC: Tensor,
        *,
        table: Table,
        attend: Any,
        cache: Any = None,
        key_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """[B, T, C] → [B, T, C].

        Args:
            table: what the position module made for these positions.
            attend: a function with the signature of `ops.attend`, with this module before it, and
                a keyword `coefficients`, what `maps` combines its maps by.
            cache: a transformers Cache; keys are kept as prepared, S = past + T.
            key_mask: bool [B, S]. segments: int [B, S].
        """
        split = (*x_BTC.shape[:2], -1, self.layer.head_dim)
        q = self.q_proj(x_BTC).view(split).transpose(1, 2)
        k = self.k_proj(x_BTC).view(split).transpose(1, 2)
        v = self.v_proj(x_BTC).view(split).transpose(1, 2)
        q, k = self.prepare(q, k, table)
        if cache is not None:
            k, v = cache.update(k, v, self.layer.index)

        coefficients = self.maps.coefficients(x_BTC)

        def bound(*tensors: Tensor, **options: Any) -> Tensor:
            return attend(self, *tensors, coefficients=coefficients, **options)

        o_BHTD = self.maps(
            *(q, k, v, coefficients),
            attend=bound,
            sink=self.normalizer.sink(),
            causal=True,
            key_mask=key_mask,
            segments=segments,
        )
        return self.o_proj(o_BHTD.transpose(1, 2).flatten(2))
