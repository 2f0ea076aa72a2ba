"""Schemes by name: what is quantised, to how many bits, and what shares a scale.

| name | weights | activations (inputs of linear layers) |
| --- | --- | --- |
| `w8a8-coarse` | absmax, a scale a tensor | absmax, a scale a tensor (one text), dynamic |
| `w8a8-moderate` | absmax, a scale an output channel | absmax, a scale a tensor, dynamic |
| `w8a8-fine` | absmax, a scale an output channel | absmax, a scale an input channel, calibrated |
| `w8a8-token` | absmax, a scale an output channel | absmax, a scale a token, dynamic |
| `w8a8-static` | absmax, a scale an output channel | absmax, a scale a tensor, calibrated |
| `fp8-token`, `fp8-static` | as `w8a8-token` and `-static`, in eight-bit floats (e4m3) | |
| `w4a16-channel`, `w4a16-group`, `-group64` | absmax, as the next two rows | – |
| `w4-channel` | zero-point, a scale an output channel | – |
| `w4-group`, `w4-group64` | zero-point, a scale 128 (64) inputs of an output channel | – |
| `mxfp4` | four-bit floats, a power of two 32 inputs of an output channel | – |

and `logits8-tensor`, `-head`, `-row`: attention logits alone, absmax, dynamic. Every number of bits
from 2 to 16 may stand in a name. `hadamard-NAME` turns inputs and weights of each linear layer by
a Hadamard matrix before they are quantised (QuaRot, arXiv 2404.00456), which leaves their product.

`kv8`, `kv4`, `kv-fp8` are keys and values (`KeysValues`): zero-point, or eight-bit floats. Then may
stand `-token` (a scale a token and head, as where nothing is named), `-channel` (of keys a scale a
channel and head, of values a token: KIVI, arXiv 2402.02750) or `-tensor` (one a text and layer);
`-prerope`, for keys before their rotation (KVQuant, arXiv 2401.18079); and `-keep4`, for the first
four tokens kept as they are. `hadamard-kv4` turns each head first. `A+B` is both schemes at once.

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
InputScale = Literal["tensor", "channel", "token", "static"]
CacheScale = Literal["token", "channel", "tensor"]
LogitScale = Literal["tensor", "head", "row"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the linear layers."""

    bits: int
    quantizer: Literal["absmax", "integers", "zeropoint", "mxfp4", "fp8"]
    scale: WeightScale
    group: int = GROUP


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The inputs of the linear layers; a scale a channel, and a static one for a tensor, are
    calibrated beforehand."""

    bits: int
    scale: InputScale
    quantizer: Literal["absmax", "integers", "fp8"] = "absmax"
    levels: float | None = None  # of "integers"

    @property
    def calibrated(self) -> bool:
        return self.scale in ("channel", "static")


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Of attention, as they enter the softmax, by absmax over what each query may see."""

    bits: int
    scale: LogitScale


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """Keys and values, as a cache holds them.

    Attributes:
        bits: by zero-point; None for eight-bit floats.
        prerope: keys are rounded as `k_proj` gives them, before a norm and before RoPE.
        keep: so many first tokens of a text are left as they are, and count for no scale.
        rotated: each head is turned by a Hadamard matrix beforehand, and back.
    """

    bits: int | None
    scale: CacheScale = "token"
    prerope: bool = False
    keep: int = 0
    rotated: bool = False


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
    keys_values: KeysValues | None = None
    rotated: bool = False

    @property
    def attends(self) -> bool:
        """True where attention itself is changed."""
        return self.logits is not None or self.keys_values is not None


ROTATED = "hadamard-"
_MXFP4 = Weights(bits=4, quantizer="mxfp4", scale="group", group=MX_BLOCK)
_BOTH: dict[str, tuple[WeightScale, InputScale]] = {
    "coarse": ("tensor", "tensor"),
    "moderate": ("channel", "tensor"),
    "fine": ("channel", "channel"),
    "token": ("channel", "token"),
    "static": ("channel", "static"),
}
_DRAWN = ("coarse", "moderate", "fine", "token")
# Family -> the bits that `all` draws: the papers' own and one step beyond.
FAMILIES: dict[str, tuple[int, ...]] = {
    **{f"wa-{scale}": (8, 6, 4) for scale in _DRAWN},
    **{f"w-{scale}": (8, 6, 4, 3) for scale in ("channel", "group")},
    **{f"logits-{scale}": (8, 6, 4) for scale in ("tensor", "head", "row")},
}
_TENSORS = ("weights", "activations", "logits", "keys_values")  # fields of a scheme
_ALONE = ("channel", "group")  # with 16 bits of activations: those stay as they are
WEIGHTS, LOGITS = ("tensor", "channel", "group"), ("tensor", "head", "row")  # what shares a scale
_NAME = re.compile(
    r"(?P<what>w|logits)(?P<bits>\d+)(?:a(?P<inputs>\d+))?-(?P<kind>[a-z]+?)(?P<group>\d*)"
)
_CACHE = re.compile(
    r"kv(?P<bits>\d+|-fp8)(-(?P<kind>(?!prerope|keep)[a-z]+))?(?P<prerope>-prerope)?"
    r"(-keep(?P<keep>\d+))?"
)


def scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        ClearheadError: no such scheme, or bits outside 2 to 16.
    """
    if "+" in name:
        return _together(name, [scheme(one) for one in name.split("+")])
    if name.startswith(ROTATED):
        plain = scheme(name.removeprefix(ROTATED))
        if plain.logits is not None or plain.family.startswith(ROTATED):
            raise ClearheadError(
                f"scheme {name!r}: {ROTATED} turns the inputs of linear layers, or keys and "
                f"values, once: choose {ROTATED}w8a8-coarse"
            )
        named = replace(plain, name=name, family=ROTATED + plain.family)
        if plain.keys_values is not None:
            return replace(named, keys_values=replace(plain.keys_values, rotated=True))
        return replace(named, rotated=True)
    if name == "mxfp4":
        return Scheme(name=name, family="mxfp4", bits=_MXFP4.bits, weights=_MXFP4)
    if match := _CACHE.fullmatch(name):
        return _of_cache(name, match)
    if name.startswith("fp8-"):
        scale: Any = choose("granularity", name.removeprefix("fp8-"), ("token", "static"))
        return Scheme(
            name=name,
            family=name,
            bits=8,
            weights=Weights(bits=8, quantizer="fp8", scale="channel"),
            activations=Activations(bits=8, scale=scale, quantizer="fp8"),
        )
    match = _NAME.fullmatch(name)
    if match is None or (match["inputs"] and match["what"] != "w"):
        choose("scheme", name, [*every(), "mxfp4", "fp8-token", "kv8", "kv-fp8"])
    assert match is not None
    inputs, group = match["inputs"], match["group"]
    known = LOGITS if match["what"] == "logits" else WEIGHTS
    alone = inputs == "16" and match["kind"] in _ALONE
    kind: Any = choose("granularity", match["kind"], _BOTH if inputs and not alone else known)
    bits = checked(int(match["bits"]))
    if group and (kind != "group" or int(group) < 2):
        raise ClearheadError(
            f"scheme {name!r}: only 'group' takes a number, of 2 inputs or more: w4-group64"
        )
    if inputs and not alone:
        of_weights, of_inputs = _BOTH[kind]
        rounding: Any = "integers" if kind == "static" else "absmax"
        return Scheme(
            name=name,
            family=f"wa-{kind}",
            bits=bits if bits == checked(int(inputs)) else None,
            weights=Weights(bits=bits, quantizer=rounding, scale=of_weights),
            activations=Activations(bits=int(inputs), scale=of_inputs, quantizer=rounding),
        )
    rounded: dict[str, Any] = {"logits": Logits(bits=bits, scale=kind)}
    if known is WEIGHTS:
        size = int(group or GROUP)
        how: Any = "integers" if alone else "zeropoint"
        of_layers = Weights(bits=bits, quantizer=how, scale=kind, group=size)
        rounded = {"weights": of_layers}
    what = f"{match['what']}{'a16' if alone else ''}"
    return Scheme(name=name, family=f"{what}-{kind}{group}", bits=bits, **rounded)


def _of_cache(name: str, match: re.Match[str]) -> Scheme:
    kind: Any = choose("granularity", match["kind"] or "token", ("token", "channel", "tensor"))
    bits = None if match["bits"] == "-fp8" else checked(int(match["bits"]))
    family = f"kv{'-fp8' if bits is None else ''}-{kind}{match['prerope'] or ''}"
    keep = int(match["keep"] or 0)
    how = KeysValues(bits=bits, scale=kind, prerope=bool(match["prerope"]), keep=keep)
    family += f"-keep{keep}" if keep else ""
    return Scheme(name=name, family=family, bits=bits or 8, keys_values=how)


def _together(name: str, parts: list[Scheme]) -> Scheme:
    """One scheme of several, each of other tensors."""
    whole = Scheme(name=name, family="+".join(one.family for one in parts), bits=None)
    for part in parts:
        fields = {key: getattr(part, key) for key in _TENSORS if getattr(part, key) is not None}
        if taken := [key for key in fields if getattr(whole, key) is not None]:
            raise ClearheadError(
                f"scheme {name!r} rounds {taken[0].replace('_', ' and ')} twice: name schemes of "
                "other tensors, such as w8a8-token+kv8"
            )
        whole = replace(whole, **fields, rotated=whole.rotated or part.rotated)
    bits = {one.bits for one in parts}
    return replace(whole, bits=bits.pop() if len(bits) == 1 else None)


def every() -> list[str]:
    """The names that `all` stands for."""
    return [_name(family, bits) for family, several in FAMILIES.items() for bits in several]


def _name(family: str, bits: int) -> str:
    kind, _, scale = family.partition("-")
    return f"w{bits}a{bits}-{scale}" if kind == "wa" else f"{kind}{bits}-{scale}"
