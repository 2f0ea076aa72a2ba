"""transformers' continuous batching: tokens of many requests in one row, over a paged cache.

A request's queries are the last of its keys, so that attention is `ops.attend`, request by request.
The cache has one shape for all layers: the key heads of the configuration, `head_dim` wide. CoCA's
keys fit it rotated, at twice the width that they have in our own cache.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.nn.protocols import Interface
from clearhead.nn.registry import REGISTRY
from clearhead.spec import LayerSpec

_SHAPINGS = ("none", "skipinit")
_POSITIONS = ("rope", "xpos", "learned", "sinusoidal", "scaled-sinusoidal", "none")


def paged_attention(batch: dict[str, Any]) -> Interface:
    """Attention of every layer over the paged cache of a batch, a mapping of PAGED_ARGUMENTS."""
    queries = batch["cu_seq_lens_q"].tolist()

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, /, *, sink: Any, **options: Any
    ) -> Tensor:
        own = dict(batch)  # the cache writes the layer's lengths into it
        k, v = batch["cache"].update(k, v, module.layer.index, own)
        o_BHTV = v.new_zeros(*q.shape[:3], v.shape[3])
        keys = own["cu_seq_lens_k"].tolist()
        for (start, stop), (first, end) in zip(pairwise(queries), pairwise(keys), strict=True):
            if start == stop:
                continue
            logits = sink
            if isinstance(sink, Tensor) and sink.ndim == 3:
                logits = sink[:, :, start:stop]
            o_BHTV[:, :, start:stop] = ops.attend(
                *(q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end]),
                window=options["visibility"].window,
                sink=logits,
                prefix=options["prefix"],
                scale=options["scale"],
            )
        return o_BHTV

    return attend


def require_pageable(config: Any, dtype: torch.dtype) -> None:
    """Refuse a model that a paged cache of its `dtype` cannot hold.

    Raises:
        ClearheadError: with the reason.
    """
    if config._attn_implementation != "sdpa":
        raise ClearheadError(
            "continuous batching needs attn_implementation='sdpa'; found "
            f"{config._attn_implementation!r}: call model.set_attn_implementation('sdpa')"
        )
    for index in range(config.num_hidden_layers):
        if reason := _refusal(config.layer(index), dtype):
            raise ClearheadError(
                f"continuous batching cannot hold this model: {reason}; use generate()"
            )
    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        raise ClearheadError(
            f"continuous batching needs a transformers newer than {transformers.__version__}, or "
            "the form of convert --for serving; use generate()"
        )


def _refusal(layer: LayerSpec, dtype: torch.dtype) -> str | None:
    maps: Any = REGISTRY.find("maps", layer.maps).build
    kind = layer.rope_parameters["rope_type"]
    if maps.keys_together > 1:
        return f"maps={layer.maps!r} has values twice as wide as its keys"
    if layer.shaping not in _SHAPINGS:
        return f"shaping={layer.shaping!r} takes the mean of all values, beside attention"
    if layer.num_value_heads != layer.num_key_value_heads:
        return (
            f"its {layer.num_value_heads} value heads are not its {layer.num_key_value_heads} "
            "key heads"
        )
    if layer.position not in _POSITIONS:
        return f"position={layer.position!r} makes keys wider than values"
    if layer.position == "xpos" and dtype == torch.float16:
        return "position='xpos' keeps float32 keys in float16: choose bfloat16"
    if layer.position == "rope" and kind == "dynamic":
        return f"rope_type={kind!r} turns cached keys again as a text grows"
    return None
