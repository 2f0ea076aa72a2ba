"""Checks of a model's arguments, each refused in one line where it does not fit."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

from clearhead.errors import ClearheadError, choose

# transformers 5 before 5.23 passes where in the cache the tokens go, which the cache knows.
_HARMLESS = ("cache_position",)
# Arguments of continuous batching beside the model's own; its masks say what its lengths say too.
PAGED_ARGUMENTS = frozenset(PagedAttentionArgs.__annotations__) - {"input_ids", "position_ids"}
# Packed texts as flash kernels, and transformers' and TRL's collators, tell them.
PACKED_ARGUMENTS = frozenset(
    ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
)
_WHOLE = (torch.int64, torch.int32)  # the dtypes that an embedding takes
IGNORED = -100  # a label that no loss is taken of


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None, vocabulary: int) -> None:
    """One of the two: whole numbers [B, T] below `vocabulary`, or [B, T, C]; at least one token."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ClearheadError("give either input_ids or inputs_embeds")
    given: Any = inputs_embeds if input_ids is None else input_ids
    name, wanted, ndim = (
        ("inputs_embeds", "[batch, tokens, width]", 3)
        if input_ids is None
        else ("input_ids", "whole numbers (int64 or int32) [batch, tokens]", 2)
    )
    whole = input_ids is None or given.dtype in _WHOLE
    if given.ndim != ndim or not given.numel() or not whole:
        raise ClearheadError(
            f"{name} must be {wanted}, at least one token; found {given.dtype} {list(given.shape)}"
        )
    if input_ids is not None:
        check_below(vocabulary, input_ids, "input_ids", "the vocabulary")


def check_whole(numbers: Tensor | None, name: str, batch: int, tokens: int) -> None:
    """Whole numbers [B, T], or [1, T] for all rows."""
    if numbers is None:
        return
    fits = numbers.shape in ((batch, tokens), (1, tokens))
    if not fits or numbers.dtype not in _WHOLE:
        raise ClearheadError(
            f"{name} must be whole numbers [{batch}, {tokens}]; "
            f"found {numbers.dtype} {list(numbers.shape)}"
        )


def check_ends(packed: dict[str, Any], batch: int, tokens: int) -> Tensor | None:
    """The texts' ends in one row, from 0 on, as cu_seq_lens_q and cu_seq_lens_k; None if not given.

    max_length_q and max_length_k go with them and are not needed.
    """
    given = {
        key: packed[key] for key in PACKED_ARGUMENTS - {"seq_idx"} if packed.get(key) is not None
    }
    if not given:
        return None
    ends = torch.as_tensor(given.get("cu_seq_lens_q", [])).flatten()
    others = torch.as_tensor(given.get("cu_seq_lens_k", ends)).flatten()
    if has_numbers(ends):
        rising = bool((ends.diff() >= 0).all()) and ends[:1].tolist() == [0]
        if batch > 1 or not rising or ends[-1] != tokens or not torch.equal(ends, others):
            raise ClearheadError(
                f"cu_seq_lens_q and cu_seq_lens_k must rise alike from 0 to the {tokens} tokens of "
                f"one row; found them end in {ends[-1:].tolist()} and {others[-1:].tolist()} for "
                f"{batch} rows: give document_ids"
            )
    return ends


def check_mask(attention_mask: Tensor, cached: bool) -> None:
    """Whole numbers from 0, which is padding; beside a cache no other than 0 and 1."""
    low, high = attention_mask.aminmax()
    whole = bool((attention_mask == attention_mask.long()).all())
    if low < 0 or not whole or (cached and high > 1):
        raise ClearheadError(
            "attention_mask must be of 1, for a token, and 0, for padding (or, without a cache, "
            f"number a row's texts from 1); found {low.item():g} to {high.item():g}"
        )


