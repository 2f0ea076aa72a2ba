"""Linear layers with quantised weights and inputs, inside a context."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError
from clearhead.models.conversion import refuse_quantised
from clearhead.models.inspection import batches, evaluating, run_backbone
from clearhead.ops.hadamard import rotate_channels
from clearhead.quantize import quantizers
from clearhead.quantize.schemes import Rounding

CALIBRATION = 16  # windows, as the reproduction that `w8a8-fine` follows has
Layers = dict[str, nn.Module]


def linear_layers(model: Any) -> Layers:
    """The layers that schemes quantise: every `nn.Linear`, and GPT-2's `Conv1D`, by name; not the
    output matrix, which if tied is the embedding that the papers leave in full precision.

    Raises:
        ClearheadError: a model without such layers, or quantised already.
    """
    refuse_quantised(model.config)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or type(parameter.data) is not Tensor:
            kind = f"{type(parameter.data).__name__} of {parameter.dtype}"
            raise ClearheadError(
                f"{name} is a {kind}, so the model is already quantised: give the one in full "
                "precision that it was made from"
            )
    unquantised = {id(module.weight) for module in _tables(model)}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module.weight) not in unquantised
    }
    if not layers:
        raise ClearheadError(f"{type(model).__name__} has no linear layers to quantise")
    return layers


def _tables(model: Any) -> list[Any]:
    """The embeddings, and the output matrix if the model has one."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [*embeddings, *filter(None, [model.get_output_embeddings()])]


def left_out(model: Any, layers: Layers) -> dict[str, int]:
    """Matrices outside `layers` that multiply activations but are quantised by no scheme, such as
    experts in one three-dimensional tensor: {name: elements}."""
    known = {id(module.weight) for module in [*layers.values(), *_tables(model)]}
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and id(parameter) not in known and "bias" not in name
    }


@contextmanager
def weights(layers: Layers, how: Rounding, rotated: bool = False) -> Iterator[None]:
    """Quantise weights, not biases, while the body runs; restore the same tensors afterwards. Where
    `rotated`, the input axis is first rotated by a Hadamard matrix."""
    widths = [_outputs_first(module).shape[1] for module in layers.values()]
    if how.scale == "group" and how.quantizer != "mxfp4" and how.group >= max(widths):
        raise ClearheadError(
            f"groups of {how.group} are no narrower than any input ({max(widths)} at most), "
            "so they are channels: choose a smaller group (w4-group16) or w4-channel"
        )
    done: set[nn.Parameter] = set()
    with ExitStack() as stack:
        for name, module in layers.items():
            weight = module.get_parameter("weight")
            if weight in done:  # shared between two layers: quantised once
                continue
            with naming(f"{name}.weight"):
                rows = _outputs_first(module)
                after = quantise_rows(rotate_channels(rows) if rotated else rows, how)
            done.add(weight)
            stack.callback(setattr, weight, "data", weight.data)
            weight.data = after.T if isinstance(module, Conv1D) else after
        yield


def quantise_rows(x_NI: Tensor, how: Rounding, top: Tensor | None = None) -> Tensor:
    """Weights [outputs, inputs], or inputs [tokens, inputs], quantised and dequantised; `top` of a
    calibrated scale broadcasts to x."""
    if how.scale == "group":
        groups = quantise(quantizers.grouped(x_NI, how.group), how, (2,))
        return groups.flatten(1)[:, : x_NI.shape[1]]
    return quantise(x_NI, how, (0, 1) if how.scale == "tensor" else (1,), top)


def quantise(x: Tensor, how: Rounding, dims: tuple[int, ...], top: Tensor | None = None) -> Tensor:
    """x by the quantiser that `how` names."""
    match how.quantizer:
        case "mxfp4":
            return quantizers.mxfp4(x, dims)
        case "fp8":
            return quantizers.fp8(x, dims, top=top)
        case "zeropoint":
            return quantizers.zeropoint(x, how.bits, dims, kept=how.kept)
        case "integers":
            return quantizers.integers(x, how.bits, dims, top=top, levels=how.levels)
    return quantizers.absmax(x, how.bits, dims, top=top)


def calibrated(
    model: Any, layers: Layers, windows: Sequence[Tensor], rotated: bool = False
) -> dict[str, Tensor]:
    """The largest |x| of every input channel of every layer on the first `CALIBRATION` windows, in
    full precision, [I] each."""
    tops: dict[str, Tensor] = {}

    def watch(name: str, x: Tensor) -> None:
        x = rotate_channels(x.detach()) if rotated else x.detach()
        top = x.abs().flatten(0, -2).amax(0)
        tops[name] = torch.maximum(tops.get(name, top), top)

    with hooked(layers, watch), evaluating(model):
        for ids_1T in batches(model, windows[:CALIBRATION], 1):
            run_backbone(model, ids_1T)
    if unseen := [name for name in layers if name not in tops]:
        raise ClearheadError(
            f"the calibration text never went through {unseen[0]} (an expert never chosen, or a "
            "layer of which only the weights are used), so its inputs have no scale: choose a "
            "scheme that needs no calibration, such as w8a8-token"
        )
    return tops


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add the tensor's name to an error."""
    try:
        yield
    except ClearheadError as error:
        raise ClearheadError(f"{what}: {error}") from error


@contextmanager
def hooked(layers: Layers, change: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """In the body `change` is shown each layer's name and input, and may give another input."""

    def hook(name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> Any:
        x = change(name, given[0])
        return None if x is None else (x, *given[1:])

    with ExitStack() as stack:
        for name, module in layers.items():
            stack.enter_context(module.register_forward_pre_hook(partial(hook, name)))
        yield


def _outputs_first(module: nn.Module) -> Tensor:
    """A Linear's weight as it is, a Conv1D's turned: [outputs, inputs]."""
    weight = module.get_parameter("weight").data
    return weight.T if isinstance(module, Conv1D) else weight
