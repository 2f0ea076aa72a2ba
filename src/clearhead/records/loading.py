"""Lines of records to runs and measures, and their writing.

A file holds, a JSON object a line, `run` headers and under each name `measure` lines, besides the
payloads that are no single number: `step` (the training curve), `attention` (one map), `curve` (x
and y), `channel` (an outlier), `note` (a part that could not be measured) and `advice`. Lines of a
sweep name their "cell", and count once the line of kind `cell` that closes it is there: the latest
cell of a place counts, under each draw. Older forms are refused; tools/migrate_records.py in the
repository converts them.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.records.cells import pooled, setting_of, whole
from clearhead.records.runs import (
    COMPARISON,
    DIAGNOSIS,
    DIMENSIONS,
    DRAW,
    QUANTIZATION,
    Line,
    Measure,
    Records,
    Run,
)
from clearhead.records.shapes import check_line

PAYLOADS = ("curve", "channel", "note", "advice")
KINDS = ("run", "step", "measure", "attention", "cell", *PAYLOADS)
STUDIES = (COMPARISON, DIAGNOSIS, QUANTIZATION)
_OLDER = (DIAGNOSIS, QUANTIZATION, "scheme")
# Keys of a measure's line that are no details.
_IDENTITY = (*DIMENSIONS, DRAW, "kind", "run", "metric", "value")
# Keys of a header's model that are no settings of it.
_OF_ONE_MODEL = ("from", "_name_or_path", "architectures", "dtype", "transformers_version")
# A folder of `clearhead compare` is named by its arm and seed.
_SEED = re.compile(r"(?P<arm>.+)[-/]seed(?P<seed>\d+)")


def as_line(record: Line) -> str:
    """A record as its line, newline and all; see `jsonl.encode`.

    Raises:
        ClearheadError: the record has no known "kind" or no "run".
    """
    choose("kind of record", str(record.get("kind")), KINDS)
    if not isinstance(record.get("run"), str):
        raise ClearheadError(f'a record needs the name of its "run", found {record.get("run")!r}')
    return jsonl.encode(record)


def append(path: Path, *records: Line) -> None:
    """Append the lines of records to `path`; see `jsonl.append`.

    Raises:
        ClearheadError: as `as_line`, or the file cannot be written.
    """
    for record in records:
        as_line(record)
    jsonl.append(path, *records)


def load(paths: Path | Iterable[Path]) -> Records:
    """Read records from one or more files, of any study.

    A last line without its end, as an interrupted run leaves it, is skipped. Of two lines about
    the same step, measure or map the later counts, and so of two runs of one arm, seed, label.

    An evaluation of a run beside that run's own records adds to them.

    Raises:
        ClearheadError: naming file and line, for anything else that is not a record; two diagnoses
            of one name.
    """
    runs: list[Run] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        reader = _Reader()
        jsonl.each([path], reader.add)
        runs += reader.runs()
    return _records(runs)


def parse(lines: Iterable[Line]) -> Records:
    """Records from lines that are not in a file."""
    reader = _Reader()
    for line in lines:
        reader.add(line)
    return _records(reader.runs())


def _records(loaded: list[Run]) -> Records:
    runs: dict[tuple[str, str, int], Run] = {}
    sizes: dict[tuple[str, str], str] = {}
    for run in _told_apart(_joined(loaded)):
        place = run.label, run.arm, run.seed
        if run.study == DIAGNOSIS and place in runs:
            raise ClearheadError(
                f"a second diagnosis named {run.id!r}: give each a name of its own"
            )
        if place in runs and _is_evaluated(run) != _is_evaluated(runs[place]):
            raise ClearheadError(
                f"{run.id} was evaluated and {runs[place].id} trained, under other settings but "
                "as one arm, seed and label: report these files apart"
            )
        runs[place] = run
        size = str(run.header.get("size", ""))
        known = sizes.setdefault((run.label, run.arm), size)
        if known != size:
            raise ClearheadError(
                f"{run.arm} is recorded at sizes {known!r} and {size!r} under one label "
                f"({run.label!r}): give the sizes labels of their own"
            )
    return Records(runs=tuple(runs.values()))


def _joined(runs: list[Run]) -> list[Run]:
    """The runs, each with the measures of its evaluations in other files."""
    joined = [run for run in runs if not _is_evaluated(run)]
    for run in filter(_is_evaluated, runs):
        trained = [
            place
            for place, one in enumerate(joined)
            if one.study == COMPARISON and not _is_evaluated(one)
            if (one.id, one.seed) == (run.id, run.seed)
            if one.header.get("train") == run.header.get("train")
        ]
        if len(trained) == 1:
            one = joined[trained[0]]
            payloads = {
                kind: [*one.payloads.get(kind, []), *run.payloads.get(kind, [])]
                for kind in {*one.payloads, *run.payloads}
            }
            joined[trained[0]] = replace(
                one, measures={**one.measures, **run.measures}, payloads=payloads
            )
        else:
            joined.append(run)
    return joined


def _told_apart(runs: list[Run]) -> list[Run]:
    """Evaluated runs of a preset, whose headers name no arm: one arm where they differ in their
    seeds alone, else each by its own name."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in filter(_is_evaluated, runs):
        groups.setdefault((run.label, run.arm), []).append(run)
    mixed = {
        place
        for place, group in groups.items()
        if len({*map(_settings, group)}) > 1
        or len({run.seed for run in group}) < len({run.id for run in group})
    }
    return [
        replace(run, arm=run.id) if _is_evaluated(run) and (run.label, run.arm) in mixed else run
        for run in runs
    ]


def _is_evaluated(run: Run) -> bool:
    return "evaluation" in run.header and "arm" not in run.header


