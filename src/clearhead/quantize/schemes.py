"""Schemes by name: what is quantised, to how many bits, and what shares a scale.

| name | weights | activations (inputs of linear layers) |
| --- | --- | --- |
| `w8a8-coarse` | absmax, a scale a tensor | absmax, a scale a tensor (one text), dynamic |
| `w8a8-moderate` | absmax, a scale an output channel | absmax, a scale a tensor, dynamic |
| `w8a8-fine` | absmax, a scale an output channel | absmax, a scale an input channel, calibrated |
| `w8a8-token` | absmax, a scale an output channel | absmax, a scale a token, dynamic |
| `w4-channel` | zero-point, a scale an output channel | – |
| `w4-group`, `w4-group64` | zero-point, a scale 128 (64) inputs of an output channel | – |
| `mxfp4` | four-bit floats, a power of two 32 inputs of an output channel | – |

and `logits8-tensor`, `-head`, `-row`: attention logits alone, absmax, dynamic. Every number of bits
from 2 to 16 may stand in a name. `hadamard-NAME` turns inputs and weights of each linear layer by
a Hadamard matrix before they are quantised (QuaRot, arXiv 2404.00456), which leaves their product.

Table 3 of arXiv 2410.17174 has "per-channel / per-channel" as its finest; what a channel of an
activation is there, and whether its scale is static, could not be established. `fine` is one
reading (an input channel, calibrated beforehand, since such a scale cannot be taken out of the
matrix product), `token` the other common one (LLM.int8, arXiv 2208.07339).
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose
from clearhead.quantize.quantizers import GROUP, MX_BLOCK, checked

WeightScale = Literal["tensor", "channel", "group"]
InputScale = Literal["tensor", "channel", "token"]
LogitScale = Literal["tensor", "head", "row"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the linear layers."""

    bits: int
    quantizer: Literal["absmax", "zeropoint", "mxfp4"]
    scale: WeightScale
    group: int = GROUP


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The inputs of the linear layers, by absmax; a scale a channel is calibrated beforehand."""

    bits: int
    scale: InputScale


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Of attention, as they enter the softmax, by absmax over what each query may see."""

    bits: int
    scale: LogitScale


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A set of settings simulated together.

    `family` and `bits` are its place in a figure; bits is None where weights and activations
    differ in it. `rotated`: inputs and weights are turned by a Hadamard matrix first.
    """

    name: str
    family: str
    bits: int | None
    weights: Weights | None = None
    activations: Activations | None = None
    logits: Logits | None = None
    rotated: bool = False


ROTATED = "hadamard-"
_MXFP4 = Weights(bits=4, quantizer="mxfp4", scale="group", group=MX_BLOCK)
_BOTH: dict[str, tuple[WeightScale, InputScale]] = {
    "coarse": ("tensor", "tensor"),
    "moderate": ("channel", "tensor"),
    "fine": ("channel", "channel"),
    "token": ("channel", "token"),
}
# Family -> the bits that `all` draws: the papers' own and one step beyond.
FAMILIES: dict[str, tuple[int, ...]] = {
    **{f"wa-{scale}": (8, 6, 4) for scale in _BOTH},
    **{f"w-{scale}": (8, 6, 4, 3) for scale in ("channel", "group")},
    **{f"logits-{scale}": (8, 6, 4) for scale in ("tensor", "head", "row")},
}
WEIGHTS, LOGITS = ("tensor", "channel", "group"), ("tensor", "head", "row")  # what shares a scale
_NAME = re.compile(
    r"(?P<what>w|logits)(?P<bits>\d+)(?:a(?P<inputs>\d+))?-(?P<kind>[a-z]+?)(?P<group>\d*)"
)


def scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        ClearheadError: no such scheme, or bits outside 2 to 16.
    """
    if name.startswith(ROTATED):
        plain = scheme(name.removeprefix(ROTATED))
        if plain.logits is not None or plain.rotated:
            raise ClearheadError(
                f"scheme {name!r}: {ROTATED} turns the inputs of linear layers, once: choose "
                f"{ROTATED}w8a8-coarse"
            )
        return replace(plain, name=name, family=ROTATED + plain.family, rotated=True)
    if name == "mxfp4":
        return Scheme(name=name, family="mxfp4", bits=_MXFP4.bits, weights=_MXFP4)
    match = _NAME.fullmatch(name)
    if match is None or (match["inputs"] and (match["what"] != "w" or match["group"])):
        choose("scheme", name, [*every(), "mxfp4"])
    assert match is not None
    inputs, group = match["inputs"], match["group"]
    known = LOGITS if match["what"] == "logits" else WEIGHTS
    kind: Any = choose("granularity", match["kind"], _BOTH if inputs else known)
    bits = checked(int(match["bits"]))
    if group and (kind != "group" or int(group) < 2):
        raise ClearheadError(
            f"scheme {name!r}: only 'group' takes a number, of 2 inputs or more: w4-group64"
        )
    if inputs:
        of_weights, of_inputs = _BOTH[kind]
        return Scheme(
            name=name,
            family=f"wa-{kind}",
            bits=bits if bits == checked(int(inputs)) else None,
            weights=Weights(bits=bits, quantizer="absmax", scale=of_weights),
            activations=Activations(bits=int(inputs), scale=of_inputs),
        )
    rounded: dict[str, Any] = {"logits": Logits(bits=bits, scale=kind)}
    if known is WEIGHTS:
        size = int(group or GROUP)
        of_layers = Weights(bits=bits, quantizer="zeropoint", scale=kind, group=size)
        rounded = {"weights": of_layers}
    return Scheme(name=name, family=f"{match['what']}-{kind}{group}", bits=bits, **rounded)


def every() -> list[str]:
    """The names that `all` stands for."""
    return [_name(family, bits) for family, several in FAMILIES.items() for bits in several]


def _name(family: str, bits: int) -> str:
    kind, _, scale = family.partition("-")
    return f"w{bits}a{bits}-{scale}" if kind == "wa" else f"{kind}{bits}-{scale}"
