"""Export of schemes to the compressed-tensors format, which vLLM and transformers load.

A weight is stored as integers (or eight-bit floats) with its scales, which are those of the
simulation; inputs have a calibrated scale, or one per token that the server computes at run time.
"""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, require
from clearhead.quantize.linear import Layers, calibrated, linear_layers, naming
from clearhead.quantize.measure import Texts
from clearhead.quantize.quantizers import FP8_TOP, grouped, largest_of
from clearhead.quantize.schemes import Scheme

_SAID = r"(w8a8|fp8)-(static|token)|w[48]a16-(channel|group\d*)"


def stated(scheme: Scheme) -> dict[str, Any]:
    """The scheme in the format's terms, "weights" and "input_activations"; a ClearheadError for one
    that the format, or a server that reads it, has no words for."""
    how, inputs = scheme.weights, scheme.activations
    if not re.fullmatch(_SAID, scheme.name) or how is None:
        raise ClearheadError(
            f"compressed-tensors cannot say {scheme.name}: choose {_nearest(scheme)}"
        )
    kind: dict[str, Any] = {"num_bits": how.bits, "symmetric": True}
    kind["type"] = "float" if how.quantizer == "fp8" else "int"
    weights = {**kind, "strategy": how.scale, "dynamic": False}
    if how.scale == "group":
        weights["group_size"] = how.group
    if inputs is None:
        return {"weights": weights}
    static = {"strategy": "tensor", "dynamic": False}
    scale = static if scheme.calibrated else {"strategy": "token", "dynamic": True}
    return {"weights": weights, "input_activations": {**kind, **scale}}


def _nearest(scheme: Scheme) -> str:
    if named := [part for part in scheme.name.split("+") if re.fullmatch(_SAID, part)]:
        return named[0]
    how, inputs = scheme.weights, scheme.activations
    if how is not None and inputs is None:
        scale = f"group{how.group}" if how.scale == "group" else "channel"
        return f"w{4 if how.bits <= 6 else 8}a16-{scale}"
    whole = inputs is not None and inputs.scale in ("tensor", "channel")
    return "w8a8-static" if whole else "w8a8-token"


def as_loaded(scheme: Scheme) -> Scheme:
    """The scheme as transformers computes it from this format: it divides a token's largest
    number by 127.5, where vLLM and the simulation divide by 127."""
    how, inputs = scheme.weights, scheme.activations
    if how is None or how.quantizer != "absmax" or inputs is None:
        return scheme
    inputs = replace(inputs, quantizer="integers", levels=127.5)
    return replace(scheme, weights=replace(how, quantizer="integers"), activations=inputs)


def check_widths(layers: Layers, scheme: Scheme) -> None:
    """Refuse layers that the format cannot hold under this scheme."""
    how = scheme.weights
    assert how is not None
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            raise ClearheadError(
                f"{name} is a {type(layer).__name__}: compressed-tensors holds nn.Linear alone"
            )
        if how.scale == "group" and layer.in_features % how.group:
            raise ClearheadError(
                f"compressed-tensors cannot say {scheme.name}: the {layer.in_features} inputs of "
                f"{name} are no whole groups of {how.group}: choose a group that divides them"
            )


def compress(model: Any, scheme: Scheme, texts: Texts) -> Any:
    """Put the linear layers of `model` into the format, in place; return compressed-tensors'
    ModelCompressor, whose `update_config` completes a saved config.json."""
    require("compressed_tensors", "compressed-tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    layers, how, dtype = linear_layers(model), scheme.weights, model.dtype
    check_widths(layers, scheme)
    assert how is not None
    groups = {"group_0": {"targets": ["Linear"], **stated(scheme)}}
    tops = calibrated(model, layers, texts.calibration) if scheme.calibrated else {}
    model.float()  # codes of weights in 16 bits would be rounded twice
    others = (name for name, one in model.named_modules() if isinstance(one, nn.Linear))
    config = {"config_groups": groups, "ignore": [one for one in others if one not in layers]}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    levels = FP8_TOP if how.quantizer == "fp8" else 2 ** (how.bits - 1) - 1
    for name, layer in layers.items():
        with naming(f"{name}.weight"):
            weight_OI = layer.get_parameter("weight").data
            group = how.group if how.scale == "group" else weight_OI.shape[1]
            _, top_OG1 = largest_of(grouped(weight_OI, group), (2,))
            _set(layer, "weight_scale", top_OG1, levels)
        if name in tops:
            _set(layer, "input_scale", tops[name].amax(), levels)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith("_scale"):
            parameter.data = parameter.data.to(dtype)
    return compressor


def _set(layer: nn.Module, name: str, top: Tensor, levels: float) -> None:
    scale = layer.get_parameter(name)
    scale.data = torch.where(top == 0, 1.0, top / levels).to(scale.dtype).view(scale.shape)
