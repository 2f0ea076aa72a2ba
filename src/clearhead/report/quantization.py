"""Records of `clearhead quantize`, one JSON object a line.

Kinds of line: `quantization`, a model and what it was measured on, and `scheme`, one result of it,
full precision first (its "scheme" is null). A line's `run` names the model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.records.files import write_text

KINDS = ("quantization", "scheme")
CLOSE = 0.01  # of full precision's perplexity


@dataclass(frozen=True, kw_only=True)
class Result:
    """One scheme on one model; `scheme` is None for full precision.

    Attributes:
        family, bits: its place in a figure; bits is None where it has none.
        perplexity, delta: None where it could not be measured, for the `reason`.
        accuracy, accuracy_normalised: None without questions; the latter, by characters, also where
            the lm-evaluation-harness has none.
        unused: layers quantised that no text went through.
    """

    scheme: str | None
    family: str | None
    bits: int | None
    perplexity: float | None
    delta: float | None
    accuracy: float | None
    accuracy_normalised: float | None
    reason: str | None
    unused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """One model, with its results in the order in which they were measured."""

    name: str
    header: dict[str, Any]
    results: dict[str | None, Result] = field(default_factory=dict)

    @property
    def full(self) -> Result:
        return self.results[None]

    def family(self, name: str) -> dict[int, Result]:
        """{bits: result} of a family, most bits first."""
        found = {r.bits: r for r in self.results.values() if r.family == name and r.bits}
        return dict(sorted(found.items(), reverse=True))

    def fewest_bits(self, family: str) -> int | None:
        """The fewest bits measured at which, and above which, perplexity is within `CLOSE` of full
        precision; None where there are none."""
        fewest, full = None, self.full.perplexity
        for bits, result in self.family(family).items():
            if full is None or result.perplexity is None or result.perplexity > full * (1 + CLOSE):
                break
            fewest = bits
        return fewest


def families(models: Sequence[Quantized]) -> list[str]:
    """The families that any of the models has a perplexity in, in the order in which the first
    tried them."""
    results = [r for model in models for r in model.results.values() if r.bits]
    found = {r.family for r in results if r.perplexity is not None}
    tried = (r.family for r in results if r.family)
    return list(dict.fromkeys(family for family in tried if family in found))


def schemes(models: Sequence[Quantized]) -> list[str]:
    """The schemes that any of the models was measured on, in order."""
    found = (name for model in models for name in model.results)
    return list(dict.fromkeys(name for name in found if name))


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add a model's lines to the file at `path`: all of them, or none.

    Raises:
        ClearheadError: the file cannot be written, or holds something else.
    """
    before = []
    if path.exists():
        load([path])
        before = jsonl.read(path)
    write_text(path, "".join(map(jsonl.encode, [*before, *lines])))


def load(paths: Sequence[Path]) -> list[Quantized]:
    """Models from files; of two of one name the later counts.

    Raises:
        ClearheadError: naming file and line, for anything that is not such a record.
    """
    models: dict[str, Quantized] = {}
    jsonl.each(paths, partial(_add, models), what="record of a quantisation")
    return _whole(models)


def parse(lines: Iterable[dict[str, Any]]) -> list[Quantized]:
    """Models from lines that are not in a file."""
    models: dict[str, Quantized] = {}
    for line in lines:
        _add(models, line)
    return _whole(models)


def _whole(models: dict[str, Quantized]) -> list[Quantized]:
    # Without full precision no other result says anything.
    for model in models.values():
        if None not in model.results:
            raise ClearheadError(f"{model.name} has no result in full precision")
    return list(models.values())


def _add(models: dict[str, Quantized], line: dict[str, Any]) -> None:
    kind = choose("kind", str(line["kind"]), KINDS)
    name = str(line["run"])
    if kind == "quantization":
        models[name] = Quantized(name=name, header=line)
        return
    if name not in models:
        raise ValueError(f'no line of kind "quantization" for {name!r} comes before it')
    result = Result(
        scheme=None if line["scheme"] is None else str(line["scheme"]),
        family=line.get("family"),
        bits=line.get("bits"),
        perplexity=_number(line["perplexity"]),
        delta=_number(line.get("delta")),
        accuracy=_number(line.get("accuracy")),
        accuracy_normalised=_number(line.get("accuracy_normalised")),
        reason=line.get("reason"),
        unused=tuple(line.get("unused", ())),
    )
    models[name].results[result.scheme] = result


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measured value")
    return number