def _settings(run: Run) -> str:
    """Settings of a model and of its training, but for its seed, its place and its library."""
    model, train = (run.header.get(name) or {} for name in ("model", "train"))
    kept = {key: value for key, value in model.items() if key not in _OF_ONE_MODEL}
    return json.dumps([kept, {**train, "seed": None}], sort_keys=True)


Entry = tuple[Line, Measure | None]


@dataclass
class _Lines:
    """Lines under one run's name.

    Attributes:
        entries: what counts, in order: loose lines one by one, and those of a cell's place by cell.
        unclosed: lines of cells whose closing line is still to come.
    """

    header: Line
    entries: dict[str | int, dict[str, list[Entry]]] = field(default_factory=dict)
    unclosed: dict[str, list[Entry]] = field(default_factory=dict)
    count: int = 0

    def add(self, line: Line) -> None:
        entry = line, _measure(line) if line["kind"] == "measure" else None
        cell = str(line.get("cell", ""))
        if line["kind"] == "cell":
            lines = whole(self.unclosed.pop(cell, []), line)
            if lines is None:
                return
            place = json.dumps([line["task"], line["at"]], sort_keys=True)
            setting = setting_of(line)
            if any(setting_of({"cell": one}) != setting for one in self.entries.get(place, ())):
                del self.entries[place]  # of other settings
            self.entries.setdefault(place, {})[cell] = [*lines, entry]
        elif cell:
            self.unclosed.setdefault(cell, []).append(entry)
        else:
            self.count += 1
            self.entries[self.count] = {"": [entry]}

    def run(self, name: str) -> Run:
        """The run, with all that counts."""
        run = _run(name, self.header)
        for cells in self.entries.values():
            for entries in cells.values():
                for line, measure in entries:
                    _take(run, line, measure)
        return run


class _Reader:
    """Lines of one file to runs."""

    def __init__(self) -> None:
        self._lines: dict[str, _Lines] = {}

    def add(self, line: Line) -> None:
        """Add a line."""
        kind = str(line["kind"])
        if kind in _OLDER or (kind == "cell" and "result" in line):
            raise ValueError(
                "its form is an older clearhead's: tools/migrate_records.py of the repository "
                "converts the file"
            )
        choose("kind", kind, KINDS)
        check_line(line)
        name = str(line["run"])
        known = self._lines.get(name)
        if kind == "run":
            _run(name, line)
            if known is not None and _goes_on(line, known.header):
                known.header = line
            else:
                self._lines[name] = _Lines(line)
        elif known is None:
            raise ValueError(f'no line of kind "run" for {name!r} comes before it')
        else:
            known.add(line)

    def runs(self) -> list[Run]:
        """The runs, in the order of their first lines."""
        return [lines.run(name) for name, lines in self._lines.items()]


def _take(run: Run, line: Line, measure: Measure | None) -> None:
    kind = line["kind"]
    if measure is not None:
        if DRAW in line:
            measure = pooled(measure, line[DRAW], run.measures.get(measure.key))
        run.measures[measure.key] = measure
    elif kind == "step":
        # After a resume the steps since the last checkpoint are recorded again.
        while run.steps and run.steps[-1]["step"] >= line["step"]:
            run.steps.pop()
        run.steps.append(line)
    elif kind == "attention":
        run.attention[int(line["layer"]), int(line["head"]), str(line["map"])] = line
    else:
        run.payloads.setdefault(kind, []).append(line)


def _run(name: str, header: Line) -> Run:
    study = choose("study", str(header.get("study", COMPARISON)), STUDIES)
    if study == COMPARISON:
        arm, seed = str(header.get("arm", header["preset"])), int(header["seed"])
    elif (named := _SEED.fullmatch(name)) is not None:
        arm, seed = named["arm"], int(named["seed"])
    else:
        arm, seed = name, 0
    return Run(
        id=name,
        arm=arm,
        preset=str(header.get("preset", arm)),
        label=str(header.get("label", "")),
        seed=seed,
        study=study,
        header=header,
    )


def _goes_on(header: Line, old: Line) -> bool:
    """True of the header of a resumed run, whose measures stay. Another model that is measured
    under the same name replaces the first one's results, and so does another text of a
    quantisation, for what schemes add is a difference on one text."""
    weights = header.get("weights"), old.get("weights")
    if header.get("study", COMPARISON) == COMPARISON:
        # A rope scaling changes the weights, which are those of a model's first variant.
        sources = [(one.get("model") or {}).get("from") for one in (header, old)]
        evaluated = all("evaluation" in one for one in (header, old))
        named = None not in (*weights, *sources)
        return not (evaluated and named and len({*weights}) == len({*sources}) == 2)
    if header["study"] == QUANTIZATION and _text(header) != _text(old):
        return False
    return weights[0] is not None and weights[0] == weights[1]


def _text(header: Line) -> Line:
    """The text on which a header's schemes were measured."""
    read = (header.get("data") or {}).get("fingerprint")
    return {"read": read, "length": header.get("length"), "tokens": header.get("tokens")}


def _measure(line: Line) -> Measure:
    value = _number(line["value"])
    dimensions = {name: line[name] for name in DIMENSIONS if line.get(name) is not None}
    details = {name: item for name, item in line.items() if name not in _IDENTITY}
    for name in ("interval", "items"):
        if details.get(name) is not None:
            details[name] = [_number(one) for one in details[name]]
            if None in details[name]:  # one that was not finite
                del details[name]
    if details.get("interval") is not None and len(details["interval"]) != 2:
        raise ValueError(f"an interval has two ends, found {len(details['interval'])}")
    return Measure(metric=str(line["metric"]), value=value, dimensions=dimensions, details=details)


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measured value")
    return number
