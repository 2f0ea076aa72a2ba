"""Rotary positions, with every scaling of their frequencies; and xPos."""

import math
from functools import partial

import torch
from torch import Tensor

from clearhead import ops
from clearhead.nn.bases import NoPosition, PositionTables
from clearhead.nn.registry import REGISTRY
from clearhead.ops.rope import KINDS
from clearhead.spec import Declaration, LayerSpec

# Tokens from the centre, on either side, where float32 and bfloat16 hold factor times channel:
# the largest factor is 7e34.
FARTHEST = 32_768
_LARGEST = torch.finfo(torch.float32).max


def rotary_width(layer: LayerSpec) -> int:
    """Twice the number of rotation angles of a head's channels."""
    return REGISTRY.find("scores", layer.scores).rotary_width(layer)


class Rotary(NoPosition):
    """Rotary position embedding, a pure function of the positions: no buffers.

    "dynamic" takes its base from each row's present length: keys are cached unrotated, so a layer
    is exact given its inputs. Across layers cached decoding still differs from a full forward pass,
    because earlier tokens' hidden states were computed with earlier bases.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.width = rotary_width(layer)

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        return layer.rope_parameters["rope_type"] == "dynamic"

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        layer, theta = self.layer, None
        rope, width = layer.rope_parameters, self.width
        if rope["rope_type"] == "dynamic":
            length_B = torch.maximum(queries_BT.amax(1), keys_BS.amax(1)) + 1
            start, trained = rope["rope_theta"], layer.max_position_embeddings
            theta = ops.dynamic_theta(start, rope["factor"], width, length_B, trained)
        frequency, factor = ops.frequencies(rope, width, queries_BT.device, theta)
        queries = ops.rotary_table(queries_BT, frequency, factor)
        if keys_BS is queries_BT:
            return PositionTables(queries, queries)
        return PositionTables(queries, ops.Rotation(keys_BS, frequency, factor))

    prepare = staticmethod(ops.rotate)


class XPos(Rotary):
    """Rotation with scores that fade with distance, by ζ_j^((m−n)/512).

    The factors are centred on the middle of `max_position_embeddings`. In float16 they would
    overflow after a few thousand tokens: attention and its cache are float32.
    """

    wide_factors = True

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        return False

    def longest(self) -> int:
        return self.layer.max_position_embeddings // 2 + FARTHEST

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        layer = self.layer
        frequency, _ = ops.frequencies(layer.rope_parameters, layer.head_dim, queries_BT.device)
        centre = layer.max_position_embeddings // 2
        return PositionTables(*ops.xpos_tables(queries_BT, keys_BS, frequency, centre))


def _refuses(layer: LayerSpec) -> str | None:
    rope = layer.rope_parameters
    if layer.head_dim % 2:
        return f"rotation turns pairs of channels, and head_dim={layer.head_dim} is odd"
    kind = rope["rope_type"]
    if kind == "dynamic-causal":
        return "rope_type='dynamic-causal' is not supported: use 'dynamic'"
    if not isinstance(kind, str) or kind not in KINDS:
        return f"rope_type={kind!r} is none of {', '.join(KINDS)} (ntk: with_rope_scaling)"
    needed, optional = KINDS[kind]
    if missing := [key for key in needed if key not in rope]:
        return f"rope_type={kind!r} needs {', '.join(missing)} in rope_parameters"
    if extra := set(rope) - {"rope_type", "rope_theta", *needed, *optional}:
        return f"{', '.join(sorted(extra))} in rope_parameters has no effect on rope_type={kind!r}"
    for key in sorted({*needed, *optional, "rope_theta"} - {"truncate"}):
        least = 1 if key in ("factor", "original_max_position_embeddings") else 0
        value = rope.get(key)
        if value is None and key in optional:
            continue
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if value is None or not number or not least <= value <= _LARGEST:
            return f"{key}={value!r} in rope_parameters must be a finite number, at least {least}"
    if rope["rope_theta"] <= 0:
        return f"rope_theta={rope['rope_theta']} is not above 0"
    if kind == "yarn" and rope["rope_theta"] <= 1:
        return f"rope_theta={rope['rope_theta']} has no slow waves to stretch: give one above 1"
    if kind == "proportional" and rope["partial_rotary_factor"] > 1:
        return f"partial_rotary_factor={rope['partial_rotary_factor']} is more than all: give 1"
    if kind == "llama3" and not 0 < rope["low_freq_factor"] < rope["high_freq_factor"]:
        return "low_freq_factor must be above 0 and below high_freq_factor"
    if kind == "dynamic" and layer.head_dim == 2:
        return f"rope_type={kind!r} needs two waves to stretch: choose head_dim above 2"
    try:
        frequency, attention_factor = ops.frequencies(rope, layer.head_dim, torch.device("cpu"))
        fits = math.isfinite(attention_factor) and bool(frequency.isfinite().all())
    except ArithmeticError:
        fits = False
    if not fits:
        return f"rope_parameters={dict(rope)} give frequencies beyond float32: give usual numbers"
    return None


def _xpos_refuses(layer: LayerSpec) -> str | None:
    if layer.direction != "causal":
        return (
            "its factor ζ^((m−n)/512) fades earlier keys and would let later ones grow: choose "
            "direction='causal', or position='rope'"
        )
    if layer.rope_parameters["rope_type"] != "default":
        return "scaled frequencies are not defined for it: choose rope_type='default', or rope"
    if layer.max_position_embeddings > 2 * FARTHEST:
        return f"its factors leave float32 beyond {2 * FARTHEST} positions: choose rope"
    return _refuses(layer)


def _rotation_flops(layer: LayerSpec, length: int) -> float:
    return 3.0 * layer.head_dim * (layer.num_attention_heads + layer.num_key_value_heads)


_position = partial(Declaration, "position", flops=_rotation_flops)
DECLARATIONS = (
    _position(
        "rope",
        "rotary: queries and keys turned by an angle that grows with position",
        "arXiv 2104.09864",
        Rotary,
        refuses=_refuses,
    ),
    _position(
        "xpos",
        "rotary, with scores that fade with distance; causal",
        "arXiv 2212.10554",
        XPos,
        refuses=_xpos_refuses,
    ),
)
