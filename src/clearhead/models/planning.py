"""Costs of a configuration before any weight exists: parameters, FLOPs, bytes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.errors import ClearheadError
from clearhead.models.base_model import ClearheadModel
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families import FAMILIES
from clearhead.models.inspection import lack_of_positions, longest_text, parameter_count
from clearhead.nn import REGISTRY
from clearhead.nn.positionwise import EmbeddingProjection
from clearhead.terminal import hushed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of one model.

    Attributes:
        parameters: all of them, the head's included, a tied matrix once.
        non_embedding_parameters: without the token and position embeddings and the head.
        forward_flops: multiply-adds × 2 of one token's forward pass, in a sequence of `length`.
        cache_bytes: key-value cache of a text of `length` at two bytes a number, divided by its
            tokens: a sliding layer holds at most its window less one; 0 for a bidirectional model,
            which has no cache.
        length: the sequence length counted with.
    """

    parameters: int
    non_embedding_parameters: int
    forward_flops: float
    cache_bytes: float
    length: int


def counterpart(config: Any) -> ClearheadConfig:
    """clearhead's configuration of the same function, for its own or a transformers configuration.

    Raises:
        ClearheadError: for a family that `clearhead convert` does not read, or settings that
            clearhead does not support.
    """
    if isinstance(config, ClearheadConfig):
        return config
    families = {one.model.config_class.model_type: one for one in FAMILIES.values()}
    if config.model_type not in families:
        raise ClearheadError(
            f"{config.model_type} cannot be planned: give a clearhead model, or one of the "
            f"families {', '.join(sorted(families))}"
        )
    return families[config.model_type].counterpart(config)


def plan(config: Any, *, length: int | None = None) -> Plan:
    """Count on the meta device; `length` defaults to the model's own positions.

    Args:
        config: clearhead's, or transformers' of a family that `counterpart` knows.

    Raises:
        ClearheadError: as `counterpart`, and for more tokens than there are learned positions.
    """
    config = counterpart(config)
    with torch.device("meta"):
        model = ClearheadModel(config)  # whatever its direction; a head has vocabulary × width
    if length is None:
        length = longest_text(model) or config.max_position_embeddings
    if reason := lack_of_positions(model, length):
        raise ClearheadError(
            f"{reason}: give a shorter length, or a configuration with more max_position_embeddings"
        )
    output = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else output
    total = head + parameter_count(model)
    embedding, linear = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
        for kind in (torch.nn.Embedding, torch.nn.Linear | EmbeddingProjection)
    )
    flops, cache = 2.0 * (output + linear), 0.0
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


@contextmanager
def without_data() -> Iterator[None]:
    """Run the body on the meta device, without the tracebacks that PyTorch logs."""
    quiet = hushed("torch._subclasses.fake_tensor", logging.CRITICAL)
    with quiet, FakeTensorMode(allow_non_fake_inputs=True):
        yield
