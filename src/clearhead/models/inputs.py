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

    Attributes:
        inputs_embeds: [B, T, C] in place of input_ids.
        past_key_values: a transformers Cache. A step of one token over a StaticCache, with a mask
            of all slots or None, reads nothing on the host: a CUDA graph can capture it.
        cache: the same, under its name from transformers 5.24 on.
        use_cache: whether a new cache is made and returned; by default as the configuration says.
        output_hidden_states: whether the input of each layer is returned, and the last norm's
            output.
        output_attentions: whether to return the matrices [B, heads, T, S] that multiply the values
            (for differential attention the signed difference); needs
            attn_implementation="eager".
        return_dict: False for a tuple.
        cache_position: not read; transformers before 5.23 passes it.
    """

    inputs_embeds: Tensor | None
    past_key_values: Cache | None
    cache: Cache | None
    use_cache: bool | None
    output_hidden_states: bool | None
    output_attentions: bool | None
    return_dict: bool | None
    cache_position: Tensor | None


# Names that an unknown one is compared with, a head's among them.
_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "document_ids", "labels"),
    *("logits_to_keep", "num_items_in_batch", *Options.__annotations__),
} - {"return_dict", "cache_position"}


class Inputs(NamedTuple):
    """Inputs of one call, T new tokens after `past` cached ones; S = past + T.

    Attributes:
        positions: int64 [B or 1, T], of the new tokens.
        key_positions: int64 [B or 1, S], for layers that prepare keys when they are read; the same
            tensor as `positions` where nothing is cached or no layer does.
        visibility: the keys that each token sees, whatever a layer's own window.
        cache: a transformers Cache, or None.
        past: tokens in the cache.
        prefixes: where the cache keeps prepared prefixes; None where it keeps none.
        returns_hidden, returns_maps: whether to return hidden states, and attention matrices.
    """

    positions: Tensor
    key_positions: Tensor
    visibility: Visibility
    cache: Cache | None
    past: int
    prefixes: Prefixes | None
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
    """Check the arguments of `ClearheadModel.forward`, and return them as its layers read them."""
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
    if (earlier := options.get("past_key_values")) is not None:
        if cache is not None:
            raise ClearheadError(
                "past_key_values and cache are two names of one argument: give one"
            )
        cache = earlier
    past, length, cached = 0, new, cache is not None
    if cached:
        if not causal:
            raise ClearheadError(
                "a key-value cache needs direction='causal': with "
                f"{config.direction!r} every token changes when one is added"
            )
        if trunk.training and trunk.gradient_checkpointing:
            raise ClearheadError(
                "gradient checkpointing runs a layer twice, and a key-value cache would keep its "
                "keys twice: give no cache in training, or call gradient_checkpointing_disable()"
            )
        caches.check_cache(cache, config.num_hidden_layers, trunk.gated)
    if position_ids is not None:
        check_whole(position_ids, "position_ids", batch, new)
    on_device, key_mask = False, None
    if cached:
        room = caches.room_of(cache)
        whole = attention_mask is not None and attention_mask.shape == (batch, room)
        on_device = caches.steps_on_device(cache, new, trunk.windowed) and not maps
        on_device = on_device and (whole or attention_mask is None)
        if on_device:
            # Every slot is a key, the new token the last query; a mask says which slots are seen.
            length, key_mask = caches.seen_slots(cache, attention_mask, tokens)
            past = key_mask.shape[1] - 1
        else:
            past = caches.cached_tokens(cache)
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
        what = "the positions that the model tells apart"
        check_below(trunk.longest - prefix, positions, "position_ids", what)
    for position, limit in trunk.limits.items():
        if prefix + length > limit and not packed:  # else a row is many texts
            raise ClearheadError(
                f"{prefix + length} tokens are more than the {limit} positions that this model can "
                f"tell apart (position={position!r}): shorten the text, or train with "
                "position='rope'"
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
    fits = given.ndim == 2 and given.dtype in _WHOLE if are_ids else given.ndim == 3
    if not fits or not given.numel():
        wanted = "inputs_embeds must be [batch, tokens, width]"
        if are_ids:
            wanted = "input_ids must be whole numbers (int64 or int32) [batch, tokens]"
        raise ClearheadError(
            f"{wanted}, at least one token; found {given.dtype} {list(given.shape)}"
        )
    if are_ids:
        check_below(vocabulary, given, "input_ids", "the vocabulary")
    return given


def check_whole(numbers: Tensor, name: str, batch: int, tokens: int) -> None:
    """Require integers [B, T], or [1, T] for all rows."""
    fits = numbers.shape in ((batch, tokens), (1, tokens))
    if not fits or numbers.dtype not in _WHOLE:
        raise ClearheadError(
            f"{name} must be whole numbers [{batch}, {tokens}]; "
            f"found {numbers.dtype} {list(numbers.shape)}"
        )


def read_mask(attention_mask: Tensor, batch: int, keys: int, cached: bool) -> Tensor | None:
    """Mask of keys that are not padding, bool [B, S]; None if none is.

    `cached`: a cache was given, so that a row may be all padding in this chunk.
    """
    if attention_mask.shape != (batch, keys):
        raise ClearheadError(
            f"attention_mask must be [batch, past + new tokens] = [{batch}, {keys}]; "
            f"found {list(attention_mask.shape)}"
        )
    mask = attention_mask != 0
    if not has_numbers(attention_mask):
        return mask
    if bool((attention_mask == 1).all()):
        return None  # the unpadded kernels are faster
    caches.check_mask(attention_mask)
    if not cached and not bool(mask.any(-1).all()):
        row = int(mask.any(-1).int().argmin())
        raise ClearheadError(
            f"row {row} of attention_mask is all zero: a text without a token; leave it out"
        )
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
    but not at padding. While compiling, values cannot be read: any `position_ids` then count as
    documents.

    Args:
        key_mask: as `read_mask` returns it.
    """
    (batch, tokens), device = x_BTC.shape[:2], x_BTC.device
    if document_ids is not None:
        check_whole(document_ids, "document_ids", batch, tokens)
        if cached:
            raise ClearheadError(
                "packed documents cannot be used with a key-value cache: give either"
            )
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
                "cannot be used with a key-value cache: give each text a row, or no cache"
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
            raise ClearheadError(
                f"{name} has {low if low < 0 else high}, outside {what}, 0 to {limit - 1}"
            )
