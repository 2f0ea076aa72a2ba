"""`attn_implementation="clearhead"`: `ops.attend` for the sink models of transformers.

Models such as gpt-oss and GraniteSWA hand one sink logit a head to their attention function
(`s_aux`) and refuse SDPA, so a CPU runs them eagerly, T × T. After `import clearhead.models`,

    model.set_attn_implementation("clearhead")

computes the same by tiles, with the exact gradient of the sinks.

transformers describes visibility as a function of indices. `visible_keys` reads causality, padding
and packed texts off that function and compares the result with all of it. A visibility that
`ops.attend` cannot express is refused, never approximated, and so is a model that computes with
its attention mask itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops.visibility import Span, Visibility

NAME = "clearhead"
ROWS = 1024  # queries compared at a time
# Kernels that leave out no query at a padded key's place: of cross-attention it is another's.
EVERY_QUERY = "cpu-decode,cpu-flash,split-decode,efficient-decode,tiles"
# Keywords of transformers' attention functions that the eager functions do not read, or that say
# what the mask says.
HARMLESS = frozenset(
    "cache_position deterministic is_causal num_items_in_batch output_router_logits position_ids "
    "sliding_window use_cache".split()
)
# Operations by which transformers hands a mask on; attributes are read by __get__.
HANDING_ON = ("__get__", "__repr__", "contiguous", "dim", "get_device", "size", "to")


class KeyMask(Tensor):
    """The mask of a layer's attention as `attend_with_sinks` reads it: an empty tensor, [0, S].

    Attributes:
        padding: the mask [B, S] or longer that the caller gave, or None.
        visibility: the arguments of `ops.attend`.
        sizes: the queries, the keys (the room of a static cache) and those of them that exist.
        model: the model's type.
    """

    padding: Tensor | None
    visibility: Visibility
    sizes: tuple[int, int, int]
    model: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand the mask on, or refuse an operation on the whole mask, which it does not hold."""
        mask = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        if func.__name__ not in HANDING_ON:
            raise _refusal(f"{mask.model}, which computes with its attention mask")
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, cls):
            vars(out).update(vars(mask))
        return out


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    config: Any,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    **options: Any,
) -> KeyMask:
    """Make the mask that `attend_with_sinks` reads; a function of AttentionMaskInterface.

    Raises:
        ClearheadError: for a mask whose visibility `ops.attend` cannot express.
    """
    if isinstance(attention_mask, KeyMask):  # of a model's inputs, made before its forward pass
        attention_mask = attention_mask.padding
    before = int(q_offset) - kv_offset  # keys earlier than the first query's own
    visibility, keys = Visibility(), before + q_length
    if mask_function is not causal_mask_function or keys > kv_length:
        batch = torch.arange(batch_size, device=device)

        def sees(query: Tensor, key: Tensor) -> Tensor:
            """bool [B, …] for indices of queries and keys that broadcast, counted from 0."""
            shape = torch.broadcast_shapes(query.shape, key.shape)
            own = batch.view(-1, *(1 for _ in shape))
            seen = mask_function(own, torch.zeros_like(own), query + int(q_offset), key + kv_offset)
            return seen.expand(batch_size, *shape)

        visibility, keys = _described(sees, (q_length, kv_length), before, local_size, device)
    if attention_mask is not None:
        cut = (-kv_offset, kv_offset + keys - attention_mask.shape[1])
        key_mask = nn.functional.pad(attention_mask, cut)
        if not bool(key_mask.all()):
            visibility = visibility._replace(key_mask=key_mask)
    mask = torch.empty(0, kv_length, dtype=torch.bool, device=device).as_subclass(KeyMask)
    mask.padding, mask.visibility, mask.model = attention_mask, visibility, config.model_type
    mask.sizes = (q_length, kv_length, keys)
    return mask


