"""Inputs of a model's call: checked once on entry, and brought into the form that layers read."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache

from clearhead.errors import ClearheadError, choose
from clearhead.models import caches
from clearhead.nn.attention import Prefixes
from clearhead.ops.precision import has_numbers, is_exporting, readable
from clearhead.ops.visibility import Visibility

if TYPE_CHECKING:
    from clearhead.models.base_model import ClearheadModel

_WHOLE = (torch.int64, torch.int32)  # the dtypes that an embedding takes


class Options(TypedDict, total=False):
    """Keyword arguments of every model's call, beside tokens, mask, positions and documents.

    A step of one token over a StaticCache, with a mask of all slots or None, reads nothing on the
    host: a CUDA graph can capture it.
    """

    inputs_embeds: Tensor | None  # [B, T, C] in place of input_ids
    past_key_values: Cache | None
    cache: Cache | None  # the same, under its name from transformers 5.24 on
    use_cache: bool | None  # make and return one; by default as the configuration says
    output_hidden_states: bool | None  # the input of each layer, and the last norm's output
    output_attentions: bool | None  # what multiplies the values, [B, heads, T, S], under "eager"
    return_dict: bool | None  # False for a tuple
    cache_position: Tensor | None  # not read; transformers before 5.23 passes it


# Names that an unknown one is compared with.
_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "document_ids", "labels"}
_ARGUMENTS |= Options.__annotations__.keys()


class Inputs(NamedTuple):
    """Inputs of one call, T new tokens after `past` cached ones; S = past + T."""

    positions: Tensor  # int64 [B or 1, T]
    key_positions: Tensor  # int64 [B or 1, S], for layers that prepare keys when they are read
    visibility: Visibility  # whatever a layer's own window
    cache: Cache | None
    past: int
    prefixes: Prefixes | None  # where the cache keeps prepared ones
    returns_hidden: bool
    returns_maps: bool


def settle(
    trunk: "ClearheadModel",
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    options: Options,
) -> Inputs:
    """The arguments of `ClearheadModel.forward`, checked, as its layers read them."""
    config = trunk.config
    for key, value in options.items():  # a difference of keys does not compile in torch 2.11
        if value is not None and key not in Options.__annotations__:
            choose("argument of the model", key, _ARGUMENTS - {key})
    hidden, maps = options.get("output_hidden_states"), options.get("output_attentions")
    hidden = config.output_hidden_states if hidden is None else hidden
    maps = config.output_attentions if maps is None else maps
    tokens = check_inputs(input_ids, options.get("inputs_embeds"), config.vocab_size)
    (batch, new), causal = tokens.shape[:2], config.direction == "causal"
    cache: Any = options.get("cache")
    if cache is None:
        cache = options.get("past_key_values")
    if position_ids is not None:
        check_whole(position_ids, "position_ids", batch, new)
    past, length, cached = 0, new, cache is not None
    on_device, key_mask = False, None
    if cached:
        caches.check_cache(cache, trunk)
        room = caches.room_of(cache)
        whole = attention_mask is not None and attention_mask.shape == (batch, room)
        on_device = caches.steps_on_device(cache, new, trunk.windowed) and not maps
        on_device = on_device and (whole or attention_mask is None)
        if on_device:
            # Every slot is a key, the new token the last query; a mask says which slots are seen.
            length, key_mask = caches.seen_slots(cache, attention_mask, tokens)
            past = key_mask.shape[1] - 1
        else:
            past = cache.get_seq_length()
            if isinstance(past, Tensor):  # of a static cache; others' export keeps them symbolic
                past = int(past)
            length = past + new
            if whole:
                attention_mask = attention_mask[:, :length]  # type: ignore[index]
    if attention_mask is not None and not on_device:
        key_mask = read_mask(attention_mask, batch, length, cached)
    given, documents = position_ids is not None, None
    if given or document_ids is not None:
        documents = documents_of(tokens, position_ids, key_mask, document_ids, cached)
    # Those that a compiler cannot rule out leave the cache, and the length, as of one text.
    packed = documents is not None and (document_ids is not None or has_numbers(tokens))
    use_cache = options.get("use_cache")
    use_cache = config.use_cache if use_cache is None else use_cache
    if use_cache and causal and not (cached or packed or trunk.training):
        kind = caches.PrefixCache if trunk.prefix_length else DynamicCache
        cache = kind(config=config if config.sliding_window is not None else None)
    prefix, positions = trunk.prefix_length, position_ids
    if positions is None:
        positions = positions_of(documents, key_mask, tokens, past)
    if trunk.longest is not None and (packed or given):
        check_below(trunk.longest - prefix, positions, "position_ids", "the positions")
    for position, limit in trunk.limits.items():
        if prefix + length > limit and not packed:  # else a row is many texts
            raise ClearheadError(
                f"{prefix + length} tokens are more than the {limit} positions of {position!r}"
            )
    positions = positions + prefix if prefix else positions
    keys = positions
    if cache is not None and trunk.prepares_late:
        rows = None if on_device or torch.compiler.is_compiling() else batch
        keys = caches.key_positions(positions, key_mask, cache, past, prefix, rows)
    visibility = Visibility(causal, None, key_mask, documents)
    keeps_prefixes = isinstance(cache, caches.PrefixCache) and not torch.compiler.is_compiling()
    prefixes = cache.prefixes if keeps_prefixes else None
    return Inputs(positions, keys, visibility, cache, past, prefixes, bool(hidden), bool(maps))


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None, vocabulary: int) -> Tensor:
    """Return the one that is given: integers [B, T] below `vocabulary`, or floats [B, T, C]."""
    are_ids = input_ids is not None
    if are_ids == (inputs_embeds is not None):
        raise ClearheadError("give either input_ids or inputs_embeds")
    given: Any = input_ids if are_ids else inputs_embeds
    if given.ndim != (2 if are_ids else 3) or not given.numel():
        wanted = "input_ids must be [batch, tokens], inputs_embeds [batch, tokens, width]"
        raise ClearheadError(f"{wanted}, at least one token; found {list(given.shape)}")
    if are_ids:
        check_below(vocabulary, given, "input_ids", "the vocabulary")
    return given


def check_whole(numbers: Tensor, name: str, batch: int, tokens: int) -> None:
    """Require integers [B, T], or [1, T] for all rows."""
    fits = numbers.shape in ((batch, tokens), (1, tokens))
    if not fits or numbers.dtype not in _WHOLE:
        found = f"{numbers.dtype} {list(numbers.shape)}"
        raise ClearheadError(f"{name} must be whole numbers [{batch}, {tokens}]; found {found}")


def read_mask(attention_mask: Tensor, batch: int, keys: int, cached: bool) -> Tensor | None:
    """Mask of keys that are not padding, bool [B, S]; None if none is. After a cache a row may be
    all padding."""
    if attention_mask.shape != (batch, keys):
        wanted, found = f"[batch, past + new tokens] = [{batch}, {keys}]", attention_mask.shape
        raise ClearheadError(f"attention_mask must be {wanted}; found {list(found)}")
    mask = attention_mask != 0
    if not has_numbers(attention_mask):
        return mask
    if bool((attention_mask == 1).all()):
        return None  # the unpadded kernels are faster
    caches.check_mask(attention_mask)
    if not cached and not bool(mask.any(-1).all()):
        row = int(mask.any(-1).int().argmin())
        raise ClearheadError(f"row {row} of attention_mask is all zero: leave that text out")
    return mask


def documents_of(
    x_BTC: Tensor,
    position_ids: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    cached: bool,
) -> Tensor | None:
    """The document of each token, int [B, T]; None where every row is one text.

    `document_ids` are taken as given. Without them a document begins where `position_ids` restart,
    but not at padding. While compiling, any `position_ids` count as documents.
    """
    (batch, tokens), device = x_BTC.shape[:2], x_BTC.device
    if document_ids is not None:
        check_whole(document_ids, "document_ids", batch, tokens)
        if cached:
            raise ClearheadError("document_ids cannot be used with a key-value cache: give either")
        return document_ids.expand(batch, -1)
    unread = tokens == 1 or (cached and not has_numbers(x_BTC))
    if position_ids is None or unread or is_exporting():
        return None
    own = torch.arange(tokens, device=device)
    seen = (own >= 0)[None] if key_mask is None else key_mask[:, -tokens:]
    last = torch.where(seen, own, -1).cummax(1).values
    last = pad(last[:, :-1], (1, 0), value=-1).expand(batch, -1)  # the token before, padding apart
    position_BT = position_ids.expand(batch, -1)
    opens = (position_BT <= position_BT.gather(1, last.clamp_min(0))) & seen & (last >= 0)
    if has_numbers(opens):
        if not bool(opens.any()):
            return None
        if cached:
            row, place = (int(number) for number in opens.nonzero()[0])
            raise ClearheadError(
                f"position_ids begin anew at token {place} of row {row}, and packed documents "
                "cannot be used with a key-value cache: give each text a row"
            )
    return opens.cumsum(1)


def positions_of(
    documents: Tensor | None, key_mask: Tensor | None, x_BTC: Tensor, past: int
) -> Tensor:
    """Index of each token in its row or document, without padding; int64 [B or 1, T]."""
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


def check_below(limit: int, numbers: Tensor, name: str, what: str) -> None:
    if readable(numbers):
        low, high = map(int, numbers.aminmax())
        if low < 0 or high >= limit:
            number = low if low < 0 else high
            raise ClearheadError(f"{name} has {number}, outside {what}, 0 to {limit - 1}")
