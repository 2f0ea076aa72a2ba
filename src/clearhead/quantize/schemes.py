"""Quantisation schemes by name: tensors to quantise, bits, and granularity of the scales.

docs/quantize.md has the table of names, which may contain any number of bits from 2 to 16.

- `hadamard-NAME` rotates inputs and weights of each linear layer by a Hadamard matrix before they
  are quantised (QuaRot, arXiv 2404.00456), which keeps their product; `hadamard-kv4` each head.
- `A+B` is both schemes at once.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose
from clearhead.quantize.quantizers import GROUP, MX_BLOCK, checked


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounding of weights, of the inputs of linear layers, or of attention logits.

    Attributes:
        quantizer: a function of `quantizers`.
        scale: granularity. For weights one per "tensor", output "channel", or "group" of its
            inputs. For inputs one per "tensor", "token" or "group" of its channels; calibrated
            beforehand, per input "channel" or "static" tensor. For logits one per "tensor" (of a
            text), "head" or "row"; logits of hidden keys do not count.
        group: channels in a "group".
        kept: for "zeropoint", share of the range that is kept; numbers outside are clipped.
        levels: for "integers", its argument of this name.
    """

    bits: int
    scale: str
    quantizer: Literal["absmax", "integers", "zeropoint", "mxfp4", "fp8"] = "absmax"
    group: int = GROUP
    kept: float = 1.0
    levels: float | None = None


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """Keys and values, as a cache holds them.

    Attributes:
        bits: by zero-point; None for eight-bit floats.
        scale: one per "token" and head; per "channel" and head (for values per token: KIVI, arXiv
            2402.02750); or per "tensor" of a text and layer.
        prerope: keys are rounded as `k_proj` gives them, before a norm and before RoPE (KVQuant,
            arXiv 2401.18079).
        keep: number of first tokens of a text left unquantised, which count for no scale.
        rotated: whether each head is rotated by a Hadamard matrix beforehand, and back.
    """

    bits: int | None
    scale: str = "token"
    prerope: bool = False
    keep: int = 0
    rotated: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A set of settings simulated together.

    `family` and `bits` place it in a figure. `rotated`: inputs and weights are first rotated by a
    Hadamard matrix.
    """

    name: str
    family: str
    weights: Rounding | None = None
    activations: Rounding | None = None
    logits: Rounding | None = None
    keys_values: KeysValues | None = None
    rotated: bool = False

    @property
    def bits(self) -> int | None:
        """The number of bits; None where tensors have different ones."""
        rounded = (self.weights, self.activations, self.logits, self.keys_values)
        bits = {how.bits or 8 for how in rounded if how is not None}
        return bits.pop() if len(bits) == 1 else None

    @property
    def attends(self) -> bool:
        """True if logits, keys or values are quantised."""
        return self.logits is not None or self.keys_values is not None

    @property
    def calibrated(self) -> bool:
        """True if scales of the inputs are calibrated beforehand on text."""
        return self.activations is not None and self.activations.scale in ("channel", "static")


_ROTATED = "hadamard-"
_BITS, _GROUP = r"(?P<bits>\d+)", r"group(?:[2-9]|[1-9]\d+)?"
_WA = rf"w{_BITS}a(?P<inputs>\d+)"
_CACHE = (
    rf"kv({_BITS}|(?P<fp8>-fp8))(-(?P<kind>token|channel|tensor))?(?P<prerope>-prerope)?"
    r"(?P<keep>-keep[1-9]\d*)?"
)
# A pattern of names; the family, which is the name without its bits; what is rounded, and how.
_GRAMMAR = (
    (rf"{_WA}-(?P<kind>coarse|moderate|fine|token)", "wa-{kind}", "both", "absmax"),
    (rf"{_WA}-(?P<kind>static)", "wa-{kind}", "both", "integers"),
    (r"fp(?P<bits>8)-(?P<kind>token|static)", "fp8-{kind}", "both", "fp8"),
    (rf"w{_BITS}-(?P<kind>tensor|channel|{_GROUP})", "w-{kind}", "weights", "zeropoint"),
    (rf"w{_BITS}a16-(?P<kind>channel|{_GROUP})", "wa16-{kind}", "weights", "integers"),
    (r"mxfp(?P<bits>4)", "mxfp4", "weights", "mxfp4"),
    (
        rf"a{_BITS}-(?P<kind>token|{_GROUP})(?P<clip>-clip[1-9]\d?)?",
        "a-{kind}{clip}",
        "activations",
        "zeropoint",
    ),
    (rf"logits{_BITS}-(?P<kind>tensor|head|row)", "logits-{kind}", "logits", "absmax"),
    (_CACHE, "kv{fp8}-{kind}{prerope}{keep}", "keys_values", ""),
)
# Scales of weights and of their inputs, where "channel" and the name's own word do not say them.
_OF_WEIGHTS = {"coarse": "tensor"}
_OF_INPUTS = {"coarse": "tensor", "moderate": "tensor", "fine": "channel"}


def scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        ClearheadError: no such scheme, or bits outside 2 to 16.
    """
    names, families, settings = name.split("+"), list[str](), dict[str, Any]()
    if len(names) > 1 and "" in names:
        raise ClearheadError(
            f"scheme {name!r} lacks a name beside its +: give one, such as w8a8-token+kv8"
        )
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
    plain = name.removeprefix(_ROTATED)
    rows = ((re.fullmatch(row[0], plain), *row[1:]) for row in _GRAMMAR)
    match, family, part, quantizer = next((row for row in rows if row[0]), (None, "", "", ""))
    if match is None:
        choose("scheme", name, [*every(), *_OTHERS])  # refuses it
    assert match is not None
    words = match.groupdict("")
    kind = words["kind"] = words.get("kind") or {"mxfp4": f"group{MX_BLOCK}"}.get(plain, "token")
    settings: dict[str, Any] = {}
    if part == "keys_values":
        settings[part] = KeysValues(
            bits=None if words["fp8"] else checked(int(words["bits"])),
            scale=kind,
            prerope=bool(words["prerope"]),
            keep=int(words["keep"].removeprefix("-keep") or 0),
            rotated=plain != name,
        )
    elif part == "both":
        of_weights, of_inputs = _OF_WEIGHTS.get(kind, "channel"), _OF_INPUTS.get(kind, kind)
        inputs = words.get("inputs", words["bits"])
        settings["weights"] = _rounding(words["bits"], of_weights, quantizer)
        settings["activations"] = _rounding(inputs, of_inputs, quantizer)
    else:
        settings[part] = _rounding(words["bits"], kind, quantizer, words.get("clip", ""))
    family = family.format(**words)
    if plain == name:
        return family, settings
    if "weights" in settings:
        settings["rotated"] = True
    elif part != "keys_values":
        raise ClearheadError(
            f"scheme {name!r}: {_ROTATED} turns the inputs of linear layers with their weights, or "
            f"keys and values: choose {_ROTATED}w8a8-coarse"
        )
    return _ROTATED + family, settings


def _rounding(bits: str, kind: str, quantizer: Any, clip: str = "") -> Rounding:
    scale, _, group = kind.partition("group")
    return Rounding(
        bits=checked(int(bits)),
        scale=scale or "group",
        quantizer=quantizer,
        group=int(group or GROUP),
        kept=int(clip.removeprefix("-clip") or 100) / 100,
    )


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
