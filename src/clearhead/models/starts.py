"""A trained model with other mechanisms or scaled positions: what it keeps, what starts anew.

Some mechanisms start at exactly the old function: V2's second queries equal the first, a gate is ½
everywhere and W_O doubled, a sink's logit is too low to have an effect. With others, weights that
both models have keep their values and new ones start as in the paper.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError, choose
from clearhead.models.configuration import ClearheadConfig, window_begin
from clearhead.models.families.family import filled
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.named_models import BASELINE, PRESETS
from clearhead.nn.registry import REGISTRY
from clearhead.ops import ntk_theta
from clearhead.ops.rope import KINDS
from clearhead.spec import AXES, LayerSpec

Model = TypeVar("Model", bound=PreTrainedModel)
SCALINGS = ("linear", "ntk", "dynamic", "yarn")
"""Scalings of rotary positions that take a factor and nothing else."""
_ATTENTION = "self_attn."
_ROTARY = ("rope", "xpos")
_ANNEALING = ("normalizer", "epilogue")
_MAPS_OWN = {"lambda_init": None, "head_norm": "affine"}  # without effect on other maps
_SIZES = ("head_dim", "bias", "max_position_embeddings", "norm_eps", "rope_parameters")
# What of a configuration may change: a layer's own mechanisms and gains, and no width.
CHANGES = (
    {each.name for each in fields(LayerSpec)} & ClearheadConfig.settings().keys()
    | {"first_values", "embedding_norm", "embedding_projection", "layer_types", "layer_overrides"}
) - {"hidden_size", "intermediate_size", "initializer_range", *_SIZES}
CHANGES -= {key for key in CHANGES if key.startswith("num_")}


class Start(NamedTuple):
    """A trained model with other mechanisms; names of its new parameters, which start as their
    paper says, and of the first model's that were left out, "*" for a layer's number."""

    model: ClearheadForCausalLM
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def in_words(self) -> list[str]:
        """A line for each of the lists `new` and `dropped` that is not empty."""
        lists = {"new": self.new, "dropped": self.dropped}
        return [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]


def target(preset: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a preset, and KEY=VALUE pairs over it, change of a configuration."""
    changes = dict(PRESETS[choose("preset", preset, PRESETS)]) if preset else {}
    for key in settings:
        if key in ClearheadConfig.settings() and key not in CHANGES:
            raise ClearheadError(f"{key} is a size of the model's weights: leave it out")
        choose("setting", key, CHANGES)
    return changes | dict(settings)


def check_baseline(
    preset: str | None, settings: Mapping[str, Any], config: ClearheadConfig
) -> None:
    """Refuse the preset "transformer", which changes no axis, for a model that is not that one."""
    if preset != BASELINE:
        return
    plain = {each.name: each.default for each in fields(LayerSpec)}
    layers = map(vars, config.layers())
    axes = [axis for axis in AXES if axis not in settings]
    differing = {axis: one[axis] for one in layers for axis in axes if one[axis] != plain[axis]}
    if differing:
        wanted = " ".join(f"{axis}={plain[axis]}" for axis in differing)
        raise ClearheadError(
            f"the preset {BASELINE} changes no axis, and this model has {_words(differing)}: give "
            f"{wanted}, or leave {BASELINE} out"
        )


def started(model: ClearheadForCausalLM, changes: Mapping[str, Any]) -> Start:
    """The model with other mechanisms, from copies of its weights."""
    ours = model.config
    config = changed(ours, changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of what is new
        new_model = ClearheadForCausalLM(config).to(model.device, model.dtype)
    if config.embedding_projection and not ours.embedding_projection:  # as the same function
        for part in (new_model.model.project_in, new_model.model.project_out):
            torch.nn.init.eye_(part.weight)  # type: ignore[arg-type]
    weights = dict(model.state_dict())
    for index in range(config.num_hidden_layers):
        prefix, before, after = f"model.layers.{index}.", ours.layer(index), config.layer(index)
        inside = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
        own = {name.removeprefix(_ATTENTION): weights[whole] for name, whole in inside.items()}
        for axis in AXES:
            adopt = REGISTRY.find(axis, getattr(after, axis)).adopt
            if adopt is not None and getattr(before, axis) != getattr(after, axis):
                own = adopt(own, before, after)
        for name, weight in own.items():
            weights[prefix + ("" if name in inside else _ATTENTION) + name] = weight
    wanted = new_model.state_dict()
    for name, weight in weights.items():
        if name in wanted and wanted[name].shape != weight.shape:
            needed = tuple(wanted[name].shape)
            raise ClearheadError(
                f"{name} is {tuple(weight.shape)}, and {_words(changes)} needs {needed}"
            )
    new_model.load_state_dict({name: weights.get(name, new) for name, new in wanted.items()})
    new_model.generation_config = deepcopy(model.generation_config)
    new, dropped = (
        tuple(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))
        for names in (wanted.keys() - weights.keys(), weights.keys() - wanted.keys())
    )
    return Start(new_model.eval(), new, dropped)


def changed(ours: ClearheadConfig, changes: Mapping[str, Any]) -> ClearheadConfig:
    """The configuration of a model with other mechanisms."""
    keys = {key: deepcopy(getattr(ours, key)) for key in ClearheadConfig.settings()}
    del keys["requires"]
    if changes.get("maps", ours.maps) != ours.maps:
        keys |= _MAPS_OWN
    if changes.get("normalizer", ours.normalizer) != ours.normalizer:
        keys["prefix_length"] = 1
    if any(changes.get(axis, getattr(ours, axis)) != getattr(ours, axis) for axis in _ANNEALING):
        keys["annealed_start"] = False
    if changes.get("position", "rope") not in _ROTARY:
        keys["rope_parameters"] = None
    config = ClearheadConfig(**{**keys, **window_begin(ours), **changes})
    if config.annealed_start and not ours.annealed_start:
        for index, axis in product(range(config.num_hidden_layers), _ANNEALING):
            names = [getattr(one.layer(index), axis) for one in (ours, config)]
            if all(REGISTRY.find(axis, name).anneals for name in names):
                raise ClearheadError(
                    f"annealed_start=true would begin without this model's {axis}={names[0]!r}"
                )
    return config


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in changes.items())


def with_rope_scaling(model: Model, kind: str, **parameters: Any) -> Model:
    """A model of clearhead or transformers with `kind` of rotary scaling.

    Its weights are shared and not copied; the model itself stays as it is.

    Args:
        kind: a rope_type (`clearhead.ops.rope.KINDS`), or "ntk": a fixed scaling of the base,
            which Hugging Face writes as "default" with another rope_theta.
        parameters: the kind's own, such as factor=4, above 1. The trained length is
            max_position_embeddings; rope_theta is the model's unless given.

    Raises:
        ClearheadError: another kind or factor, parameters that do not fit a clearhead model, or a
            model without rotary positions, with several kinds of them, or with scaled ones.
    """
    choose("rope scaling", kind, ("ntk", *KINDS, "longrope"))  # the last of transformers' models
    if not (parameters.get("factor") or 2) > 1:
        raise ClearheadError(f"factor is {parameters['factor']}: a rope scaling takes one above 1")
    config = deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise ClearheadError(
            "rope scaling needs rotary frequencies, one set for all layers, in rope_parameters; "
            f"{type(model).__name__} has none: evaluate it without (--rope-scaling none)"
        )
    if (scaled := rope.get("rope_type", "default")) != "default":
        raise ClearheadError(f"the model's rotary frequencies are {scaled!r} already")
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
