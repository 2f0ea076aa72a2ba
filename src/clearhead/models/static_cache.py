"""A step of decoding over transformers' StaticCache by device tensors alone: a CUDA graph holds it.

The cache's length is a number on the device. A lone query reads every slot, and a mask hides those
that have no token yet, so that neither shapes nor any choice depend on the length.
"""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from clearhead.errors import ClearheadError
from clearhead.models.checks import check_mask, readable


def room_of(cache: Cache | None) -> int | None:
    """The slots of a static cache whose layers all keep every token; None for any other cache."""
    layers = getattr(cache, "layers", ())
    if not layers or not isinstance(layers[0], StaticLayer):
        return None
    if any(layer.is_sliding for layer in layers):
        return None
    return int(layers[0].max_cache_len)


def seen_slots(cache: Cache, attention_mask: Tensor | None, x_B1C: Tensor) -> tuple[int, Tensor]:
    """The length to hold against the model's positions, and the slots that a new token sees.

    Args:
        cache: of `room_of`, with its tokens so far. attention_mask: of all its slots.

    Returns:
        (length, mask): the tokens with the new one, or all slots where to read them would make a
        GPU wait; bool [B, slots].

    Raises:
        ClearheadError: a full cache, or a mask of other numbers than 0 and 1, on a CPU.
    """
    past, slots = cache.get_seq_length(), room_of(cache)
    assert slots is not None
    length = slots
    if readable(x_B1C):
        length = int(past) + 1
        if length > slots:
            raise ClearheadError(f"the cache has no room for {length} tokens: start a new one")
        if attention_mask is not None:
            check_mask(attention_mask)
    seen = (torch.arange(slots, device=x_B1C.device) <= past).expand(len(x_B1C), -1)
    return length, seen if attention_mask is None else seen & attention_mask.bool()