def attend_with_sinks(
    module: nn.Module,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over `ops.attend`, a function of AttentionInterface.

    Args:
        attention_mask: what `visible_keys` made.
        s_aux: sink logits, H numbers; None for plain softmax.

    Returns:
        [B, T, H, V], and None in place of the weights, which are never held.

    Raises:
        ClearheadError: for dropout, another mask, or a keyword that may change the result.
    """
    name = type(module).__name__
    if "visibility" in options:
        raise _refusal("a clearhead model, which has the same attention of its own", "sdpa")
    if not isinstance(attention_mask, KeyMask):
        form = "none" if attention_mask is None else list(attention_mask.shape)
        raise _refusal(
            f"{name} under a mask of its own or the caller's ({form}; [batch, tokens] would do)"
        )
    if dropout:
        raise _refusal(f"dropout of attention weights ({dropout:g})")
    neutral = {key for key, value in options.items() if value is None or value is False}
    if given := options.keys() - neutral - HARMLESS:
        raise _refusal(f"{name} with {', '.join(sorted(given))}")
    *expected, keys = attention_mask.sizes
    if (lengths := [q_BHTD.shape[2], k_BGSD.shape[2]]) != expected:
        raise _refusal(f"{name} with {lengths} queries and keys under a mask of {expected}")
    sink = None if s_aux is None else s_aux.flatten()
    visibility = {  # on the layer's device
        key: value.to(q_BHTD.device) if isinstance(value, Tensor) else value
        for key, value in attention_mask.visibility._asdict().items()
    }
    crossed = visibility["key_mask"] is not None and not visibility["causal"]
    o_BHTV = ops.attend(
        *(q_BHTD, k_BGSD[:, :, :keys], v_BGSV[:, :, :keys]),
        sink=sink,
        scale=scaling,
        kernel=EVERY_QUERY if crossed else None,
        **visibility,
    )
    return o_BHTV.transpose(1, 2), None


def _described(
    sees: Callable[[Tensor, Tensor], Tensor],
    lengths: tuple[int, int],
    before: int,
    local_size: int | None,
    device: torch.device | str,
) -> tuple[Visibility, int]:
    """The visibility that equals all of `sees`, causal or both ways, and its number of keys."""
    queries, room = lengths
    index = torch.arange(room, device=device)
    for causal, keys in ((True, before + queries), (False, room)):
        if keys > room:
            continue
        window, segments = local_size, None
        if window is not None and not causal:
            window += 1  # two-sided windows of transformers include their distance
        if causal and not before and queries > 1 and window != 1:  # packed without a cache
            begins_BT = ~sees(index[1:queries], index[: queries - 1])
            if bool(begins_BT.any()):
                segments = nn.functional.pad(begins_BT.long().cumsum(1), (1, 0))
        visibility = Visibility(causal, window, None, segments)
        if _equals(visibility, sees, queries, keys, index):
            return visibility, keys
    raise _refusal("a mask that is more than causal, windowed, padded and packed")


def _equals(
    visibility: Visibility,
    sees: Callable[[Tensor, Tensor], Tensor],
    queries: int,
    keys: int,
    index: Tensor,
) -> bool:
    """True if `sees` shows each query the keys of `visibility`, and none after them."""
    for start in range(0, queries, ROWS):
        span = Span(start, min(start + ROWS, queries), 0, keys)
        rows = torch.arange(span.start, span.stop, device=index.device)
        seen_BRS = sees(rows[:, None], index[None])
        hidden = visibility.hidden(span, queries, keys, index.device)
        shown = seen_BRS[..., :keys]
        equal = shown if hidden is None else shown != hidden[:, 0]
        if not bool(equal.all()) or bool(seen_BRS[..., keys:].any()):
            return False
    return True


def _refusal(what: str, instead: str = "eager") -> ClearheadError:
    return ClearheadError(
        f"attn_implementation={NAME!r} cannot compute {what}: call "
        f"model.set_attn_implementation({instead!r})"
    )


AttentionInterface.register(NAME, attend_with_sinks)
AttentionMaskInterface.register(NAME, visible_keys)