def check_labels(labels: Tensor, x_BTC: Tensor, vocabulary: int) -> None:
    """One for each token: int64, below `vocabulary`, or −100 where no loss is taken."""
    if labels.shape != x_BTC.shape[:2] or labels.dtype != torch.int64:
        raise ClearheadError(
            f"labels must be int64 {list(x_BTC.shape[:2])}, as the tokens; "
            f"found {labels.dtype} {list(labels.shape)}"
        )
    if readable(labels):
        outside = (labels >= vocabulary) | ((labels < 0) & (labels != IGNORED))
        if bool(outside.any()):
            raise ClearheadError(
                f"label {int(labels[outside][0])} is outside the vocabulary, 0 to "
                f"{vocabulary - 1}: give token ids, and {IGNORED} where no loss is taken"
            )


def check_any_counts(labels: Tensor) -> None:
    """At least one label that a loss is taken of: the mean of none is NaN."""
    if readable(labels) and not bool((labels != IGNORED).any()):
        raise ClearheadError(
            f"every label is {IGNORED}, so that there is no loss to take the mean of: leave the "
            "batch out, or give num_items_in_batch"
        )


def check_below(limit: int, numbers: Tensor, name: str, what: str) -> None:
    if readable(numbers):
        low, high = (int(end) for end in numbers.aminmax())
        if low < 0 or high >= limit:
            raise ClearheadError(
                f"{name} has {low if low < 0 else high}, outside {what}, 0 to {limit - 1}"
            )


def readable(x: Tensor) -> bool:
    """True if numbers can be read at no cost: a GPU would be waited for."""
    return x.device.type == "cpu" and has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """False for fake tensors, by which memory is planned, under a compiler and under torch.func."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_meta or isinstance(x, FakeTensor))


def check_cache(cache: Any, layers: int, gated: bool) -> None:
    """A transformers Cache of as many layers (`nn.Attention` sees the rest of what may differ).

    `gated`: log gates are cached beside keys.
    """
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise ClearheadError(
            f"past_key_values must be a transformers Cache; found {type(cache).__name__}: "
            "start a new one, transformers.DynamicCache()"
        )
    if gated and any(hasattr(layer, "_quantize") for layer in cache.layers):
        raise ClearheadError(
            "a quantised cache would round the gates that position='forget' sums up: give a "
            "DynamicCache"
        )
    if torch.compiler.is_compiling():
        return
    length = cache.get_seq_length()
    if isinstance(length, Tensor):  # of a static cache, whose layers are made at once
        fits = len(cache.layers) == layers
    else:
        fits = not cache.get_seq_length(layers) and cache.get_seq_length(layers - 1) == length
    if not fits:
        raise ClearheadError(
            f"the cache is not of the {layers} layers of this model: "
            "it is another model's; start a new one"
        )


def check_recomputation(cache: Cache, checkpoint: Any) -> None:
    """Refuse a cache whose keys of a layer's first run, without a graph, would hide the second's.

    Args:
        checkpoint: transformers' partial of torch.utils.checkpoint.
    """
    reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant", True)
    if reentrant or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ClearheadError(
            "gradient checkpointing runs a layer twice, which past_key_values allows with "
            "use_reentrant=False and a plain DynamicCache alone: give no cache in training, or "
            "call gradient_checkpointing_disable()"
        )


def check_arguments(unknown: dict[str, Any], known: frozenset[str]) -> None:
    """Refuse an argument that would change nothing."""
    if is_batch(unknown.get("cache")):
        known |= PAGED_ARGUMENTS
    for key, value in unknown.items():
        if value is not None and key not in _HARMLESS and key not in known:
            choose("argument of the model", key, known)


def is_batch(cache: Any) -> bool:
    """True for the cache of continuous batching, named `cache` in every version."""
    return isinstance(cache, PagedAttentionCache)


def the_cache(past_key_values: Any, cache: Any) -> Any:
    """One cache, given by either name."""
    if past_key_values is not None and cache is not None:
        raise ClearheadError("past_key_values and cache are two names of one argument: give one")
    return past_key_values if cache is None else cache


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names that a model can be called with."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset([p.name for p in parameters if p.kind != p.VAR_KEYWORD]) - {"self"}
