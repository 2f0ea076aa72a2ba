"""Attention with quantised logits, keys and values, in any model with an attention interface.

A logit is what enters the softmax: scaled, capped and with a position's bias where the model has
them, as in Figure 8 of arXiv 2410.05258. Keys that a query does not see have no logit, so they
count for no scale; nor does the constant logit of a sink (0 under softmax-1), which is no product.
Differential attention has the logits of both its maps quantised, each map's heads by themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.probe.attention_call import AttentionCall, Scores, normalised
from clearhead.probe.attention_override import AttentionOverride
from clearhead.probe.observation import attention_call, plain_attention
from clearhead.quantize.keys_values import cached_unrotated, keys_before_rotation, rounded
from clearhead.quantize.linear import naming
from clearhead.quantize.quantizers import absmax
from clearhead.quantize.schemes import KeysValues, Logits

NAME = "clearhead_quantized_attention"


@dataclass(kw_only=True)
class _Running:
    logits: Logits | None
    keys_values: KeysValues | None
    names: dict[nn.Module, str]
    called: set[str]


@contextmanager
def attention(
    model: Any, logits: Logits | None, keys_values: KeysValues | None = None
) -> Iterator[set[str]]:
    """In the body every attention of `model` runs on quantised logits, or keys and values; its own
    implementation is set again afterwards.

    Yields the names of the attention modules that ran so.

    Of logits a scale is by "tensor" shared by all heads and queries of one text, by "head" by all
    queries of a head, by "row" by the keys of one query.

    Raises:
        ClearheadError: the model does not use `AttentionInterface`; another model is in such a
            context; inside it, NaN or infinite logits, keys or values.
    """
    state = _Running(
        logits=logits,
        keys_values=keys_values,
        names={m: name for name, m in model.named_modules()},
        called=set(),
    )
    with ExitStack() as stack:
        if keys_values is not None:
            stack.enter_context(keys_before_rotation(model, keys_values))
        override = _OVERRIDE.within(
            model,
            state,
            busy="attention is already being quantised: leave that context",
            refusal=without_interface(model),
        )
        stack.enter_context(override)
        yield state.called


def without_interface(model: Any) -> str:
    """The error message for a model whose attention cannot be quantised."""
    return (
        f"{type(model).__name__} does not use transformers' AttentionInterface, so its attention "
        "logits, keys and values cannot be quantised; the other schemes work"
    )


def attend(call: AttentionCall, v_BGSV: Tensor, how: Logits) -> Tensor:
    """[B, H, T, V] in the dtype of v: attention of `call` on quantised logits, a tile at a time."""
    top = None
    if how.scale != "row":  # a scale is of one text, not of a batch: [B, 1 or H, 1, 1]
        tops = [_shown(tile).abs().amax((2, 3), keepdim=True) for tile in call.scores()]
        top = torch.stack(tops).amax(0)
        top = top.amax(1, keepdim=True) if how.scale == "tensor" else top
    out = torch.empty(*call.q.shape[:3], v_BGSV.shape[3], dtype=v_BGSV.dtype, device=call.q.device)
    v = v_BGSV.repeat_interleave(call.q.shape[1] // v_BGSV.shape[1], dim=1)
    for tile in call.scores():
        rounded = absmax(_shown(tile), how.bits, (3,), top=top)
        logits, sink = call.competing(rounded, tile.visible, tile.start)
        weights, null = normalised(logits.masked_fill(~tile.visible, -torch.inf), sink)
        rows = weights @ v[:, :, : weights.shape[3]].to(weights.dtype)
        place = slice(tile.start, tile.start + weights.shape[2])
        if null is not None and call.sink_value is not None:
            rows = rows + null[..., None] * call.sink_value[:, :, place]
        out[:, :, place] = rows.to(out.dtype)
    return out


def _shown(tile: Scores) -> Tensor:
    return tile.scores.masked_fill(~tile.visible, 0.0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    running, original = _OVERRIDE.entered()
    name = running.names.get(module, type(module).__name__)
    running.called.add(name)
    if (how := running.keys_values) is not None:
        if not (how.prerope or cached_unrotated(module)):
            with naming(f"the keys of {name}"):
                key = rounded(key, how, keys=True)
        with naming(f"the values of {name}"):
            value = rounded(value, how, keys=False)
    if running.logits is None:
        plain = plain_attention(module, original)
        return plain(module, query, key, value, attention_mask, **options)
    call = attention_call(module, 0, query, key, attention_mask, options)
    with naming(f"the logits of {name}"):
        return attend(call, value, running.logits).transpose(1, 2).contiguous(), None


_OVERRIDE = AttentionOverride[_Running](NAME, _attention, home="clearhead.quantize")
