"""Rotary scaling of a trained model for longer texts, with its weights as they are."""

import copy
from typing import Any, TypeVar

from transformers import PreTrainedModel

from clearhead.errors import ClearheadError, choose
from clearhead.models.families.family import filled
from clearhead.ops import ntk_theta
from clearhead.ops.rope import KINDS

Model = TypeVar("Model", bound=PreTrainedModel)
SCALINGS = ("linear", "ntk", "dynamic", "yarn")
"""Scalings of rotary positions that take a factor and nothing else."""


def with_rope_scaling(model: Model, kind: str, **parameters: Any) -> Model:
    """A model of clearhead or transformers with `kind` of rotary scaling.

    Its weights are shared and not copied; the model itself stays as it is.

    Args:
        kind: a rope_type (`clearhead.ops.rope.KINDS`), or "ntk": a fixed scaling of the base,
            which Hugging Face writes as "default" with another rope_theta.
        parameters: the kind's own, such as factor=4, above 1. The trained length is
            max_position_embeddings; rope_theta is the model's unless given.

    Raises:
        ClearheadError: another kind or factor; a model without rotary positions, or with
            frequencies that are scaled already or of several kinds; of clearhead's, parameters that
            do not fit the kind.
    """
    choose("rope scaling", kind, ("ntk", *KINDS, "longrope"))  # the last of transformers' models
    if not (parameters.get("factor") or 2) > 1:
        raise ClearheadError(f"factor is {parameters['factor']}: a rope scaling takes one above 1")
    config = copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        sets = "different ones by kind of layer" if rope else "none"
        raise ClearheadError(
            "rope scaling needs rotary frequencies, one set for all layers, in rope_parameters; "
            f"{type(model).__name__} has {sets}: evaluate it without (--rope-scaling none)"
        )
    if (scaled := rope.get("rope_type", "default")) != "default":
        raise ClearheadError(
            f"the model's rotary frequencies are {scaled!r} already: evaluate it as it is"
        )
    changes: dict[str, Any] = {"rope_type": kind, **parameters}
    if kind == "ntk":
        if set(parameters) - {"rope_theta"} != {"factor"}:
            raise ClearheadError(f"ntk takes factor=, a number above 1; found {parameters}")
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        width = int(width * rope.get("partial_rotary_factor", 1.0))
        theta = parameters.get("rope_theta", rope["rope_theta"])
        changes = {"rope_theta": ntk_theta(theta, parameters["factor"], width)}
    elif kind == "yarn":
        changes.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    config.rope_parameters = {**rope, **changes}
    weights = model.state_dict(keep_vars=True)  # the same parameters, not others on their numbers
    other: Model = filled(type(model), config, weights, model, share=True)
    other.set_attn_implementation(model.config._attn_implementation)
    return other.train(model.training)
