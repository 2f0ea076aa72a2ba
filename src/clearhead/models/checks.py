"""What a model is called with, refused in one line where it does not fit."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from clearhead.errors import ClearheadError, choose

# transformers 5 before 5.23 passes where in the cache the tokens go, which the cache knows.
_HARMLESS = ("cache_position",)


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """One of the two: whole numbers [B, T], or [B, T, C]; at least one token."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ClearheadError("give either input_ids or inputs_embeds")
    given: Any = inputs_embeds if input_ids is None else input_ids
    name, wanted, ndim = (
        ("inputs_embeds", "[batch, tokens, width]", 3)
        if input_ids is None
        else ("input_ids", "whole numbers [batch, tokens]", 2)
    )
    whole = input_ids is None or not (given.is_floating_point() or given.is_complex())
    if given.ndim != ndim or not given.numel() or not whole:
        raise ClearheadError(
            f"{name} must be {wanted}, at least one token; found {given.dtype} {list(given.shape)}"
        )


def check_positions(position_ids: Tensor | None, batch: int, tokens: int) -> None:
    """Whole numbers [B, T], or [1, T] for all rows."""
    if position_ids is None:
        return
    fits = position_ids.shape in ((batch, tokens), (1, tokens))
    if not fits or position_ids.is_floating_point():
        raise ClearheadError(
            f"position_ids must be whole numbers [{batch}, {tokens}]; "
            f"found {position_ids.dtype} {list(position_ids.shape)}"
        )


def check_labels(labels: Tensor, x_BTC: Tensor) -> None:
    """One for each token."""
    if labels.shape != x_BTC.shape[:2]:
        raise ClearheadError(
            f"labels must be {list(x_BTC.shape[:2])}, as the tokens; found {list(labels.shape)}"
        )


def check_cache(cache: Any, layers: int) -> None:
    """A transformers Cache of as many layers (`nn.Attention` sees the rest of what may differ)."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise ClearheadError(
            f"past_key_values must be a transformers Cache; found {type(cache).__name__}: "
            "start a new one, transformers.DynamicCache()"
        )
    if torch.compiler.is_compiling():
        return
    if cache.get_seq_length(layers) or cache.get_seq_length(layers - 1) != cache.get_seq_length():
        raise ClearheadError(
            f"the cache is not of the {layers} layers of this model: "
            "it is another model's; start a new one"
        )


def check_arguments(unknown: dict[str, Any], known: set[str]) -> None:
    """Such as cu_seq_lens_q, which others pack documents by: ignored, they would see each other."""
    for key, value in unknown.items():
        if value is not None and key not in _HARMLESS:
            choose("argument of the model", key, known)
