"""Another length for a trained model: its rotary frequencies scaled, its weights as they are."""

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.ops import ntk_theta

Model = TypeVar("Model", bound=PreTrainedModel)


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
            "train with position='rope'"
        )
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
        other.generation_config = model.generation_config
    return other.train(model.training)
