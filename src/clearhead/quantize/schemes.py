"""Quantisation schemes by name (docs/quantize.md): tensors, bits, and granularity of the scales.

`hadamard-NAME` first rotates inputs and weights of each linear layer, or each head's keys and
values, by a Hadamard matrix (QuaRot, arXiv 2404.00456); `A+B` is both schemes at once.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose

FEWEST, MOST = 2, 16  # bits
GROUP = 128  # inputs of a channel that share a scale


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounding of weights, of inputs of linear layers, of attention logits, or of keys and values.

    Attributes:
        scale: of weights a "tensor", output "channel" or "group" of inputs; of inputs a "tensor",
            "token" or "group" of channels, or calibrated, a "channel" or "static" (tensor); of
            logits a "tensor" (of a text), "head" or "row"; of keys and values a "token" and head, a
            "channel" and head (values: a token; KIVI, arXiv 2402.02750), or a "tensor" (of a text).
        kept: of the range, by "zeropoint"; `levels` are those of "integers".
        prerope: keys are rounded as `k_proj` gives them (KVQuant, arXiv 2401.18079).
        keep: first tokens of a text whose keys and values stay, and count for no scale.
        rotated: each head is turned by a Hadamard matrix beforehand, and back.
    """

    bits: int
    scale: str
    quantizer: Literal["absmax", "integers", "zeropoint", "mxfp4", "fp8"] = "absmax"
    group: int = GROUP
    kept: float = 1.0
    levels: float | None = None
    prerope: bool = False
    keep: int = 0
    rotated: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A set of settings simulated together; what has no `Rounding` keeps its precision. `family` is
    the name without its bits. Under `rotated` inputs and weights are first rotated by a Hadamard
    matrix."""

    name: str
    family: str
    weights: Rounding | None = None
    activations: Rounding | None = None
    logits: Rounding | None = None
    keys_values: Rounding | None = None
    rotated: bool = False

    @property
    def bits(self) -> int | None:
        """The number of bits; None where tensors have different ones."""
        rounded = (self.weights, self.activations, self.logits, self.keys_values)
        bits = {how.bits for how in rounded if how is not None}
        return bits.pop() if len(bits) == 1 else None

    @property
    def attends(self) -> bool:
        """True if logits, keys or values are quantised."""
        return self.logits is not None or self.keys_values is not None

    @property
    def calibrated(self) -> bool:
        """True if scales of the inputs are calibrated beforehand on text."""
        return self.activations is not None and self.activations.scale in ("channel", "static")


_TURNED, _BITS = r"(?P<turned>hadamard-)?", r"(?P<bits>\d+)"
_GROUP = r"group(?:[2-9]|[1-9]\d+)?"
_WEIGHT = rf"{_TURNED}w{_BITS}"
_WA = rf"{_WEIGHT}a(?P<inputs>\d+)"
_CACHE = (
    rf"{_TURNED}kv({_BITS}|(?P<fp8>-fp8))(-(?P<kind>token|channel|tensor))?(?P<prerope>-prerope)?"
    r"(?P<keep>-keep[1-9]\d*)?"
)
_CLIP = r"(?P<clip>-clip[1-9]\d?)?"
# A pattern of names; the family, which is the name without its bits; what is rounded, and how.
_GRAMMAR = (
    (rf"{_WA}-(?P<kind>coarse|moderate|fine|token)", "{turned}wa-{kind}", "both", "absmax"),
    (rf"{_WA}-(?P<kind>static)", "{turned}wa-{kind}", "both", "integers"),
    (rf"{_TURNED}fp(?P<bits>8)-(?P<kind>token|static)", "{turned}fp8-{kind}", "both", "fp8"),
    (rf"{_WEIGHT}-(?P<kind>tensor|channel|{_GROUP})", "{turned}w-{kind}", "weights", "zeropoint"),
    (rf"{_WEIGHT}a16-(?P<kind>channel|{_GROUP})", "{turned}wa16-{kind}", "weights", "integers"),
    (rf"{_TURNED}mxfp(?P<bits>4)", "{turned}mxfp4", "weights", "mxfp4"),
    (rf"a{_BITS}-(?P<kind>token|{_GROUP}){_CLIP}", "a-{kind}{clip}", "activations", "zeropoint"),
    (rf"logits{_BITS}-(?P<kind>tensor|head|row)", "logits-{kind}", "logits", "absmax"),
    (_CACHE, "{turned}kv{fp8}-{kind}{prerope}{keep}", "keys_values", "zeropoint"),
)
# Scales of weights and of their inputs, where "channel" and the name's own word do not say them.
_OF_WEIGHTS = {"coarse": "tensor"}
_OF_INPUTS = {"coarse": "tensor", "moderate": "tensor", "fine": "channel"}


def scheme(name: str) -> Scheme:
    """The scheme of that name (docs/quantize.md), such as "w8a8-token" or "w4-channel+kv8".

    Raises:
        ClearheadError: no such scheme, bits outside 2 to 16, or a tensor that is rounded twice.
    """
    names, families, settings = name.split("+"), list[str](), dict[str, Any]()
    for family, added in map(_alone, names):
        if twice := next((key for key in added if key in settings and key != "rotated"), None):
            raise ClearheadError(
                f"scheme {name!r} rounds {twice.replace('_', ' and ')} twice: name schemes of "
                "other tensors, such as w8a8-token+kv8"
            )
        families.append(family)
        settings |= added
    return Scheme(name=name, family="+".join(families), **settings)


def _alone(name: str) -> tuple[str, dict[str, Any]]:
    """The family of a name without +, and the settings of its scheme."""
    rows = ((re.fullmatch(row[0], name), *row[1:]) for row in _GRAMMAR)
    match, family, part, quantizer = next((row for row in rows if row[0]), (None, "", "", ""))
    if match is None:
        choose("scheme", name, [*every(), *_OTHERS])  # refuses it
    assert match is not None
    words = match.groupdict("")
    kind = words.get("kind") or ("group32" if quantizer == "mxfp4" else "token")
    bits = int(words["bits"] or 8)
    inputs = int(words.get("inputs") or bits)
    for number in (bits, inputs):
        if not FEWEST <= number <= MOST:
            raise ClearheadError(f"{number} bits: choose {FEWEST} to {MOST}")
    turned, family = bool(words.get("turned")), family.format(**words | {"kind": kind})
    if part == "keys_values":
        keep = int(words["keep"].removeprefix("-keep") or 0)
        more = {"prerope": bool(words["prerope"]), "keep": keep, "rotated": turned}
        return family, {part: _rounding(bits, kind, "fp8" if words["fp8"] else quantizer, **more)}
    settings: dict[str, Any] = {"rotated": True} if turned else {}
    if part == "both":
        of_weights, of_inputs = _OF_WEIGHTS.get(kind, "channel"), _OF_INPUTS.get(kind, kind)
        settings["weights"] = _rounding(bits, of_weights, quantizer)
        settings["activations"] = _rounding(inputs, of_inputs, quantizer)
    else:
        kept = int(words.get("clip", "").removeprefix("-clip") or 100) / 100
        settings[part] = _rounding(bits, kind, quantizer, kept=kept)
    return family, settings


def _rounding(bits: int, kind: str, quantizer: Any, **more: Any) -> Rounding:
    scale, _, group = kind.partition("group")
    more["group"] = int(group or GROUP)
    return Rounding(bits=bits, scale=scale or "group", quantizer=quantizer, **more)


_FEW = (8, 6, 4)
_OTHERS = (  # for near misses
    *("mxfp4", "fp8-token", "fp8-static", "w8a8-static", "w4a16-channel", "w4a16-group64"),
    *("w4-group64", "a8-token", "a4-group32", "kv8", "kv4-channel", "kv-fp8", "hadamard-kv4"),
)


def every() -> list[str]:
    """The names that `all` stands for: the papers' numbers of bits, and one step beyond."""
    return [
        *(f"w{n}a{n}-{scale}" for scale in ("coarse", "moderate", "fine", "token") for n in _FEW),
        *(f"w{n}-{scale}" for scale in ("channel", "group") for n in (*_FEW, 3)),
        *(f"logits{n}-{scale}" for scale in ("tensor", "head", "row") for n in _FEW),
    ]
