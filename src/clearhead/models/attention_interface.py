"""Values of `attn_implementation`: sdpa, eager or a function of transformers in clearhead's models;
and "clearhead", which is `ops.attend` for the sink models of transformers.

Models such as gpt-oss and GraniteSWA hand one sink logit a head to their attention function
(`s_aux`) and refuse SDPA, so a CPU runs them eagerly, T × T; `ops.attend` goes by tiles.
transformers describes visibility as a function of indices. `visible_keys` reads causality, windows
and packed texts off that function and compares the result with all of it. A visibility that
`ops.attend` cannot express is refused, and so is a model that computes with its mask itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead.errors import ClearheadError
from clearhead.nn.bases import Interface
from clearhead.ops import oracles
from clearhead.ops.attention import at_zero_queries, attend
from clearhead.ops.visibility import Span, Visibility

NAME = "clearhead"
ROWS = 1024  # queries compared at a time
# Kernels that compute every query: of cross-attention, padding of keys says nothing of queries.
EVERY_QUERY = "split-decode,products,cpu-flash,tiles"
# Keywords of transformers' attention functions without effect, or already in the mask.
HARMLESS = {
    *("cache_params", "cache_position", "deterministic", "encoder_hidden_states", "is_causal"),
    *("num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values"),
    *("position_ids", "seq_idx", "sliding_window", "use_cache"),
}
# Operations by which transformers and compilers hand a mask on; attributes are read by __get__.
HANDING_ON = {
    *("__get__", "__repr__", "contiguous", "dim", "get_device", "size", "storage_offset"),
    *("stride", "to", "untyped_storage"),
}


def _sdpa(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    del options["lambdas"]
    return module.attend(q, k, v, scale=scaling, **options).transpose(1, 2), None


def _eager(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    scaling: float,
    maps: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The oracle; a layer's matrix is put into `maps` where they are given."""
    lambdas = options.pop("lambdas")
    options |= options.pop("visibility")._asdict() | {"scale": scaling}

    def alone() -> Tensor:
        resting = options | {"sink": at_zero_queries(options["sink"])}
        return oracles.weights(torch.zeros_like(q), torch.zeros_like(k), **resting)

    if maps is not None:
        weights = module.weights(q, k, **options)[..., -k.shape[2] :]
        matrix = module.effective_weights(weights, lambdas, alone, k.shape[2] - q.shape[2])
        maps.append(matrix.to(q.dtype))
    out = oracles.attend(q, k, v, by=module.weights, **options).to(v.dtype)
    return out.transpose(1, 2), None


# Called as transformers calls those of its AttentionInterface.
OWN: dict[str, Callable[..., Any]] = {"sdpa": _sdpa, "eager": _eager}


def interface_of(implementation: str, maps: list[Tensor] | None) -> Interface:
    """The function that `attn_implementation` puts in place of `Attention.attend`; each layer's
    matrix is appended to `maps`.

    One registered with transformers is called as transformers does, and gets sink, prefix and
    visibility too (see `ops.attend`), and lambdas, which `module.maps.effective_weights` takes.
    """
    if maps is not None and implementation != "eager":
        raise ClearheadError(
            "output_attentions needs attn_implementation='eager'; "
            f"found {implementation!r}: call model.set_attn_implementation('eager')"
        )
    if implementation.startswith("paged|"):  # it knows neither sinks nor windows
        raise ClearheadError(
            f"{implementation!r} is not for clearhead's own classes: call generate"
        )
    function = OWN.get(implementation) or ALL_ATTENTION_FUNCTIONS[implementation]
    if maps is not None:
        function = partial(_eager, maps=maps)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        out, _ = function(module, q, k, v, None, scaling=options.pop("scale"), **options)
        return out.transpose(1, 2)

    return attend


class KeyMask(Tensor):
    """The mask of a layer's attention as `attend_with_sinks` reads it: empty, [0, 1, T, S]."""

    visibility: Visibility
    keys: int  # those in use, of the S slots of a static cache
    model: str  # its model_type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand the mask on, or refuse an operation on its numbers, which it does not hold."""
        mask = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        name = func.__name__
        if name not in HANDING_ON and not name.startswith(("is_", "_is_")):
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
    """The mask that `attend_with_sinks` reads; a function of AttentionMaskInterface."""
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

        visibility, keys = _described(sees, q_length, kv_length, before, local_size, device)
    if attention_mask is not None:
        cut = (-kv_offset, kv_offset + keys - attention_mask.shape[1])
        key_mask = nn.functional.pad(attention_mask, cut)
        if not bool(key_mask.all()):
            visibility = visibility._replace(key_mask=key_mask)
    # Four dimensions, by which transformers knows a mask that is ready.
    mask = torch.empty(0, 1, q_length, kv_length, device=device).as_subclass(KeyMask)
    mask.visibility, mask.keys, mask.model = visibility, keys, config.model_type
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
    """Attention [B, T, H, V] by `ops.attend`, under sink logits `s_aux` [H] or plain softmax, and
    None in place of the weights; a function of AttentionInterface."""
    name = type(module).__name__
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
    expected, lengths = list(attention_mask.shape[2:]), [q_BHTD.shape[2], k_BGSD.shape[2]]
    if lengths != expected:
        raise _refusal(f"{name} with {lengths} queries and keys under a mask of {expected}")
    keys, device = attention_mask.keys, q_BHTD.device
    causal, window, *masks = attention_mask.visibility  # of another device, where layers are spread
    visibility = Visibility(causal, window, *(x if x is None else x.to(device) for x in masks))
    o_BHTV = attend(
        *(q_BHTD, k_BGSD[:, :, :keys], v_BGSV[:, :, :keys]),
        visibility=visibility,
        sink=None if s_aux is None else s_aux.flatten(),
        scale=scaling,
        kernel=None if visibility.causal or visibility.key_mask is None else EVERY_QUERY,
    )
    return o_BHTV.transpose(1, 2).contiguous(), None


def _described(
    sees: Callable[[Tensor, Tensor], Tensor],
    queries: int,
    room: int,
    before: int,
    local_size: int | None,
    device: torch.device | str,
) -> tuple[Visibility, int]:
    """The visibility that equals all of `sees`, causal or both ways, and its number of keys."""
    index = torch.arange(max(queries, room), device=device)

    def equals(visibility: Visibility, keys: int, start: int) -> bool:
        span = Span(start, min(start + ROWS, queries), 0, keys)
        seen_BRS = sees(index[span.start : span.stop, None], index[None, :room])
        hidden = visibility.hidden(span, queries, keys, index.device)
        shown = seen_BRS[..., :keys]
        equal = shown if hidden is None else shown != hidden[:, 0]
        return bool(equal.all()) and not bool(seen_BRS[..., keys:].any())

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
        if all(equals(visibility, keys, start) for start in range(0, queries, ROWS)):
            return visibility, keys
    raise _refusal("a mask that is more than causal, windowed, padded and packed")


def _refusal(what: str) -> ClearheadError:
    return ClearheadError(
        f"attn_implementation={NAME!r} cannot compute {what}: call "
        "model.set_attn_implementation('eager')"
    )


AttentionInterface.register(NAME, attend_with_sinks)
AttentionMaskInterface.register(NAME, visible_keys)
