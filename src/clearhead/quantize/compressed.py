"""Export of schemes to the compressed-tensors format, which vLLM and transformers load.

A weight is stored as integers (or eight-bit floats) with its scales, which are those of the
simulation; inputs have a calibrated scale, or one per token that the server computes at run time.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, require
from clearhead.quantize.linear import Layers, calibrated, linear_layers, naming, tops_of
from clearhead.quantize.measure import Texts
from clearhead.quantize.quantizers import FP8_TOP
from clearhead.quantize.schemes import ROTATED, Rounding, Scheme

LIBRARY = ("compressed_tensors", "compressed-tensors")  # the module and the extra
_BITS = 4, 8  # of weights alone, as servers read them


def stated(scheme: Scheme) -> dict[str, Any]:
    """The scheme in the format's terms: "weights" and "input_activations"."""
    how, inputs = scheme.weights, scheme.activations

    def refuse(why: str, nearest: str) -> ClearheadError:
        return ClearheadError(
            f"compressed-tensors cannot say {scheme.name}: {why}: choose {nearest}"
        )

    if scheme.attends:
        parts = [one.removeprefix(ROTATED) for one in scheme.name.split("+")]
        plain = [one for one in parts if not one.startswith(("kv", "logits"))]
        why = "attention is the server's own (vLLM rounds its cache by --kv-cache-dtype fp8)"
        raise refuse(why, plain[0] if plain else "w8a8-token")
    if scheme.rotated:
        why = "no server turns inputs; clearhead convert --rotate turns what can be turned for good"
        raise refuse(why, scheme.name.removeprefix(ROTATED))
    if how is None or (inputs is not None and inputs.quantizer == "zeropoint"):
        raise refuse("servers round activations without a zero-point", "w8a8-token")
    if inputs is None:
        return {"weights": _of_weights(how, refuse)}
    if inputs.scale in ("tensor", "channel"):
        scales = {"tensor": "a scale of each text", "channel": "a scale an input channel"}
        raise refuse(f"activations have {scales[inputs.scale]}", "w8a8-static")
    if (how.bits, inputs.bits) != (8, 8):
        raise refuse("servers multiply in 8 bits", f"w8a8-{inputs.scale}")
    kind = {"num_bits": 8, "type": "float" if how.quantizer == "fp8" else "int", "symmetric": True}
    static = {"strategy": "tensor", "dynamic": False}
    return {
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {
            **kind,
            **(static if scheme.calibrated else {"strategy": "token", "dynamic": True}),
        },
    }


def _of_weights(how: Rounding, refuse: Any) -> dict[str, Any]:
    scale = "channel" if how.scale == "tensor" else how.scale
    bits = min(_BITS, key=lambda bits: abs(bits - how.bits))
    nearest = f"w{bits}a16-{scale}{how.group if scale == 'group' else ''}"
    if how.quantizer == "mxfp4":
        raise refuse("clearhead writes no floats of four bits", nearest)
    if how.quantizer == "zeropoint":
        raise refuse("transformers cannot open its packed zero-points", nearest)
    if how.bits != bits:
        raise refuse("servers read weights of 4 and 8 bits", nearest)
    group = {"group_size": how.group} if how.scale == "group" else {}
    kind = {"num_bits": how.bits, "type": "int", "symmetric": True, "dynamic": False}
    return {**kind, "strategy": how.scale, **group}


def as_loaded(scheme: Scheme) -> Scheme:
    """The scheme as transformers computes it from this format: it divides a token's largest
    number by 127.5, where vLLM and the simulation divide by 127."""
    how, inputs = scheme.weights, scheme.activations
    if how is None or how.quantizer != "absmax" or inputs is None:
        return scheme
    return replace(
        scheme,
        weights=replace(how, quantizer="integers"),
        activations=replace(inputs, quantizer="integers", levels=127.5),
    )


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
            widths = [one.in_features for one in layers.values() if isinstance(one, nn.Linear)]
            powers = (1 << n for n in range(how.group.bit_length() - 1, 4, -1))
            group = next((g for g in powers if not any(width % g for width in widths)), None)
            nearest = f"w{how.bits}a16-group{group}" if group else f"w{how.bits}a16-channel"
            raise ClearheadError(
                f"compressed-tensors cannot say {scheme.name}: the {layer.in_features} inputs of "
                f"{name} are no whole groups of {how.group}: choose {nearest}"
            )


def compress(model: Any, scheme: Scheme, texts: Texts) -> Any:
    """Put the linear layers of `model` into the format, in place.

    Returns:
        compressed-tensors' ModelCompressor, whose `update_config` completes a saved config.json.
    """
    require(*LIBRARY)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    layers = linear_layers(model)
    check_widths(layers, scheme)
    groups = {"group_0": {"targets": ["Linear"], **stated(scheme)}}
    how = scheme.weights
    assert how is not None
    tops = calibrated(model, layers, texts.calibration) if scheme.calibrated else {}
    dtype = model.dtype
    model.float()  # codes of weights in 16 bits would be rounded twice
    others = (name for name, one in model.named_modules() if isinstance(one, nn.Linear))
    config = {"config_groups": groups, "ignore": [one for one in others if one not in layers]}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    levels = FP8_TOP if how.quantizer == "fp8" else 2 ** (how.bits - 1) - 1
    for name, layer in layers.items():
        with naming(f"{name}.weight"):
            _set(layer, "weight_scale", tops_of(layer.get_parameter("weight").data, how), levels)
        if name in tops:
            _set(layer, "input_scale", tops[name].amax().reshape(1), levels)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith("_scale"):
            parameter.data = parameter.data.to(dtype)
    return compressor


def _set(layer: nn.Module, name: str, top: Tensor, levels: float) -> None:
    scale = layer.get_parameter(name)
    scale.data = torch.where(top == 0, 1.0, top / levels).to(scale.dtype).view(scale.shape)
