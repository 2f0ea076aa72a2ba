"""Masks, documents and positions of a call's tokens, from whichever of its arguments say them.

A step of decoding over transformers' StaticCache takes device tensors alone, so that a CUDA graph
holds it. The cache's length is a number on the device: a lone query reads every slot, and a mask
hides those that have no token yet, so that neither shapes nor any choice depend on the length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import StaticLayer

from clearhead.errors import ClearheadError
from clearhead.models.checks import check_ends, check_mask, check_whole, has_numbers, readable
from clearhead.ops.visibility import is_exporting


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
            check_mask(attention_mask, cached=True)
    seen = (torch.arange(slots, device=x_B1C.device) <= past).expand(x_B1C.shape[0], -1)
    return length, seen if attention_mask is None else seen & attention_mask.bool()


def read_mask(
    attention_mask: Tensor | None, batch: int, keys: int, cached: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Mask of keys that are no padding, bool [B, S], None for all; the mask if it numbers texts.

    `cached`: a cache was given, so that a row's tokens may follow a whole chunk of padding.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.shape != (batch, keys):
        raise ClearheadError(
            f"attention_mask must be [batch, past + new tokens] = [{batch}, {keys}]; "
            f"found {list(attention_mask.shape)}"
        )
    mask = attention_mask != 0
    if not has_numbers(attention_mask):
        ones = cached or is_exporting() or attention_mask.dtype == torch.bool
        return mask, None if ones else attention_mask
    if bool((attention_mask == 1).all()):
        return None, None  # the unpadded kernels are faster
    check_mask(attention_mask, cached)
    if not cached and not bool(mask.any(-1).all()):
        row = int(mask.any(-1).int().argmin())
        raise ClearheadError(
            f"row {row} of attention_mask is all zero: a text without a token; leave it out"
        )
    numbers = attention_mask if bool((attention_mask > 1).any()) else None
    return None if bool(mask.all()) else mask, numbers


def documents_of(
    x_BTC: Tensor,
    position_ids: Tensor | None,
    masks: tuple[Tensor | None, Tensor | None],
    document_ids: Tensor | None,
    packed: dict[str, Any],
    cached: bool,
) -> Tensor | None:
    """The document of each token, int [B, T]; None where every row is one text.

    `document_ids` (or `seq_idx`) are what they are. Else a document begins where `position_ids`
    begin anew, where the mask has another number, and at `cu_seq_lens_q`; padding begins none.
    While compiling nothing can be read, so that arguments which may say it make documents, if only
    one.

    Args:
        masks: as `read_mask` has them.

    Raises:
        ClearheadError: arguments that do not fit, and documents beside a cache.
    """
    (batch, tokens), device = x_BTC.shape[:2], x_BTC.device
    given = packed.get("seq_idx") if document_ids is None else document_ids
    ends = check_ends(packed, batch, tokens)
    check_whole(given, "document_ids", batch, tokens)
    if cached and (given is not None or ends is not None):
        raise ClearheadError("packed documents cannot be used with a key-value cache: give either")
    if given is not None:
        return given.expand(batch, -1)
    key_mask, numbers = masks
    unread = tokens == 1 or (cached and not has_numbers(x_BTC))
    if position_ids is None or unread or is_exporting():
        position_ids = None
        if numbers is None and ends is None:
            return None
    own = torch.arange(tokens, device=device)
    seen = (own >= 0)[None] if key_mask is None else key_mask[:, -tokens:]
    last = torch.where(seen, own, -1).cummax(1).values
    last = pad(last[:, :-1], (1, 0), value=-1).expand(batch, -1)  # the token before, padding apart
    opens = torch.zeros(batch, tokens, dtype=torch.bool, device=device)
    for values, differ in ((position_ids, torch.le), (numbers, torch.ne)):
        if values is not None:
            values = values.expand(batch, -1)
            opens = opens | differ(values, values.gather(1, last.clamp_min(0)))
    opens = opens & seen & (last >= 0)
    if ends is not None:
        opens = opens | torch.isin(own, ends.to(device))[None]
    if has_numbers(opens):
        if not bool(opens[:, 1:].any()):
            return None
        if cached:
            row, place = (int(number) for number in opens.nonzero()[0])
            raise ClearheadError(
                f"position_ids begin anew at token {place} of row {row}, and packed documents "
                "cannot be used with a key-value cache: give each text a row, or no cache"
            )
    return opens.cumsum(1)


def positions_of(
    documents: Tensor | None, key_mask: Tensor | None, x_BTC: Tensor, past: int
) -> Tensor:
    """The number of each token in its row, or in its document, padding apart; int64 [B or 1, T]."""
    if documents is not None:
        order = documents.argsort(dim=1, stable=True)
        seen = torch.ones_like(documents) if key_mask is None else key_mask
        document, seen = documents.gather(1, order), seen.long().gather(1, order)
        count = seen.cumsum(1)
        opens = pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
        before = torch.where(opens, count - seen, 0).cummax(1).values
        return (count - 1 - before).clamp_min(0).gather(1, order.argsort(1))
    if key_mask is not None:  # counted from the first token that is no padding
        return (key_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
    return torch.arange(past, past + x_BTC.shape[1], device=x_BTC.device)[None]


def key_positions(
    positions_BT: Tensor,
    key_mask: Tensor | None,
    cache: Cache,
    past: int,
    places: int,
    rows: int | None,
) -> Tensor:
    """Positions of cached and new keys, [B or 1, S]: `places` and their numbers in their rows.

    How far given position_ids are from these numbers is remembered beside the cache. Without
    `rows`, their number, nothing is: all earlier keys are then as far as the first new token.
    """
    if key_mask is None:
        count_BS = torch.arange(past + positions_BT.shape[1], device=positions_BT.device)[None]
        seen_BT = torch.ones_like(positions_BT)
    else:
        count_BS = (key_mask.long().cumsum(-1) - 1).clamp_min(0)
        seen_BT = key_mask[:, past:].long()
    count_BS = count_BS + places
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
    """Those of `past` cached tokens, [B or 1, past]; the new ones' are remembered after them."""
    known = getattr(cache, "position_offsets", None)
    if known is None:
        known = offset_BT.new_zeros(1, 1)
    if len(known) not in (1, rows):  # they were repeated or selected
        if bool((known != known[:1]).any()):
            raise ClearheadError(
                f"the cache had {len(known)} rows whose position_ids differ, now {rows}: "
                "start a new one"
            )
        known = known[:1]
    # A crop cuts them off; after steps on the device the last goes on.
    known = known[:, torch.arange(past, device=known.device).clamp_max(known.shape[1] - 1)]
    rows = max(len(known), len(offset_BT))
    cache.position_offsets = torch.cat([known.expand(rows, -1), offset_BT.expand(rows, -1)], 1)
    return known
