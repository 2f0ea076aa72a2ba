"""The probe's way into any model: an attention implementation that looks, then calls the plain one.

A probed model's own function still computes the output, so its logits are those of the plain model,
bit for bit.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead import ops
from clearhead.diagnose.stand_in import StandIn
from clearhead.diagnose.weights import AttentionCall
from clearhead.errors import ClearheadError
from clearhead.models.inspection import decoder_layers
from clearhead.nn.attention import Attention
from clearhead.ops import oracles
from clearhead.ops.visibility import Visibility

NAME = "clearhead_probe"


@dataclass(kw_only=True)
class _Probe:
    layers: dict[nn.Module, int]  # which decoder layer a module is in
    observe: Callable[[AttentionCall], None]
    last: Callable[[], Tensor | None] = lambda: None  # the queries observed last

    def show(self, call: AttentionCall) -> None:
        # DiffLlama calls twice with the same queries and keys, for the halves of its values.
        if self.last() is not call.q:
            self.last = weakref.ref(call.q)
            self.observe(call)


@contextmanager
def probing(model: Any, observe: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Show every call of attention in the decoder layers of `model` to `observe`.

    The implementation that was set computes the outputs, and is set again afterwards, also when an
    error ends the body. One model at a time.

    Raises:
        ClearheadError: the model does not use `AttentionInterface`, or a probe is already at work.
    """
    layers = {
        module: index
        for index, layer in enumerate(decoder_layers(model))
        for module in layer.modules()
    }
    with _STAND_IN.within(
        model,
        _Probe(layers=layers, observe=observe),
        busy="a model is already being probed: leave that context first",
        refusal=f"{type(model).__name__} does not use transformers' AttentionInterface, "
        "so its attention cannot be observed",
    ):
        yield


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    probe = _STAND_IN.state
    layer = probe.layers.get(module)
    if layer is not None:
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            probe.show(attention_call(module, layer, query, key, attention_mask, options))
    plain = _plain(module, _STAND_IN.original)
    return plain(module, query, key, value, attention_mask, **options)


_STAND_IN = StandIn[_Probe](NAME, _probe, home="clearhead.diagnose")


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
        names = ("visibility", "sink", "lambdas", "rows")
        return AttentionCall(**common, **{name: options[name] for name in names})
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return AttentionCall(
        **common,
        visibility=Visibility(causal=bool(causal) and mask is None and query.shape[2] > 1),
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
        visibility: Visibility,
        lambdas: Any,
        rows: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        out = attend(q, k, v, scale=scaling, **visibility._asdict(), **options).to(v.dtype)
        return out.transpose(1, 2), None

    return run


_OURS = {"sdpa": _ours(ops.attend), "eager": _ours(oracles.attend)}
