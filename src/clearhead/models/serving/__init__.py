"""Export of clearhead models for servers: weights for `modeling_clearhead_serving.py`.

Keys are repeated for each value, reparametrised matrices become one, and gains of branches are
merged into the weights that follow.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.models.configuration import FULL, SLIDING, ClearheadConfig
from clearhead.models.families.family import State, copied, filled, merged, with_all_biases
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.serving.modeling_clearhead_serving import (
    ClearheadServingConfig,
    ClearheadServingForCausalLM,
)
from clearhead.nn.registry import REGISTRY
from clearhead.ops.requests import repeat

# Of axes that the form does not have whole, what it has.
_HAS = {
    "scores": ("dot", "coca", "coca-strict", "coca-slack"),
    "normalizer": ("softmax", "softmax1", "sink"),
    "maps": ("single", "differential-v2"),
    "shaping": ("none", "shaped"),
    "epilogue": ("none", "gate", "gate-headwise", "xsa"),
    "position": ("rope", "learned", "none"),
    "mlp_rotation": ("none",),
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu_pytorch_tanh"}
_ACTIVATIONS |= {"gelu-exact": "gelu", "relu": "relu"}


def served(model: ClearheadForCausalLM) -> ClearheadServingForCausalLM:
    """The same function in the form for servers, with copies of the weights in their dtype."""
    model = merged(model)
    ours = model.config
    if reason := _refusal(model):
        raise ClearheadError(f"this model has no form for servers: {reason}")
    config = _config(ours)
    state = {
        name: weight
        for name, weight in model.state_dict().items()
        if not name.startswith(("model.layers.", "model.position."))
    }
    if ours.position == "learned":
        state["model.embed_positions.weight"] = model.model.position.weight.weight
    for index, layer in enumerate(model.model.layers):
        own = _layer(layer, config)
        state |= {f"model.layers.{index}.{name}": weight for name, weight in own.items()}
    for name, weight in state.items():
        if "norm." in name and weight.numel() == 1:  # one gain for all channels
            state[name] = weight.expand(ours.hidden_size)
    return filled(ClearheadServingForCausalLM, config, state, model)


def turns_anew(ours: ClearheadConfig) -> str | None:
    """The reason why servers cannot decode a model with dynamic RoPE; None for others."""
    if (ours.rope_parameters or {}).get("rope_type") == "dynamic":
        return "rope_type='dynamic' rotates cached keys anew as a text grows"
    return None


def _refusal(model: ClearheadForCausalLM) -> str | None:
    ours = model.config
    layers = ours.layers()
    if packages := REGISTRY.packages(layers):
        return f"it needs the packages {', '.join(sorted(packages))}"
    for axis, names in _HAS.items():
        for name in {getattr(layer, axis) for layer in layers} - {*names}:
            return f"{axis}={name!r} does not fit: it has {' or '.join(map(repr, names))}"
    if reason := turns_anew(ours):
        return reason
    plain = {"layer_overrides": None, "mlp_skip_gain": None, "embedding_norm": "none"}
    for key, value in plain.items():
        if (own := getattr(ours, key)) != value:
            return f"{key}={own!r} does not fit: only {value!r} does"
    for layer in model.model.layers:  # a mechanism whose strength is a number of the training run
        strength = getattr(layer.self_attn.epilogue, "strength", None)
        if strength is not None and float(strength) != 1:
            return f"its XSA has come in by {float(strength):.0%} only; train it to the end"
    return None


def _config(ours: ClearheadConfig) -> ClearheadServingConfig:
    layers = ours.layers()
    queries = REGISTRY.find("maps", ours.maps).query_heads(layers[-1])
    shaped = ours.shaping == "shaped"
    norms = [*(layer.norm for layer in layers), ours.outer_norm]
    return ClearheadServingConfig(
        **copied(ours)
        | {
            "num_attention_heads": 2 * queries if shaped else queries,
            "num_key_value_heads": layers[-1].num_value_heads,
        },
        sliding_window=ours.sliding_window,
        layer_types=[FULL if layer.sliding_window is None else SLIDING for layer in layers],
        norm_eps=ours.norm_eps,
        bias=ours.bias,
        scores=ours.scores,
        qk_norm=ours.qk_norm == "rmsnorm",
        sinks=ours.normalizer != "softmax",
        maps=ours.maps,
        shaped=shaped,
        epilogue=ours.epilogue.removesuffix("-headwise"),
        value_projections=[layer.values != "identity" for layer in layers],
        output_projection=not shaped or ours.projections != "identity",
        position=ours.position,
        norms=[each.removesuffix("-single") for each in norms],
        gated_mlp=ours.mlp in ("swiglu", "geglu"),
        hidden_act=_ACTIVATIONS[ours.mlp],
        parallel=ours.order == "parallel",
        attention_skip=ours.attention_skip == "identity",
        mlp_skip=ours.mlp_skip == "identity",
    )


def _layer(block: Any, config: ClearheadServingConfig) -> State:
    """A layer's weights by their names in the form."""
    attention, spec = block.self_attn, block.self_attn.layer
    state = _parts(block, "input_layernorm.", "post_attention_layernorm.", "mlp.")
    for name, weight in _parts(block, "mlp.down_proj.").items():
        state[name] = weight * getattr(block.mlp_gain, "gain", 1.0)
    own = _parts(attention, "q_proj.", "q_norm.", "k_norm.")
    for name, weight in _parts(attention, "k_proj.").items():  # repeated where values are not
        by_head = weight.unflatten(0, (spec.num_key_value_heads, -1)).flatten(1)
        shared = repeat(by_head[None, ..., None], spec.num_value_heads)[0]
        own[name] = shared.reshape(-1, *weight.shape[1:])
    if config.value_projections[spec.index]:
        own |= _matrix("v_proj", attention.v_proj, attention.q_proj.weight, 1.0, config.bias)
    gain = getattr(block.attention_gain, "gain", 1.0)
    if config.output_projection:
        own |= _matrix("o_proj", attention.o_proj, attention.q_proj.weight, gain, config.bias)
        gain = 1.0
    if config.shaped:
        for name in ("alpha", "beta", "gamma"):
            own[name] = getattr(attention.shaping, name)[:, None] * gain
    if config.sinks:
        logits = attention.normalizer.resting()
        if not isinstance(logits, Tensor):
            logits = torch.full_like(attention.q_proj.weight[: attention.heads, 0], logits)
        own["sinks"] = logits.repeat_interleave(config.num_attention_heads // len(logits))
    if config.maps == "differential-v2":
        own["lambda_proj.weight"] = attention.maps.lambda_proj.weight
    if config.epilogue == "gate":
        gates = attention.epilogue.gate_proj.weight  # one a channel, or a head's for all its own
        own["gate_proj.weight"] = gates.repeat_interleave(spec.width // len(gates), 0)
    return state | {f"self_attn.{name}": weight for name, weight in own.items()}


def _parts(module: Any, *names: str) -> State:
    return {key: each for key, each in module.state_dict().items() if key.startswith(names)}


def _matrix(name: str, module: Any, like: Tensor, gain: Any, bias: bool) -> State:
    """A projection as one matrix, times `gain`; the inputs of `like` are the stream."""
    if isinstance(module, torch.nn.Linear):
        return {f"{name}.{key}": weight * gain for key, weight in module.state_dict().items()}
    eye = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    state = {f"{name}.weight": module(eye).mT * gain}
    # The form has a bias beside each matrix or none, and reparametrised ones have none.
    return with_all_biases(state) if bias else state
