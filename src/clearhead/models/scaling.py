"""Another length for a trained model: its rotary frequencies scaled, its weights as they are."""

import copy
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from clearhead.errors import ClearheadError, choose
from clearhead.models.configuration import ClearheadConfig
from clearhead.ops import ntk_theta

Model = TypeVar("Model", bound=PreTrainedModel)
SCALINGS = ("linear", "ntk", "dynamic", "yarn")
"""Scalings of rotary positions that take a factor and nothing else."""


def with_rope_scaling(model: Model, kind: str, **parameters: Any) -> Model:
    """A model of the same weights, shared and not copied, with `kind` of rotary scaling.

    Args:
        model: with position="rope"; it stays as it is.
        kind: a rope_type (`clearhead.ops.rope.KINDS`), or "ntk": the base scaled once and for all,
            which Hugging Face writes as "default" with another rope_theta.
        parameters: the kind's own, such as factor=4. The trained length is
            max_position_embeddings; rope_theta is the model's unless given.

    Raises:
        ClearheadError: a model without rotary positions, or parameters that do not fit the kind.
    """
    config: ClearheadConfig = model.config
    if not isinstance(config, ClearheadConfig):
        raise ClearheadError(
            f"{type(model).__name__} is none of clearhead's models: load it with other "
            "rope_parameters in its configuration"
        )
    if config.rope_parameters is None:
        raise ClearheadError(
            f"position={config.position!r} has no rotary frequencies to scale: "
            "evaluate it without, or train with position='rope'"
        )
    if config.rope_parameters["rope_type"] == "proportional":
        raise ClearheadError(_scaled_already("proportional"))
    rope = {"rope_theta": config.rope_parameters["rope_theta"], **parameters, "rope_type": kind}
    if kind == "ntk":
        if set(parameters) - {"rope_theta"} != {"factor"}:
            raise ClearheadError(f"ntk takes factor=, a number above 1; found {parameters}")
        assert config.head_dim is not None
        theta = ntk_theta(rope["rope_theta"], rope["factor"], config.head_dim)
        rope = {"rope_type": "default", "rope_theta": theta}
    keys = {**config.to_diff_dict(), "rope_parameters": rope}
    keys.pop("transformers_version", None)
    scaled = ClearheadConfig(**keys)
    scaled._attn_implementation = config._attn_implementation
    with torch.device("meta"):
        other = type(model)(scaled)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    other.tie_weights()
    if model.can_generate():
        other.generation_config = copy.deepcopy(model.generation_config)
    return other.train(model.training)


def with_scaled_rope(model: Model, kind: str, factor: float) -> Model:
    """Any causal language model of transformers with its rotary frequencies scaled.

    Its weights are shared and not copied; the model itself stays as it is. Models of transformers
    take "linear", "ntk", "dynamic" and "yarn" through their own `rope_parameters`.

    Args:
        kind: one of `SCALINGS`.
        factor: above 1. The trained length is max_position_embeddings.

    Raises:
        ClearheadError: a model without rotary positions, with frequencies that are scaled already
            or of several kinds, or a scaling that transformers does not have.
    """
    choose("rope scaling", kind, SCALINGS)
    if not factor > 1:
        raise ClearheadError(f"factor is {factor}: a rope scaling takes one above 1")
    config = model.config
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(config, ClearheadConfig):
        return _scaled_of_transformers(model, kind, factor)
    if rope and rope["rope_type"] != "default":
        raise ClearheadError(_scaled_already(rope["rope_type"]))
    return with_rope_scaling(model, kind, factor=factor)


def _scaled_of_transformers(model: Model, kind: str, factor: float) -> Model:
    name, config = type(model).__name__, copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        found = "different ones by kind of layer" if rope else "none"
        raise ClearheadError(
            f"rope scaling needs rotary frequencies, one set for all layers, in rope_parameters; "
            f"{name} has {found}: evaluate it without (--rope-scaling none)"
        )
    if rope.get("rope_type", "default") != "default":
        raise ClearheadError(_scaled_already(rope["rope_type"]))
    changes: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "ntk":
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        width = int(width * rope.get("partial_rotary_factor", 1.0))
        changes = {"rope_theta": ntk_theta(rope["rope_theta"], factor, width)}
    elif kind == "yarn":
        changes["original_max_position_embeddings"] = config.max_position_embeddings
    config.rope_parameters = {**rope, **changes}
    # Not on the meta device: frequencies are buffers that no checkpoint has.
    with no_init_weights(), model.device:
        other = type(model)(config)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    other.tie_weights()
    other.set_attn_implementation(model.config._attn_implementation)
    return other.train(model.training)


def _scaled_already(kind: str) -> str:
    return f"the model's rotary frequencies are {kind!r} already: evaluate it as it is"
