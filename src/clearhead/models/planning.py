"""Configurations of presets, matched in parameters to the baseline, and costs without weights."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.errors import ClearheadError, choose
from clearhead.models.base_model import ClearheadModel
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inspection import lack_of_positions, longest_text, parameter_count
from clearhead.named_models import AT_SIZE, BASELINE, PRESETS, SIZES, SMALLER
from clearhead.nn import REGISTRY
from clearhead.nn.positionwise import EmbeddingProjection
from clearhead.terminal import hushed

# The baseline's shape: what of a user's changes it has too when a preset is matched to it.
_SHAPE = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
_SHAPE |= {"head_dim", "max_position_embeddings", "mlp", "bias"}
_DERIVES = ("hidden_size", "mlp", "bias")  # another value of these has another MLP width
_STEP = 8  # of a matched MLP width, as tensor cores want it


def preset(name: str, size: str = "tiny", **overrides: Any) -> ClearheadConfig:
    """The configuration of a preset at a size; `overrides` are any keys of ClearheadConfig.

    Presets match the baseline in parameters, within 1 %: unless `intermediate_size` is given, the
    MLP's width makes up for the preset's other matrices. Those in `SMALLER` keep the baseline's MLP
    width, and have fewer parameters.

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
    """Keys of a size with changes, without the MLP width of another shape."""
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
    width = ClearheadConfig(**json.loads(baseline)).intermediate_size
    assert width is not None

    def parameters(keys: dict[str, Any]) -> int:
        with torch.device("meta"):
            return parameter_count(ClearheadModel(ClearheadConfig(**keys)))

    own = json.loads(changed)
    narrow, wide = (parameters(own | {"intermediate_size": n}) for n in (width, width + _STEP))
    steps = round((parameters(json.loads(baseline)) - narrow) / (wide - narrow))
    return max(_STEP, width + _STEP * steps)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of one model.

    Attributes:
        parameters: all of them, the head's included, a tied matrix once.
        non_embedding_parameters: without the token and position embeddings and the head.
        forward_flops: multiply-adds × 2 of one token's forward pass, in a sequence of `length`.
        cache_bytes: key-value cache of a text of `length` at two bytes a number, for each of its
            tokens; a sliding layer holds at most its window less one. 0 for a bidirectional model.
        length: the sequence length counted with.
    """

    parameters: int
    non_embedding_parameters: int
    forward_flops: float
    cache_bytes: float
    length: int


def counterpart(config: Any) -> ClearheadConfig:
    """clearhead's configuration of the same function, for its own or a transformers one."""
    if isinstance(config, ClearheadConfig):
        return config
    from clearhead.models.families import FAMILIES

    families = {one.model.config_class.model_type: one for one in FAMILIES.values()}
    if config.model_type not in families:
        raise ClearheadError(
            f"{config.model_type} cannot be planned: give a clearhead model, or one of the "
            f"families {', '.join(sorted(families))}"
        )
    return families[config.model_type].counterpart(config)


def plan(config: Any, *, length: int | None = None) -> Plan:
    """Count the costs of clearhead's configuration, or of one of transformers that `clearhead
    convert` reads, on the meta device; `length` defaults to the model's own positions.

    Raises:
        ClearheadError: another configuration, or more tokens than there are learned positions.
    """
    config = counterpart(config)
    with torch.device("meta"):
        model = ClearheadModel(config)  # whatever its direction; a head has vocabulary × width
    if length is None:
        length = longest_text(model) or config.max_position_embeddings
    if reason := lack_of_positions(model, length):
        raise ClearheadError(f"{reason}: give a shorter length, or more max_position_embeddings")
    output = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else output
    total = head + parameter_count(model)
    embedding, linear = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
        for kind in (torch.nn.Embedding, torch.nn.Linear | EmbeddingProjection)
    )
    flops, cache = 2.0 * (output + linear), 0.0
    for layer in config.layers():
        window = length + 1 if layer.sliding_window is None else layer.sliding_window
        held = min(1.0, (window - 1) / length)  # of the text, as transformers' caches drop keys
        for declaration in REGISTRY.of(layer).values():
            flops += declaration.flops(layer, length)
            if layer.direction == "causal":
                cache += 2 * declaration.cache(layer) * held
    return Plan(
        parameters=total,
        non_embedding_parameters=total - embedding - head,
        forward_flops=flops,
        cache_bytes=cache,
        length=length,
    )


@contextmanager
def without_data() -> Iterator[None]:
    """Run the body on the meta device, without the tracebacks that PyTorch logs."""
    quiet = hushed("torch._subclasses.fake_tensor", logging.CRITICAL)
    with quiet, FakeTensorMode(allow_non_fake_inputs=True):
        yield
