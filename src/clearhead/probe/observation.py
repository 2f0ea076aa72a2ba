"""Observation of a running model: statistics of its attention, hidden states and gates.

A model's own attention function still computes the output, so the logits of an observed model are
those of the plain one, bit for bit.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead.errors import ClearheadError
from clearhead.models.attention_interface import INTERFACES
from clearhead.models.inspection import batches, decoder_layers, evaluating, run_backbone
from clearhead.nn.attention import Attention
from clearhead.nn.bases import Interface
from clearhead.nn.gate import Gate
from clearhead.ops.precision import without_autocast
from clearhead.ops.sinks import as_null
from clearhead.ops.visibility import Visibility
from clearhead.probe.attention_call import AttentionCall
from clearhead.probe.attention_override import AttentionOverride

NAME = "clearhead_probe"
INPUT = -1  # the layer number of the hidden states before the first layer


class Statistic(Protocol):
    """Sums over everything observed.

    `observe` takes, as one of `attention`, an AttentionCall (within `ByTile` also a tile, which it
    does not change); of `hidden`, a layer's number and output [B, T, C], or the first layer's input
    as layer `INPUT`; of `gates`, a layer's number and its gates from 0 to 1.
    """

    @property
    def observe(self) -> Callable[..., None]: ...

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records; none where nothing was observed."""


def measures_of(statistics: Iterable[Statistic]) -> list[dict[str, Any]]:
    """The measures of several statistics."""
    return [line for statistic in statistics for line in statistic.measures()]


@contextmanager
def observe(
    model: Any,
    *,
    attention: Sequence[Statistic] = (),
    hidden: Sequence[Statistic] = (),
    gates: Sequence[Statistic] = (),
) -> Iterator[None]:
    """Feed the statistics with every forward pass of `model` in the body.

    The attention implementation that was set computes the outputs, and is set again afterwards,
    also when an error ends the body. Attention is observed in one model at a time.

    Raises:
        ClearheadError: the model has no list of decoder layers; or `attention` is to be observed,
            and the model does not use `AttentionInterface`, or attention is already observed.
    """
    layers = decoder_layers(model)
    with ExitStack() as stack:
        for hook in _hooks(layers, hidden, gates):
            stack.enter_context(hook)
        if attention:
            inside = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
            override = _OVERRIDE.within(
                model,
                _Probe(layers=inside, statistics=attention),
                busy="a model is already being probed: leave that context first",
                refusal=f"{type(model).__name__} does not use transformers' AttentionInterface, "
                "so its attention cannot be observed",
            )
            stack.enter_context(override)
        yield


def measure(
    model: Any,
    windows: Iterable[Tensor],
    *,
    batch_size: int,
    attention: Sequence[Statistic] = (),
    hidden: Sequence[Statistic] = (),
) -> list[dict[str, Any]]:
    """Run windows of text through a model once, and return the measures of all statistics.

    Args:
        model: any model of transformers with a list of decoder layers. Its mode and its attention
            implementation are left as they were.
        windows: int64 [T] each, text from position 0 on, all of one length.
        batch_size: windows run together; it changes speed and memory, not the results.
        attention: statistics of queries and keys.
        hidden: statistics of hidden states.

    Returns:
        Payloads of "measure" records, each with "metric", "value" and its dimensions.

    Raises:
        ClearheadError: windows or a model on which this cannot be measured.
    """
    with evaluating(model), observe(model, attention=attention, hidden=hidden):
        for ids_BT in batches(model, windows, batch_size):
            run_backbone(model, ids_BT)
    return [*measures_of(attention), *measures_of(hidden)]


def _hooks(
    layers: list[nn.Module], hidden: Sequence[Statistic], gates: Sequence[Statistic]
) -> Iterator[Any]:
    def entered(module: nn.Module, arguments: Any, keywords: Any) -> None:
        x = arguments[0] if arguments else keywords.get("hidden_states")
        if isinstance(x, Tensor):
            _show(hidden, INPUT, x)

    def left(layer: int, output: Any) -> None:
        _show(hidden, layer, output[0] if isinstance(output, tuple) else output)

    def closed(layer: int, logit_BTC: Tensor) -> None:
        wide = torch.promote_types(logit_BTC.dtype, torch.float32)
        _show(gates, layer, torch.sigmoid(logit_BTC.detach().to(wide)))

    if hidden:
        yield layers[0].register_forward_pre_hook(entered, with_kwargs=True)
    for i, layer in enumerate(layers):
        if hidden:
            yield layer.register_forward_hook(lambda _m, _a, output, i=i: left(i, output))
        for module in layer.modules():
            if gates and isinstance(module, Gate):
                yield module.gate_proj.register_forward_hook(
                    lambda _m, _a, logit, i=i: closed(i, logit)
                )


def _show(statistics: Sequence[Statistic], layer: int, x_BTC: Tensor) -> None:
    with torch.no_grad(), without_autocast(x_BTC):
        for statistic in statistics:
            statistic.observe(layer, x_BTC)


@dataclass(kw_only=True)
class _Probe:
    layers: dict[nn.Module, int]  # the decoder layer that a module is in
    statistics: Sequence[Statistic]
    last: Callable[[], Tensor | None] = lambda: None  # the queries observed last

    def show(self, call: AttentionCall) -> None:
        # DiffLlama calls twice with the same queries and keys, for the halves of its values.
        if self.last() is not call.q:
            self.last = weakref.ref(call.q)
            for statistic in self.statistics:
                statistic.observe(call)


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    probe, original = _OVERRIDE.entered()
    layer = probe.layers.get(module)
    if layer is not None:
        with torch.no_grad(), without_autocast(query):
            call = attention_call(module, layer, query, key, attention_mask, options)
            probe.show(replace(call, v=value, prefix=options.get("prefix")))
    plain = plain_attention(module, original)
    return plain(module, query, key, value, attention_mask, **options)


_OVERRIDE = AttentionOverride[_Probe](NAME, _probe, home="clearhead.probe")


def attention_call(
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    """The call that the arguments of a function of the interface describe."""
    scaling = options.get("scaling")
    common = {
        "module": module,
        "layer": layer,
        "q": query,
        "k": key,
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
    }
    if isinstance(module, Attention):
        own = {name: options[name] for name in ("visibility", "sink", "lambdas")}
        if (prefix := options["prefix"]) is not None:
            null = as_null(query, prefix, own["sink"], common["scale"])
            own["sink"], own["sink_value"] = null
        return AttentionCall(**common, **own, as_softmax=module.as_softmax)
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


def plain_attention(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function that `implementation` names for this module."""
    if isinstance(module, Attention) and implementation in INTERFACES:
        return _of_interface(INTERFACES[implementation])
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


def _of_interface(attend: Interface) -> Callable[..., tuple[Tensor, None]]:
    def run(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        out = attend(module, q, k, v, scale=options.pop("scaling"), **options)
        return out.transpose(1, 2), None

    return run
