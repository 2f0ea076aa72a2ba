"""The probe's way into any model: an attention implementation that looks, then calls the plain one.

transformers' models look their attention function up by name in `AttentionInterface` at every
call. A probed model is switched to the name below; its own function still computes the output, so
its logits are those of the plain model, bit for bit.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead import ops
from clearhead.diagnose.running import layers_of
from clearhead.diagnose.weights import AttentionCall
from clearhead.errors import ClearheadError
from clearhead.nn.attention import Attention
from clearhead.ops import oracles

NAME = "clearhead_probe"


@dataclass(kw_only=True)
class _Probe:
    original: str
    layers: dict[nn.Module, int]  # which decoder layer a module is in
    observe: Callable[[AttentionCall], None]
    last: Callable[[], Tensor | None] = lambda: None  # the queries observed last

    def show(self, call: AttentionCall) -> None:
        # DiffLlama calls twice with the same queries and keys, for the halves of its values.
        if self.last() is not call.q:
            self.last = weakref.ref(call.q)
            self.observe(call)


_active: _Probe | None = None


@contextmanager
def probing(model: Any, observe: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Show every call of attention in the decoder layers of `model` to `observe`.

    The implementation that was set computes the outputs, and is set again afterwards, also when an
    error ends the body. One model at a time.

    Raises:
        ClearheadError: the model does not use `AttentionInterface`, or a probe is already at work.
    """
    global _active
    if _active is not None:
        raise ClearheadError("a model is already being probed: leave that context first")
    original = model.config._attn_implementation
    layers = {
        module: index for index, layer in enumerate(layers_of(model)) for module in layer.modules()
    }
    _active = _Probe(original=original, layers=layers, observe=observe)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ClearheadError(
                f"{type(model).__name__} does not use transformers' AttentionInterface, "
                "so its attention cannot be observed"
            )
        yield
    finally:
        _active = None
        model.set_attn_implementation(original)


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    probe = _running()
    layer = probe.layers.get(module)
    if layer is not None:
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            probe.show(attention_call(module, layer, query, key, attention_mask, options))
    plain = _plain(module, probe.original)
    return plain(module, query, key, value, attention_mask, **options)


def _mask(*arguments: Any, **options: Any) -> Any:
    """The mask that the original implementation would have been given."""
    original = ALL_MASK_ATTENTION_FUNCTIONS.get(_running().original)
    return None if original is None else original(*arguments, **options)


AttentionInterface.register(NAME, _probe)
AttentionMaskInterface.register(NAME, _mask)


def _running() -> _Probe:
    if _active is None:
        raise ClearheadError(
            f"attention implementation {NAME!r} works only inside clearhead.diagnose's contexts: "
            "call model.set_attn_implementation('sdpa')"
        )
    return _active


def attention_call(
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    """What a function of the interface was asked for, from the arguments that it got."""
    scaling = options.get("scaling")
    common = {
        "module": module,
        "layer": layer,
        "q": query,
        "k": key,
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
    }
    if isinstance(module, Attention):
        names = ("causal", "sink", "key_mask", "segments", "coefficients", "by_side", "rows")
        return AttentionCall(**common, **{name: options[name] for name in names})
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return AttentionCall(
        **common,
        causal=bool(causal) and mask is None and query.shape[2] > 1,
        sink=options.get("s_aux"),
        mask=mask,
        bias=options.get("position_bias"),
        softcap=options.get("softcap"),
    )


def _plain(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that the implementation's name stands for in this module."""
    if isinstance(module, Attention) and implementation in _OURS:
        return _OURS[implementation]
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


def _ours(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    def run(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: None,
        *,
        scaling: float,
        coefficients: Any,
        rows: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        out = attend(q, k, v, scale=scaling, **options).to(v.dtype)
        return out.transpose(1, 2), None

    return run


_OURS = {"sdpa": _ours(ops.attend), "eager": _ours(oracles.attend)}
