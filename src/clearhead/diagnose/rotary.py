"""The rotary layout of any model: which channels turn together, and at which frequency.

Models pair the halves of a head or neighbours, may leave part of a head unturned, and may have
frequencies by kind of layer. A layout is accepted if it turns random queries as the model's own
function does.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.nn import REGISTRY
from clearhead.nn.attention import Attention
from clearhead.nn.rotary import rotary_width

_TOLERANCE = 1e-3  # between the model's float32 and ours


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Pair j of a head is the channels (first[j], second[j]), turned by position · frequency[j]."""

    frequency: Tensor  # float64 [pairs]
    first: Tensor  # int64 [pairs]
    second: Tensor

    def pairs(self, x: Tensor) -> Tensor:
        """[..., D] as complex numbers [..., pairs], complex64 (complex128 for float64)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.complex(x[..., self.first], x[..., self.second])


def rotary_of(model: Any, module: nn.Module, layer: int, width: int, keys: int) -> Rotary | str:
    """The rotary positions of an attention module with heads of `width` channels on a text of
    `keys` tokens, or the reason why they are not known."""
    if isinstance(module, Attention):
        return _ours(module, keys)
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return f"{type(module).__name__} has no rotary positions (no apply_rotary_pos_emb)"
    # Phi, StableLM and Persimmon hand their function only the first channels of a head, and say so.
    width = getattr(module, "rotary_ndims", width)
    kinds = getattr(model.config, "layer_types", None)
    kind = kinds[layer] if kinds and layer < len(kinds) else None
    for table in model.modules():
        if "Rotary" not in type(table).__name__:
            continue
        for name, options in (("inv_freq", {}), (f"{kind}_inv_freq", {"layer_type": kind})):
            frequency = getattr(table, name, None)
            if isinstance(frequency, Tensor) and frequency.ndim == 1:
                rotary = _tried(apply, table, frequency.detach(), options, width, keys)
                if rotary is not None:
                    return rotary
    return "rotary positions in a layout that is not known here"


def _ours(module: Attention, keys: int) -> Rotary | str:
    layer = module.layer
    if layer.position != "rope":
        return f"the order of position={layer.position!r} is not measured"
    if layer.scores == "coca-slack":
        return "coca-slack scores are no function of the distance"
    device = next(module.parameters()).device
    width = rotary_width(layer)
    places = torch.arange(keys, device=device)[None]
    position: Any = REGISTRY.find("position", "rope").build(layer, 1)
    frequency = position.tables(places[:, -1:], places).keys.frequency.flatten()
    pairs = width // 2
    return Rotary(
        frequency=frequency.double(),
        first=torch.arange(pairs, device=device),
        second=torch.arange(pairs, 2 * pairs, device=device),
    )


def _tried(
    apply: Any, table: Any, frequency: Tensor, options: dict[str, Any], width: int, keys: int
) -> Rotary | None:
    """The layout that turns random queries as the model's function does; None if none does.

    The text's last position keeps a table by length at this length, and is not compared.
    """
    device, pairs = frequency.device, len(frequency)
    if 2 * pairs > width:
        return None
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 4, width, generator=generator).to(device)
    position = torch.tensor([[0, 1, 5, keys - 1]], device=device)
    try:
        cos, sin = table(q, position, **options)
        turned, _ = apply(q, q, cos, sin)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return None
    if turned.shape != q.shape:
        return None
    q, turned, position = q[:, :, :3], turned[:, :, :3], position[:, :3]
    place = torch.arange(pairs, device=device)
    layouts = ((place, place + pairs), (2 * place, 2 * place + 1))
    angle = position[0, :, None] * frequency.double()
    for first, second in layouts:
        rotary = Rotary(frequency=frequency.double(), first=first, second=second)
        expected = rotary.pairs(q.double()) * torch.polar(torch.ones_like(angle), angle)
        actual = rotary.pairs(turned.double())
        scale = actual.abs().sum() / expected.abs().sum()  # YaRN's attention factor
        if bool(((actual - scale * expected).abs() < _TOLERANCE * scale).all()):
            return rotary
    return None
