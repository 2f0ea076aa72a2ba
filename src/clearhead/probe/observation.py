"""Observation of a running model: statistics of its attention, hidden states and gates.

A model's own attention function still computes the output, so that its logits stay the same bit for
bit: transformers' models look that function up by name at every call, and `overridden` puts a
function of ours there.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead.errors import ClearheadError
from clearhead.models.attention_interface import OWN
from clearhead.models.inspection import batches, decoder_layers, evaluating, run_backbone
from clearhead.nn.attention import Attention
from clearhead.nn.gate import Gate
from clearhead.ops.precision import without_autocast
from clearhead.probe.attention_call import AttentionCall, described

INPUT = -1  # the layer number of the hidden states before the first layer


class Statistic(Protocol):
    """A statistic that accumulates over everything observed.

    `observe` gets, as one of `attention`, an AttentionCall (within `ByTile` also a tile); of
    `hidden`, a layer's index and output [B, T, C], or `INPUT` and the first layer's input; of
    `gates`, a layer's index and its gates from 0 to 1.
    """

    def observe(self, *args: Any, **kwargs: Any) -> None: ...

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records; none where nothing was observed."""
        return []


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
    """Pass every forward pass of `model` in the body to the statistics.

    The model's own attention implementation computes the outputs, and is restored afterwards, also
    after an error. Attention can be observed in one model at a time.

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

            def attend(
                module: Any, query: Tensor, key: Tensor, value: Tensor, describe: Any, plain: Any
            ) -> Any:
                if module in inside:
                    with torch.no_grad(), without_autocast(query):
                        call = describe(inside[module], key)
                        for statistic in attention:
                            statistic.observe(call)
                return plain(query, key, value)

            refusal = (
                f"{type(model).__name__} does not use transformers' AttentionInterface, so its "
                "attention cannot be observed"
            )
            stack.enter_context(overridden(model, attend, refusal=refusal))
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


NAME = "clearhead_override"  # registered with transformers while a context is entered


@contextmanager
def overridden(model: Any, attend: Callable[..., Any], *, refusal: str) -> Iterator[None]:
    """Replace the model's attention by `attend` in the body; restore its own afterwards.

    attend(module, query, key, value, describe, plain) returns an output and weights or None, as
    the model's own plain(query, key, value) does; describe(layer, key) gives the AttentionCall.
    """
    if NAME in ALL_ATTENTION_FUNCTIONS:
        raise ClearheadError("attention is already being observed or quantised")
    original = model.config._attn_implementation
    own_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(original, lambda *arguments, **options: None)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        own = _own_attention(module, original)

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Any:
            return own(module, query, key, value, mask, **options)

        def describe(layer: int, key: Tensor) -> AttentionCall:
            return described(module, layer, query, key, value, mask, options)

        return attend(module, query, key, value, describe, plain)

    ALL_ATTENTION_FUNCTIONS[NAME] = attention
    AttentionMaskInterface.register(NAME, own_mask)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ClearheadError(refusal)
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]
        model.set_attn_implementation(original)


def _own_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that `implementation` names for this module."""
    if isinstance(module, Attention) and implementation in OWN:
        return OWN[implementation]
    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for kind in type(module).__mro__:  # "eager" is each model's own, in its file
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if implementation == "eager" and eager is not None:
            return eager
    raise ClearheadError(f"{type(module).__name__} has no attention named {implementation!r}")
