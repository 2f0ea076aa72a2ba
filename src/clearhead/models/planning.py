"""Costs of a configuration before any weight exists: parameters, FLOPs, bytes."""

from dataclasses import dataclass

import torch

from clearhead.models.configuration import ClearheadConfig
from clearhead.models.trunk import ClearheadModel
from clearhead.nn import REGISTRY


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of one model.

    Attributes:
        parameters: all of them and the head's, a tied matrix once.
        non_embedding_parameters: without the token and position embeddings and the head.
        forward_flops: multiply-adds × 2 of one token's forward pass, in a sequence of `length`.
        cache_bytes: key-value cache of a text of `length`, at two bytes a number, over its tokens:
            a sliding layer holds no more than its window less one; 0 where there is none, as every
            token sees the whole text.
        length: the sequence length counted with.
    """

    parameters: int
    non_embedding_parameters: int
    forward_flops: float
    cache_bytes: float
    length: int


def plan(config: ClearheadConfig, *, length: int | None = None) -> Plan:
    """Count on the meta device; `length` defaults to the model's own positions."""
    length = config.max_position_embeddings if length is None else length
    with torch.device("meta"):
        model = ClearheadModel(config)  # whatever its direction; a head has vocabulary × width
    output = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else output
    total = head + sum(p.numel() for p in model.parameters())
    embedding = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    )
    linear = 2.0 * output + sum(
        2.0 * module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )
    flops, cache = linear, 0.0
    for index in range(config.num_hidden_layers):
        layer = config.layer(index)
        window = length + 1 if layer.sliding_window is None else layer.sliding_window
        held = min(1.0, (window - 1) / length)  # of the text, as transformers' caches drop keys
        for declaration in REGISTRY.of(layer).values():
            flops += declaration.flops(layer, length)
            if layer.direction == "causal":
                cache += 2 * declaration.cache(layer) * held
    return Plan(
        parameters=total,
        non_embedding_parameters=total - embedding - head,
        forward_flops=flops,
        cache_bytes=cache,
        length=length,
    )
