"""Positions: rotary with every scaling, xPos, ALiBi, forget gates, vectors added to the input."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.bases import NoPosition, PositionTables, visible_keys, with_own_parameters
from clearhead.nn.registry import REGISTRY
from clearhead.ops.rope import KINDS
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec

# Tokens from the centre, on either side, where float32 and bfloat16 hold factor times channel:
# the largest factor is 7e34.
FARTHEST = 32_768
_LARGEST = torch.finfo(torch.float32).max
LONGEST = 256**2  # ALiBi's positions have two digits of base 256


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


def _rope_refuses(layer: LayerSpec) -> str | None:
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
    return _rope_refuses(layer)


class Alibi(NoPosition):
    """Scores get −slope · (i − j), from 8 more columns (`ops.alibi_columns`), never a T × T bias.

    The maps of one head share its slope. Keys are cached without the columns, which follow from
    their positions.
    """

    def longest(self) -> int:
        return LONGEST

    def tables(self, queries_BT: Tensor, keys_BS: Tensor) -> PositionTables:
        scale = self.layer.head_dim**-0.5
        slopes_H = ops.alibi_slopes(self.heads, queries_BT.device)
        return PositionTables(*ops.alibi_columns(queries_BT, keys_BS, slopes_H, scale))

    @staticmethod
    def cache_unrotated(layer: LayerSpec) -> bool:
        return True

    prepare = staticmethod(ops.with_columns)


def _bias_refuses(layer: LayerSpec) -> str | None:
    if layer.direction != "causal":
        return "it would raise the scores of later keys: choose direction='causal', or rope"
    if layer.shaping == "shaped":
        return "no paper states C under such a bias: choose position='rope', or shaping='none'"
    return None


def _alibi_refuses(layer: LayerSpec) -> str | None:
    if layer.max_position_embeddings > LONGEST:
        return f"positions above {LONGEST} have more than two digits of base 256: choose rope"
    return _bias_refuses(layer)


class ForgetGates(nn.Module):
    """log f = log σ(x w + b), a gate for each token and head; w as any matrix, b from 0.

    Log gates are cached beside their keys and summed when these are read, so a cache may drop early
    keys. Heads that share a key have a gate each; the maps of a head one.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(layer.hidden_size, heads)
        self.scale = layer.head_dim**-0.5
        self.sharing = layer.num_attention_heads // layer.num_key_value_heads
        self.together = layer.num_attention_heads // heads

    def with_gates(self, k_BGTD: Tensor, x_BTC: Tensor) -> Tensor:
        """Keys with the log gates of the heads that read them, [B, G, T, D + H / G]."""
        logits_BTH = self.gate_proj(x_BTC)
        exact = torch.promote_types(logits_BTH.dtype, torch.float32)
        log_gates_BTH = nn.functional.logsigmoid(logits_BTH.to(exact))
        by_key = log_gates_BTH.unflatten(-1, (-1, self.sharing)).transpose(1, 2)
        by_key = by_key.repeat_interleave(self.together, 1)
        return torch.cat([k_BGTD, by_key.to(k_BGTD.dtype)], -1)

    def columns(
        self, k_BGSN: Tensor, queries: int, visibility: Visibility
    ) -> tuple[Tensor, PositionTables]:
        """Keys without their gates, and the columns that `Forget.prepare` joins to both."""
        k, log_gates = k_BGSN[..., : -self.sharing], k_BGSN[..., -self.sharing :]
        if visibility.key_mask is not None:  # of padding a gate may be any number
            log_gates = log_gates.masked_fill(~visibility.key_mask[:, None, :, None], 0)
        log_gates = log_gates[:, :: self.together]
        return k, PositionTables(*ops.forget_columns(log_gates, queries, self.scale, k.dtype))


class Forget(NoPosition):
    """Scores get Σ log f_l over the tokens l after the key, up to the query: c_i − c_j.

    f = exp(−slope) is ALiBi. There is no other position, as in the paper; padding lowers no score.
    """

    cache_unrotated = staticmethod(Alibi.cache_unrotated)
    decay = ForgetGates
    prepare = staticmethod(ops.with_columns)


def _forget_refuses(layer: LayerSpec) -> str | None:
    if layer.normalizer == "key-value":
        return "no token has a gate before the text: choose normalizer='sink', or position='alibi'"
    return _bias_refuses(layer)


def _column_flops(columns: int, layer: LayerSpec, length: int) -> float:
    return 2.0 * columns * layer.num_attention_heads * visible_keys(layer, length)


def _forget_flops(layer: LayerSpec, length: int) -> float:
    parts = 3 * (1 + layer.num_attention_heads // layer.num_key_value_heads)
    return _column_flops(parts + -parts % 8, layer, length)


class Learned(NoPosition):
    """A learned vector for each of `max_position_embeddings` positions, added to the embedding."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.weight = nn.Embedding(layer.max_position_embeddings, layer.hidden_size)

    def longest(self) -> int:
        return self.layer.max_position_embeddings

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTC + self.weight(positions_BT)


class Sinusoidal(NoPosition):
    """sin and cos of position · 10000^(−2j/C), side by side, times `initializer_range`."""

    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.layer.initializer_range).to(x_BTC.dtype)


class ScaledSinusoidal(NoPosition):
    """The waves of `Sinusoidal` times one learned number, which starts at 1/√C."""

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__(layer, heads)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.layer.hidden_size**-0.5)

    @with_own_parameters
    def embed(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        waves = _waves(positions_BT, x_BTC.shape[-1])
        return x_BTC + (waves * self.scale).to(x_BTC.dtype)


def _waves(positions_BT: Tensor, width: int) -> Tensor:
    even = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32)
    angle = positions_BT[..., None].float() * torch.exp(even * (-math.log(10_000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


_position = partial(Declaration, "position")
_rotary = partial(
    _position,
    flops=lambda layer, length: (
        3.0 * layer.head_dim * (layer.num_attention_heads + layer.num_key_value_heads)
    ),
)
DECLARATIONS = (
    _rotary(
        "rope",
        "rotary: queries and keys turned by an angle that grows with position",
        "arXiv 2104.09864",
        Rotary,
        refuses=_rope_refuses,
    ),
    _rotary(
        "xpos",
        "rotary, with scores that fade with distance; causal",
        "arXiv 2212.10554",
        XPos,
        refuses=_xpos_refuses,
    ),
    _position(
        "alibi",
        "scores minus slope · distance, a slope for each head; causal",
        "arXiv 2108.12409",
        Alibi,
        refuses=_alibi_refuses,
        flops=partial(_column_flops, ops.alibi.COLUMNS),
    ),
    _position(
        "forget",
        "scores plus Σ log f over the tokens since the key, f a gate from each token; causal",
        "arXiv 2503.02130 (FoX)",
        Forget,
        refuses=_forget_refuses,
        flops=_forget_flops,
        cache=lambda layer: layer.num_attention_heads,
    ),
    _position(
        "learned", "a learned vector a position, up to max_position_embeddings", "GPT-2", Learned
    ),
    _position(
        "sinusoidal",
        "fixed waves added to the embedding",
        "arXiv 1706.03762, section 3.5",
        Sinusoidal,
    ),
    _position(
        "scaled-sinusoidal",
        "fixed waves times a learned number, added to the embedding",
        "arXiv 2212.14034 (crammed BERT); arXiv 2202.10447",
        ScaledSinusoidal,
    ),
    _position(
        "none",
        "no position: the causal mask alone tells order; without it, a bag of tokens",
        "arXiv 2305.19466",
        NoPosition,
    ),
)
