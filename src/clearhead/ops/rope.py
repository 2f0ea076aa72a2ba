"""Rotary positions (RoPE, arXiv 2104.09864), their scalings, and xPos (arXiv 2212.10554).

The kinds of scaling and their keys are those of transformers' `rope_parameters`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.ops.precision import widened

RotaryTable = tuple[Tensor, Tensor]
# Tokens after which a wave's score under xPos has faded by one more factor ζ.
FADING = 512
# Per kind: the keys that it must have, and those that it may have, beside rope_type and rope_theta.
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "proportional": (("partial_rotary_factor",), ()),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}


class Rotation:
    """Rotation of keys that are cached unrotated; its table is computed at first use.

    `positions_BS` is int [B or 1, S]; the others are those of `rotary_table`.
    """

    def __init__(self, positions_BS: Tensor, frequency: Tensor, factor: float = 1.0) -> None:
        self.positions_BS, self.frequency, self.factor = positions_BS, frequency, factor
        self._table: RotaryTable | None = None
        self._indices: Tensor | None = None

    def table(self) -> RotaryTable:
        """`rotary_table` at these positions."""
        if self._table is None:
            self._table = rotary_table(self.positions_BS, self.frequency, self.factor)
        return self._table

    def indices(self) -> Tensor:
        """The positions as int32, [B or 1, S]."""
        if self._indices is None:
            self._indices = self.positions_BS.int()
        return self._indices


def rotary_table(
    positions_BT: Tensor, frequency: Tensor, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The two factors of `rotate`, float32 [B, 1, T, width] each (arXiv 2104.09864).

    cos of position · frequency for both halves of a head's channels; −sin for the first half and
    sin for the second. `attention_factor` multiplies both, and so the scores by its square (YaRN).
    A frequency is [width/2], or [B, width/2] for each row.
    """
    frequency = frequency[None, None, None] if frequency.ndim == 1 else frequency[:, None, None]
    angle = positions_BT[:, None, :, None].float() * frequency
    return _table(angle, attention_factor)


def _table(angle: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def cos_sin(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos, sin for each pair of channels, [B, 1, T, width/2], of a rotary table."""
    width = table[0].shape[-1] // 2
    return table[0][..., width:], table[1][..., width:]


def rotate(x_BHTD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pair (x_j, x_(j+D/2)) by its angle: the half-split layout of transformers' Llama.

    The arithmetic is float32 (float64 for float64); the result has the dtype of x.
    """
    cos, signed_sin = table
    wide = widened(x_BHTD)
    first, second = wide.chunk(2, -1)
    # In place, as fresh memory costs a CPU more than the arithmetic.
    turned = torch.cat([second, first], -1).mul_(signed_sin).addcmul_(wide, cos)
    return turned.to(x_BHTD.dtype)


def ntk_theta(theta: float, factor: float, width: int) -> float:
    """NTK-aware base, its slowest wave `factor` s times longer: θ · s^(d/(d−2)), d the width."""
    return theta * factor ** (width / (width - 2))


def dynamic_theta(theta: float, factor: float, width: int, length: Tensor, trained: int) -> Tensor:
    """The base for `length` L tokens, float32 of L's shape; θ itself up to L0 = `trained` tokens.

    θ · (s · L / L0 − (s − 1))^(d/(d−2)), s = `factor`, as in transformers' "dynamic".
    """
    beyond = length.float().clamp_min(trained) / trained
    return theta * (factor * beyond - (factor - 1)) ** (width / (width - 2))


def frequencies(
    rope: Mapping[str, Any], width: int, device: torch.device, theta: Tensor | None = None
) -> tuple[Tensor, float]:
    """Each pair's angle for one position, float32 [..., width/2], and the attention factor.

    `rope` has rope_type, rope_theta and the keys of `KINDS`; `theta` is the base of kind dynamic.
    """
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    if theta is not None:
        return theta[..., None] ** -exponent, 1.0
    plain = rope["rope_theta"] ** -exponent
    kind = rope["rope_type"]
    if kind == "linear":  # position interpolation (arXiv 2306.15595)
        return plain / rope["factor"], 1.0
    if kind == "yarn":
        return _yarn(plain, rope, width)
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "proportional":  # the other pairs stay as they are: partial rotation
        turned = int(rope["partial_rotary_factor"] * width // 2)
        plain[turned:] = 0
    return plain, 1.0


def _yarn(plain: Tensor, rope: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """Fast waves stay, slow ones are interpolated, a ramp between (arXiv 2309.00071)."""

    def pair_that_turns(times: float) -> float:
        length = rope["original_max_position_embeddings"]
        wave = math.log(length / (times * 2 * math.pi))
        return width * wave / (2 * math.log(rope["rope_theta"]))

    low = pair_that_turns(rope.get("beta_fast") or 32)
    high = pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pair = torch.arange(width // 2, device=plain.device, dtype=torch.float32)
    ramp = ((pair - low) / (high - low or 0.001)).clamp(0, 1)
    frequency = plain / rope["factor"] * ramp + plain * (1 - ramp)

    def growth(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(rope["factor"], 1))

    given, one, every = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return frequency, given
    return frequency, growth(one) / growth(every) if one and every else growth(1)


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Waves that turn less than low_freq_factor times in the trained length are interpolated."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / rope["factor"] * (1 - unscaled) + plain * unscaled


def xpos_tables(
    queries_BT: Tensor, keys_BS: Tensor, frequency: Tensor, centre: int
) -> tuple[RotaryTable, RotaryTable]:
    """xPos's rotary tables of queries and keys, float32, times ζ_j^±((position − centre) / 512).

    ζ_j = (2j + 0.4 d) / (1.4 d) (arXiv 2212.10554), so that the score of pair j has the factor
    ζ_j^((m−n)/512), whatever the centre. A fixed centre lets keys stay in a cache. Up to 32,768
    tokens from it the factors are at most 7e34, which fits bfloat16 and float32, not float16.
    """
    width = 2 * frequency.shape[-1]
    pair = torch.arange(0, width, 2, device=frequency.device, dtype=torch.float32)
    zeta = (pair + 0.4 * width) / (1.4 * width)

    def table(positions: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        at = positions[:, None, :, None].float()
        return _table(at * frequency, zeta ** (sign * (at - centre) / FADING))

    return table(queries_BT, 1), table(keys_BS, -1)
