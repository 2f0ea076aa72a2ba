"""Rotary positions (RoPE, arXiv 2104.09864) with every scaling, and xPos (arXiv 2212.10554)."""

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


class Rotary(NoPosition):
    """Rotary position embedding, a pure function of the positions: no buffers.

    "dynamic" takes its base from each row's present length, with keys cached unrotated: earlier
    tokens' hidden states still come from earlier bases, unlike those of a full forward pass.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        # Twice the number of rotation angles of a head's channels.
        self.width = REGISTRY.find("scores", layer.scores).rotary_width(layer)

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

    The factors are centred on the middle of `max_position_embeddings`. For float16 they are too
    large: attention and its cache are float32.
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
    if kind not in list(KINDS):  # of any type
        return f"rope_type={kind!r} is none of {', '.join(KINDS)} (ntk: with_rope_scaling)"
    needed, optional = KINDS[kind]
    if missing := [key for key in needed if key not in rope]:
        return f"rope_type={kind!r} needs {', '.join(missing)} in rope_parameters"
    if extra := set(rope) - {"rope_type", "rope_theta", *needed, *optional}:
        return f"{', '.join(sorted(extra))} in rope_parameters has no effect on rope_type={kind!r}"
    for key in sorted({*needed, *optional, "rope_theta"} - {"truncate"}):
        least = 1 if key in ("factor", "original_max_position_embeddings") else 0
        most = 1 if key == "partial_rotary_factor" else _LARGEST
        value = rope.get(key)
        if value is None and key in optional:
            continue
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if value is None or not number or not least <= value <= most:
            range_of_it = f"at least {least}" + " and at most 1" * (most == 1)
            return f"{key}={value!r} in rope_parameters must be a finite number, {range_of_it}"
    if rope["rope_theta"] <= (least := 1 if kind == "yarn" else 0):
        return f"rope_theta={rope['rope_theta']} is not above {least}"
    if kind == "llama3" and not 0 < rope["low_freq_factor"] < rope["high_freq_factor"]:
        return "low_freq_factor must be above 0 and below high_freq_factor"
    if kind == "dynamic" and REGISTRY.find("scores", layer.scores).rotary_width(layer) == 2:
        return "rope_type='dynamic' needs two waves to stretch: choose head_dim above 2"
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
        return "its factor ζ^((m−n)/512) would let later keys grow: choose direction='causal'"
    if layer.rope_parameters["rope_type"] != "default":
        return "scaled frequencies are not defined for it: choose rope_type='default', or rope"
    if layer.max_position_embeddings > 2 * FARTHEST:
        return f"its factors leave float32 beyond {2 * FARTHEST} positions: choose rope"
    return _refuses(layer)


_position = partial(
    Declaration,
    "position",
    flops=lambda layer, length: (
        3.0 * layer.head_dim * (layer.num_attention_heads + layer.num_key_value_heads)
    ),
)
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
