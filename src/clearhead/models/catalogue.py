"""Configurations of the named models, matched in parameters to the baseline."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from clearhead.errors import ClearheadError, choose
from clearhead.models.base_model import ClearheadModel
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inspection import parameter_count
from clearhead.named_models import AT_SIZE, BASELINE, PRESETS, SIZES, SMALLER

# The baseline's shape: what of a user's changes it has too when a preset is matched to it.
_SHAPE = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "mlp", "bias"),
    }
)
_DERIVES = ("hidden_size", "mlp", "bias")  # another value of these has another MLP width
_STEP = 8  # of a matched MLP width, as tensor cores want it


def preset(name: str, size: str = "tiny", **overrides: Any) -> ClearheadConfig:
    """The configuration of a preset at a size; `overrides` are any keys of ClearheadConfig.

    Presets match the baseline in parameters, within 1 %: unless `intermediate_size` is given, the
    MLP's width makes up for the preset's other matrices at this shape. Presets in `SMALLER` keep
    the baseline's MLP width, and have fewer parameters.

    Raises:
        ClearheadError: an unknown preset, size or key (naming the near misses), or a combination
            that cannot be built.
    """
    choose("preset", name, PRESETS)
    choose("size", size, SIZES)
    own = {**PRESETS[name], **AT_SIZE.get((name, size), {})}
    shape = {key: overrides[key] for key in _SHAPE & overrides.keys()}
    if any(value != {**SIZES[size], **own}.get(key) for key, value in shape.items()):
        own.pop("intermediate_size", None)  # matched to another shape
    try:
        keys = _keys(size, own, shape)
        if "intermediate_size" not in {*own, *overrides} and name not in (BASELINE, *SMALLER):
            both = (_keys(size, {}, shape), keys)
            keys["intermediate_size"] = _matched(*(json.dumps(one, default=repr) for one in both))
        return ClearheadConfig(**{**keys, **overrides})
    except ClearheadError as error:
        raise ClearheadError(f"preset {name!r} at size {size!r}: {error}") from error


def _keys(size: str, own: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a size with changes; no MLP width where that of the size is another shape's."""
    before = {**SIZES[size], **own}
    keys = {**before, **shape}
    if any(keys.get(key) != before.get(key) for key in _DERIVES):
        keys.pop("intermediate_size", None)
    if keys.get("position", "rope") not in ("rope", "xpos"):
        keys.pop("rope_parameters", None)  # the size's, for models that rotate
    return keys


@cache
def _matched(baseline: str, changed: str) -> int:
    """The MLP width at which a model has as many parameters as the baseline; keys as JSON."""
    wanted = ClearheadConfig(**json.loads(baseline))
    width = wanted.intermediate_size
    assert width is not None
    narrow, wide = (
        _parameters(ClearheadConfig(**{**json.loads(changed), "intermediate_size": each}))
        for each in (width, width + _STEP)
    )
    steps = round((_parameters(wanted) - narrow) / (wide - narrow))
    return max(_STEP, width + _STEP * steps)


def _parameters(config: ClearheadConfig) -> int:
    with torch.device("meta"):
        return parameter_count(ClearheadModel(config))
