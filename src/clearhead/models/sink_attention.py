"""`attn_implementation="clearhead"`: `ops.attend` for the sink models of transformers.

Models such as gpt-oss and GraniteSWA hand one sink logit a head to their attention function
(`s_aux`) and refuse SDPA, so a CPU runs them eagerly, T × T. After `import clearhead.models`,

    model.set_attn_implementation("clearhead")

computes the same by tiles, with the exact gradient of the sinks.

transformers describes visibility as a function of indices. `visible_keys` reads causality, padding
and packed texts off that function and compares the result with all of it. A visibility that
`ops.attend` cannot express is refused, never approximated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from clearhead import ops
from clearhead.errors import ClearheadError
from clearhead.ops.visibility import Visibility

NAME = "clearhead"
ROWS = 1024  # queries compared at a time
REFUSED = {
    "deepseek_v4": "it appends compressed keys to a tensor mask",
    "hy_v4": "its top-k choice of keys is written into a tensor mask",
}
# Keywords of transformers' attention functions that would change the result.
UNSUPPORTED = ("indices", "softcap", "position_bias", "head_mask", "cu_seq_lens_q")


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
) -> Tensor:
    """Make the mask that `attend_with_sinks` reads; a function of AttentionMaskInterface.

    Returns:
        bool [B, S], the keys that are no padding, or [0, S] without padding. S counts the keys
        that exist, fewer than a static cache has room for. Its attribute `visibility` holds the
        arguments of `ops.attend`.

    Raises:
        ClearheadError: for a model or a mask whose visibility `ops.attend` cannot express.
    """
    if reason := REFUSED.get(config.model_type):
        raise _refusal(f"{config.model_type}: {reason}")
    before = int(q_offset) - kv_offset  # keys earlier than the first query's own
    keys = before + q_length
    key_mask = None
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + keys]
        if not bool(attention_mask.all()):
            key_mask = attention_mask
    visibility = Visibility(key_mask=key_mask)
    if mask_function is not causal_mask_function:
        batch = torch.arange(batch_size, device=device)

        def sees(query: Tensor, key: Tensor) -> Tensor:
            """bool [B, …] for indices of queries and keys that broadcast, counted from 0."""
            shape = torch.broadcast_shapes(query.shape, key.shape)
            own = batch.view(-1, *(1 for _ in shape))
            seen = mask_function(own, torch.zeros_like(own), query + int(q_offset), key + kv_offset)
            return seen.expand(batch_size, *shape)

        visibility = _described(sees, visibility, q_length, before, local_size, device)
    mask = torch.empty(0, keys, dtype=torch.bool, device=device) if key_mask is None else key_mask
    mask.visibility = visibility  # type: ignore[attr-defined]
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
        ClearheadError: for dropout, another mask, or a keyword that would change the result.
    """
    visibility = getattr(attention_mask, "visibility", None)
    if visibility is None or attention_mask is None:
        raise _refusal(f"{type(module).__name__} makes an attention mask of its own")
    if dropout:
        raise _refusal(f"dropout of attention weights ({dropout:g})")
    if given := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise _refusal(f"{type(module).__name__} with {', '.join(given)}")
    keys = attention_mask.shape[1]
    sink = None if s_aux is None else s_aux.flatten()
    o_BHTV = ops.attend(
        *(q_BHTD, k_BGSD[:, :, :keys], v_BGSV[:, :, :keys]),
        sink=sink,
        scale=scaling,
        **visibility._asdict(),
    )
    return o_BHTV.transpose(1, 2), None


def _described(
    sees: Callable[[Tensor, Tensor], Tensor],
    visibility: Visibility,
    queries: int,
    before: int,
    window: int | None,
    device: torch.device | str,
) -> Visibility:
    """The visibility of `sees`, by a few of its values, and checked against all of them."""
    keys = before + queries
    index = torch.arange(queries, device=device)
    causal = queries == 1 or not bool(sees(index[:1], before + index[1:2]).any())
    if window is not None and not causal:
        window += 1  # two-sided windows of transformers include their distance
    segments = None
    if causal and not before and queries > 1 and window != 1:  # texts are packed without a cache
        begins_BT = ~sees(index[1:], index[:-1])
        if bool(begins_BT.any()):
            segments = torch.nn.functional.pad(begins_BT.long().cumsum(1), (1, 0))
    visibility = visibility._replace(causal=causal, window=window, segments=segments)
    masks_alone = visibility._replace(key_mask=None)  # padding is no part of the function
    for span in masks_alone.spans(queries, keys, ROWS):
        rows = torch.arange(span.start, span.stop, device=device)[:, None]
        seen_BRS = sees(rows, torch.arange(keys, device=device)[None])
        whole = span._replace(first=0, end=keys)
        hidden = masks_alone.hidden(whole, queries, keys, torch.device(device))
        expected = torch.ones_like(seen_BRS) if hidden is None else ~hidden[:, 0]
        if not bool((seen_BRS == expected).all()):
            raise _refusal("a mask that is more than causal, windowed, padded and packed")
    return visibility


def _refusal(what: str) -> ClearheadError:
    return ClearheadError(
        f"attn_implementation={NAME!r} cannot compute {what}: call "
        "model.set_attn_implementation('eager')"
    )


AttentionInterface.register(NAME, attend_with_sinks)
AttentionMaskInterface.register(NAME, visible_keys)
