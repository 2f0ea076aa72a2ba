"""Costs that several mechanisms share: visible keys, FLOPs, numbers in a cache."""

from clearhead.ops.visibility import Visibility
from clearhead.spec import LayerSpec


def visible_keys(layer: LayerSpec, length: int) -> float:
    """Keys that a token sees on average."""
    return Visibility(layer.direction == "causal", layer.sliding_window).mean_count(length)


def attention_flops(layer: LayerSpec, length: int) -> float:
    """q kᵀ and p v for each token, over its visible keys."""
    return 4.0 * layer.num_attention_heads * layer.head_dim * visible_keys(layer, length)


def numbers_per_group(layer: LayerSpec) -> int:
    """One vector of the head's width for each key head: a token's keys."""
    return layer.num_key_value_heads * layer.head_dim
