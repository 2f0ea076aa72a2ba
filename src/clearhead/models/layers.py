"""Settings by layer: sliding windows, and axes on which single layers differ."""

import copy
from collections.abc import Mapping
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.nn.bases import NoPosition
from clearhead.nn.registry import REGISTRY
from clearhead.spec import AXES

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names
_OF_A_LAYER = tuple(axis for axis in AXES if axis != "direction")


def settle_layers(config: Any) -> None:
    """Repeat the patterns of a configuration to its number of layers, and check them."""
    for key in ("layer_types", "layer_overrides"):
        pattern = getattr(config, key)
        if pattern is None:
            continue
        times, rest = divmod(config.num_hidden_layers, max(len(pattern), 1))
        if rest or not pattern:
            raise ClearheadError(
                f"{key} has {len(pattern)} entries for {config.num_hidden_layers} layers: give "
                "one a layer, or a pattern whose length divides their number"
            )
        setattr(config, key, list(pattern) * times)
    for kind in config.layer_types or ():
        choose("layer type", str(kind), (FULL, SLIDING))
    for override in config.layer_overrides or ():
        if not isinstance(override, dict):
            raise ClearheadError(f"an entry of layer_overrides is {override!r}: give a mapping")
        for axis, value in override.items():
            choose("axis of layer_overrides", str(axis), _OF_A_LAYER)
            build: Any = REGISTRY.find(axis, str(value)).build
            if axis == "position" and build.embed is not NoPosition.embed:
                raise ClearheadError(
                    f"layer_overrides has position={value!r}, which is added before any layer: "
                    "give it as position, or choose rope, xpos, alibi, forget or none here"
                )
    window, types = config.sliding_window, config.layer_types
    slides = SLIDING in (types or ())
    if window is None and slides:
        raise ClearheadError(
            f"layer_types has {SLIDING!r} without a sliding_window: give it, such as 1024"
        )
    if window is not None and types is not None and not slides:
        raise ClearheadError(
            f"sliding_window={window} has no effect: no entry of layer_types is {SLIDING!r}"
        )
    if window is not None and config.direction != "causal":
        raise ClearheadError(
            f"sliding_window is of the last keys, and with direction={config.direction!r} a token "
            "sees later ones too: choose direction='causal'"
        )


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings that an earlier version may have written, by their present names."""
    now = copy.deepcopy(dict(settings))
    for each in (now, *(now.get("layer_overrides") or ())):
        if str(each.get("scores")).startswith("collinear"):
            each["scores"] = each["scores"].replace("collinear", "coca")
        if each.get("residual_scale") == "trainable":
            del each["residual_scale"]
    return now
