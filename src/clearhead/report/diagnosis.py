"""Records of a diagnosis: what `clearhead diagnose` writes, one JSON object a line, and reads.

Kinds of line: `diagnosis` (the model, the text and how it was read), `measure` (one number with its
dimensions), `curve` (x and y), `channel` (an outlier), `note` (what could not be measured, and why)
and `advice`. A line's `run` names the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.errors import choose
from clearhead.records import jsonl

KINDS = ("diagnosis", "measure", "curve", "channel", "note", "advice")
DIMENSIONS = ("map", "tokens", "layer", "head")
INPUT = -1  # the layer number of the stream before the first block


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """One model's diagnosis, as its records say."""

    name: str
    header: dict[str, Any]
    measures: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)
    channels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    advice: list[dict[str, Any]] = field(default_factory=list)

    def value(self, metric: str, **dimensions: Any) -> float | None:
        """The measure at exactly these dimensions; None where it was not taken or is not a
        number."""
        line = self.measures.get((metric, *(dimensions.get(name) for name in DIMENSIONS)))
        return None if line is None else line["value"]

    def by_layer(self, metric: str, **dimensions: Any) -> dict[int, float]:
        """{layer: value}, without the layers that have none."""
        found = {}
        for line in self.measures.values():
            if line["metric"] != metric or "layer" not in line or line["value"] is None:
                continue
            rest = {name: line.get(name) for name in DIMENSIONS if name != "layer"}
            if rest == {name: dimensions.get(name) for name in rest}:
                found[int(line["layer"])] = line["value"]
        return dict(sorted(found.items()))

    def maps(self) -> list[str]:
        """The names of the attention maps measured, in order."""
        metric = "first_token_argmax_share"
        lines = self.measures.values()
        return list(dict.fromkeys(line["map"] for line in lines if line["metric"] == metric))

    def found(self, curve: str) -> list[dict[str, Any]]:
        """The curves of that name."""
        return [line for line in self.curves if line["curve"] == curve]


def encode(records: Iterable[dict[str, Any]]) -> str:
    """The text of a file of records; see `jsonl.encode`."""
    lines = []
    for record in records:
        choose("kind of record", str(record.get("kind")), KINDS)
        lines.append(jsonl.encode(record))
    return "".join(lines)


def load_diagnoses(paths: Sequence[Path]) -> list[Diagnosed]:
    """Read diagnoses from files.

    Raises:
        ClearheadError: naming file and line, for anything that is not a record of a diagnosis, or
            two of one name.
    """
    found: dict[str, Diagnosed] = {}
    jsonl.each(paths, partial(_add, found), what="record of a diagnosis")
    return list(found.values())


def _add(found: dict[str, Diagnosed], record: dict[str, Any]) -> None:
    kind = choose("kind", str(record["kind"]), KINDS)
    name = str(record["run"])
    if kind == "diagnosis":
        if name in found:
            raise ValueError(f"a second diagnosis named {name!r}")
        found[name] = Diagnosed(name=name, header=record)
        return
    if name not in found:
        raise ValueError(f'no line of kind "diagnosis" for {name!r} comes before it')
    one = found[name]
    if kind == "measure":
        record["value"] = None if record["value"] is None else float(record["value"])
        key = (str(record["metric"]), *(record.get(dimension) for dimension in DIMENSIONS))
        one.measures[key] = record
    elif kind == "curve":
        if len(record["x"]) != len(record["y"]):
            raise ValueError(f"{len(record['x'])} x and {len(record['y'])} y")
        one.curves.append(record)
    else:
        {"channel": one.channels, "note": one.notes, "advice": one.advice}[kind].append(record)
