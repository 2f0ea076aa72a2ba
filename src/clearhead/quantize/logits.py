"""Attention whose logits are written in few bits, in any model with an attention interface.

A logit is what enters the softmax: scaled, capped and with a position's bias where the model has
them, as in Figure 8 of arXiv 2410.05258. Keys that a query does not see have no logit, so they
count for no scale; nor does the constant logit of a sink (0 under softmax-1), which is no product.
Differential attention has the logits of both its maps quantised, each map's heads by themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from clearhead.diagnose.interface import attention_call
from clearhead.diagnose.weights import AttentionCall, Scores, normalised
from clearhead.errors import ClearheadError
from clearhead.quantize.linear import naming
from clearhead.quantize.quantizers import absmax
from clearhead.quantize.schemes import Logits

NAME = "clearhead_quantized_logits"


@dataclass(kw_only=True)
class _Running:
    how: Logits
    mask: Callable[..., Any] | None  # that of the implementation which was set
    names: dict[nn.Module, str]
    called: set[str]


_running: _Running | None = None


@contextmanager
def logits(model: Any, how: Logits) -> Iterator[set[str]]:
    """Every attention of `model` on quantised logits; its implementation is set again afterwards.

    Yields the names of the attention modules that ran so.

    By "tensor" a scale is shared by all heads and queries of one text, by "head" by all queries of
    a head, by "row" by the keys of one query.

    Raises:
        ClearheadError: the model does not use `AttentionInterface`; another model is in such a
            context; inside it, NaN or infinite logits.
    """
    global _running
    if _running is not None:
        raise ClearheadError("attention logits are already being quantised: leave that context")
    original = model.config._attn_implementation
    _running = _Running(
        how=how,
        mask=ALL_MASK_ATTENTION_FUNCTIONS.get(original),
        names={module: name for name, module in model.named_modules()},
        called=set(),
    )
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ClearheadError(without_interface(model))
        yield _running.called
    finally:
        _running = None
        model.set_attn_implementation(original)


def without_interface(model: Any) -> str:
    """Why a model's logits are out of reach."""
    return (
        f"{type(model).__name__} does not use transformers' AttentionInterface, so its attention "
        "logits cannot be quantised; the other schemes work"
    )


def attend(call: AttentionCall, v_BGSV: Tensor, how: Logits) -> Tensor:
    """[B, H, T, V] in the dtype of v: attention of `call` on quantised logits, a tile at a time."""
    top = None
    if how.scale != "row":
        top = _largest(call, how)
    out = torch.empty(*call.q.shape[:3], v_BGSV.shape[3], dtype=v_BGSV.dtype, device=call.q.device)
    v = v_BGSV.repeat_interleave(call.q.shape[1] // v_BGSV.shape[1], dim=1)
    for tile in call.scores():
        shown = tile.scores.masked_fill(~tile.visible, 0.0)
        rounded = absmax(shown, how.bits, (3,), top=top)
        hidden = rounded.masked_fill(~tile.visible, -torch.inf)
        weights, _ = normalised(hidden, call.sink)
        keys = weights.shape[3]
        rows = weights @ v[:, :, :keys].to(weights.dtype)
        out[:, :, tile.start : tile.start + weights.shape[2]] = rows.to(out.dtype)
    return out


def _largest(call: AttentionCall, how: Logits) -> Tensor:
    """max |logit| over what is seen, [B, 1 or H, 1, 1]: a scale is of one text, not of a batch."""

    def of(tile: Scores) -> Tensor:
        return tile.scores.masked_fill(~tile.visible, 0.0).abs().amax((2, 3), keepdim=True)

    tops = [of(tile) for tile in call.scores()]
    top = torch.stack(tops).amax(0)
    return top.amax(1, keepdim=True) if how.scale == "tensor" else top


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    running = _now()
    name = running.names.get(module, type(module).__name__)
    running.called.add(name)
    call = attention_call(module, 0, query, key, attention_mask, options)
    with naming(f"the logits of {name}"):
        return attend(call, value, running.how).transpose(1, 2).contiguous(), None


def _mask(*arguments: Any, **options: Any) -> Any:
    """The mask that the original implementation would have been given."""
    original = _now().mask
    return None if original is None else original(*arguments, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def _now() -> _Running:
    if _running is None:
        raise ClearheadError(
            f"attention implementation {NAME!r} works only inside clearhead.quantize's contexts: "
            "call model.set_attn_implementation('sdpa')"
        )
    return _running
