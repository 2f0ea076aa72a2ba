"""Schemes by name: what is quantised, to how many bits, and what shares a scale.

docs/quantize.md has the table of names. Every number of bits from 2 to 16 may stand in one.

- `w8a8-…` are weights and activations (inputs of linear layers), `w4-…` and `w4a16-…` weights
  alone, `a4-…` activations alone, `logits8-…` attention logits alone, `mxfp4` weights in MXFP4.
- `a4-token` and `a4-group32` have a zero-point and a scale for each token, or for 32 channels of
  one; `-clip90` takes nine tenths of the range, and clips what is outside.
- `hadamard-NAME` turns inputs and weights of each linear layer by a Hadamard matrix before they are
  quantised (QuaRot, arXiv 2404.00456), which leaves their product.
- `kv8`, `kv4`, `kv-fp8` are keys and values (`KeysValues`): zero-point, or eight-bit floats. Then
  may stand `-token` (a scale a token and head, as where nothing is named), `-channel` (of keys a
  scale a channel and head, of values a token: KIVI, arXiv 2402.02750) or `-tensor` (one a text and
  layer); `-prerope`, for keys before their rotation (KVQuant, arXiv 2401.18079); and `-keep4`, for
  the first four tokens kept as they are. `hadamard-kv4` turns each head first.
- `A+B` is both schemes at once.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose
from clearhead.quantize.quantizers import GROUP, MX_BLOCK, checked

WeightScale = Literal["tensor", "channel", "group"]
InputScale = Literal["tensor", "channel", "token", "static", "group"]
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
    quantizer: Literal["absmax", "integers", "zeropoint", "fp8"] = "absmax"
    levels: float | None = None  # of "integers"
    group: int = GROUP  # channels of a token that share a scale
    kept: float = 1.0  # share of the range, of "zeropoint"; numbers outside are clipped

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
_KINDS = {  # of what shares a scale
    "w": ("tensor", "channel", "group"),
    "a": ("token", "group"),
    "logits": ("tensor", "head", "row"),
}
_NAME = re.compile(
    r"(?P<what>w|a|logits)(?P<bits>\d+)(?:a(?P<inputs>\d+))?-(?P<kind>[a-z]+?)(?P<group>\d*)"
    r"(?P<clip>-clip[1-9]\d?)?"
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
        other = plain.weights is None and plain.keys_values is None
        if other or plain.family.startswith(ROTATED):
            raise ClearheadError(
                f"scheme {name!r}: {ROTATED} turns the inputs of linear layers with their weights, "
                f"or keys and values, once: choose {ROTATED}w8a8-coarse"
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
        floats = Weights(bits=8, quantizer="fp8", scale="channel")
        eight = Activations(bits=8, scale=scale, quantizer="fp8")
        return Scheme(name=name, family=name, bits=8, weights=floats, activations=eight)
    match = _NAME.fullmatch(name)
    what = match["what"] if match else ""
    if match is None or (match["inputs"] and what != "w") or (match["clip"] and what != "a"):
        choose("scheme", name, [*every(), "mxfp4", "fp8-token", "a8-token", "kv8", "kv-fp8"])
    assert match is not None
    inputs, group = match["inputs"], match["group"]
    alone = inputs == "16" and match["kind"] in _ALONE
    kinds = _BOTH if inputs and not alone else _KINDS[what]
    kind: Any = choose("granularity", match["kind"], kinds)
    bits = checked(int(match["bits"]))
    if group and (kind != "group" or int(group) < 2):
        raise ClearheadError(
            f"scheme {name!r}: only 'group' takes a number, of 2 inputs or more: w4-group64"
        )
    how: Any = "integers" if alone or kind == "static" else "absmax" if inputs else "zeropoint"
    size, clip = int(group or GROUP), match["clip"] or ""
    if inputs and not alone:
        of_weights = Weights(bits=bits, quantizer=how, scale=_BOTH[kind][0])
        of_inputs = Activations(bits=checked(int(inputs)), quantizer=how, scale=_BOTH[kind][1])
        rounded: dict[str, Any] = {"weights": of_weights, "activations": of_inputs}
        same = bits if bits == of_inputs.bits else None
        return Scheme(name=name, family=f"wa-{kind}", bits=same, **rounded)
    rounded = {"logits": Logits(bits=bits, scale=kind)}
    if what == "w":
        rounded = {"weights": Weights(bits=bits, quantizer=how, scale=kind, group=size)}
    elif what == "a":
        kept = int(clip.removeprefix("-clip") or 100) / 100
        of_inputs = Activations(bits=bits, scale=kind, quantizer=how, group=size, kept=kept)
        rounded = {"activations": of_inputs}
    family = f"{what}{'a16' if alone else ''}-{kind}{group}{clip}"
    return Scheme(name=name, family=family, bits=bits, **rounded)


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
