"""An attention implementation that replaces a model's own inside a context.

transformers' models look their attention function up by name in `AttentionInterface` at every
call, and the function that makes its mask in `AttentionMaskInterface`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead.errors import ClearheadError
from clearhead.models.attention_interface import INTERFACES
from clearhead.nn.attention import Attention
from clearhead.nn.bases import Interface
from clearhead.probe.attention_call import AttentionCall, described

NAME = "clearhead_override"
_entered: list[tuple[Callable[..., Any], str]] = []  # at most one: the function, what it replaces


@contextmanager
def overridden(model: Any, attend: Callable[..., Any], *, refusal: str) -> Iterator[None]:
    """Call `attend` for the model's attention in the body; its own is set again afterwards.

    Args:
        attend: takes (module, query, key, value, describe, plain) and returns the output and the
            weights or None, as plain(query, key, value) does, the model's own attention;
            describe(layer, key) gives the AttentionCall.

    Raises:
        ClearheadError: within another such context; `refusal`, where the model does not look its
            attention up.
    """
    if _entered:
        raise ClearheadError(
            "attention is already being observed or quantised: leave that context first"
        )
    original = model.config._attn_implementation
    _entered.append((attend, original))
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ClearheadError(refusal)
        yield
    finally:
        _entered.clear()
        model.set_attn_implementation(original)


def _now() -> tuple[Callable[..., Any], str]:
    if not _entered:
        raise ClearheadError(
            f"attention implementation {NAME!r} works only inside contexts of clearhead.probe and "
            "clearhead.quantize: call model.set_attn_implementation('sdpa')"
        )
    return _entered[0]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> Any:
    attend, original = _now()
    own = _own_attention(module, original)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return own(module, query, key, value, mask, **options)

    def describe(layer: int, key: Tensor) -> AttentionCall:
        call = described(module, layer, query, key, mask, options)
        return replace(call, v=value, prefix=options.get("prefix"))

    return attend(module, query, key, value, describe, plain)


def _mask(*arguments: Any, **options: Any) -> Any:
    """The mask that the original implementation would have been given."""
    original = ALL_MASK_ATTENTION_FUNCTIONS.get(_now()[1])
    return None if original is None else original(*arguments, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def _own_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that `implementation` names for this module."""
    if isinstance(module, Attention) and implementation in INTERFACES:
        return partial(_of_interface, INTERFACES[implementation])
    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for kind in type(module).__mro__:  # "eager" is each model's own, in its file
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if implementation == "eager" and eager is not None:
            return eager
    raise ClearheadError(
        f"{type(module).__name__} has no attention implementation {implementation!r} to call: "
        "call model.set_attn_implementation('sdpa')"
    )


def _of_interface(
    attend: Interface, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    out = attend(module, q, k, v, scale=options.pop("scaling"), **options)
    return out.transpose(1, 2), None
