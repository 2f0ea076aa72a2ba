"""Key-value caches of transformers: checks that they fit, lengths, and positions of their keys.

A decoding step over transformers' StaticCache reads device tensors alone, so that a CUDA graph can
capture it: a single query reads every slot, and a mask hides those without a token.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import StaticLayer

from clearhead.errors import ClearheadError
from clearhead.nn.attention import Prefixes
from clearhead.ops.precision import readable

if TYPE_CHECKING:
    from clearhead.models.base_model import ClearheadModel


class PrefixCache(DynamicCache):
    """A growing cache that also keeps a prefix's prepared keys and its values, by layer.

    With any other cache they are prepared at every call. The prefix does not count in its length.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prefixes: Prefixes = {}


def check_cache(cache: Any, trunk: "ClearheadModel") -> None:
    """Refuse a cache that would give other logits, or is not of the model's layers."""
    layers = trunk.config.num_hidden_layers
    if trunk.config.direction != "causal":
        raise ClearheadError("a key-value cache needs direction='causal'")
    if trunk.training and trunk.gradient_checkpointing:
        raise ClearheadError(
            "gradient checkpointing runs a layer twice, and a cache would keep its keys twice"
        )
    if trunk.gated and any(hasattr(layer, "_quantize") for layer in cache.layers):
        raise ClearheadError("a quantised cache would round the gates that position='forget' sums")
    fits = len(cache.layers) in (0, layers)  # some make theirs at their first update
    if fits and cache.layers and not torch.compiler.is_compiling():
        length = cache.get_seq_length()  # the last layer lacks tokens if a step was interrupted
        fits = isinstance(length, Tensor) or cache.get_seq_length(layers - 1) == length
    if not fits:
        raise ClearheadError(
            f"the cache is not of the {layers} layers of this model, or a step was interrupted"
        )


def room_of(cache: Cache) -> int | None:
    """The slots of a static cache whose layers all keep every token; None for any other cache."""
    layers = getattr(cache, "layers", ())
    if not layers or not isinstance(layers[0], StaticLayer):
        return None
    if any(layer.is_sliding for layer in layers):
        return None
    return int(layers[0].max_cache_len)


def steps_on_device(cache: Cache | None, tokens: int, windowed: bool) -> bool:
    """True if new tokens can be run without reading the cache's length on the host, on which
    transformers counts the tokens of windows."""
    if cache is None or tokens > 1 or windowed or room_of(cache) is None:
        return False
    return isinstance(cache.get_seq_length(), Tensor)  # before its first token, 0


def seen_slots(cache: Cache, attention_mask: Tensor | None, x_B1C: Tensor) -> tuple[int, Tensor]:
    """The number of tokens with the new one, or of all slots where reading it would make a GPU
    wait; and the slots that the new token sees, bool [B, slots]."""
    past, slots = cache.get_seq_length(), room_of(cache)
    assert slots is not None
    length = slots
    if readable(x_B1C):
        length = int(past) + 1
        if length > slots:
            raise ClearheadError(f"the cache has no room for {length} tokens: start a new one")
        if attention_mask is not None:
            check_mask(attention_mask)
    seen = (torch.arange(slots, device=x_B1C.device) <= past).expand(x_B1C.shape[0], -1)
    return length, seen if attention_mask is None else seen & attention_mask.bool()


def key_positions(
    positions_BT: Tensor,
    key_mask: Tensor | None,
    cache: Cache,
    past: int,
    prefix: int,
    rows: int | None,
) -> Tensor:
    """Positions of cached and new keys, [B or 1, S]: `prefix` plus the count in the row, unpadded.

    Offsets of given position_ids from this count are stored in the cache, for `rows` rows; if that
    is None, cached keys have the offset of the row's first new token.
    """
    if key_mask is None:
        count_BS = torch.arange(past + positions_BT.shape[1], device=positions_BT.device)[None]
        seen_BT = torch.ones_like(positions_BT)
    else:
        count_BS = (key_mask.long().cumsum(-1) - 1).clamp_min(0)
        seen_BT = key_mask[:, past:].long()
    count_BS = count_BS + prefix
    offset_BT = (positions_BT - count_BS[:, past:]) * seen_BT
    if rows is None:
        earlier = offset_BT.gather(1, seen_BT.argmax(1, keepdim=True))
    else:
        earlier = _earlier_offsets(cache, offset_BT, past, rows)
    if past == 0:
        return positions_BT
    earlier = count_BS[:, :past] + earlier
    rows = max(earlier.shape[0], positions_BT.shape[0])
    return torch.cat([earlier.expand(rows, -1), positions_BT.expand(rows, -1)], 1)


def _earlier_offsets(cache: Any, offset_BT: Tensor, past: int, rows: int) -> Tensor:
    """Position offsets of `past` cached tokens, [B or 1, past]; the new ones are stored too."""
    known = getattr(cache, "position_offsets", None)
    if known is None:
        known = offset_BT.new_zeros(1, 1)
    if len(known) not in (1, rows):  # they were repeated or selected
        if bool((known != known[:1]).any()):
            raise ClearheadError(f"the cache has {len(known)} rows, and the batch {rows}")
        known = known[:1]
    # A crop cuts them off; after steps on the device the last goes on.
    known = known[:, torch.arange(past, device=known.device).clamp_max(known.shape[1] - 1)]
    rows = max(len(known), len(offset_BT))
    cache.position_offsets = torch.cat([known.expand(rows, -1), offset_BT.expand(rows, -1)], 1)
    return known


def check_mask(attention_mask: Tensor) -> None:
    """Raise a ClearheadError for numbers other than 0 and 1."""
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        low, high = attention_mask.aminmax()
        found = f"found {low.item():g} to {high.item():g}: number a row's texts by document_ids"
        raise ClearheadError(f"attention_mask must hold 1 for a token and 0 for padding; {found}")
