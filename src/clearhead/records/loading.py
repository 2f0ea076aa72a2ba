"""Reading of records as runs and measures, and their writing: a stopped measurement resumes from
the file of its results, to which lines are only appended.

A file holds, a JSON object a line, `run` headers and under each name `measure` lines, besides the
payloads that are no single number: `step` (the training curve), `attention` (one map), `curve` (x
and y), `channel` (an outlier), `note` (a part that could not be measured) and `advice`. Lines of a
sweep name their "cell", and count once the line of kind `cell` that closes it is there: the latest
cell of a place counts, under each draw. Older forms are refused.
"""

import json
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.records.cells import pooled
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

KINDS = (*("run", "step", "measure", "cell"), *("attention", "curve", "channel", "note", "advice"))
STUDIES = (COMPARISON, DIAGNOSIS, QUANTIZATION)
_OLDER = (DIAGNOSIS, QUANTIZATION, "scheme")
# Keys of a measure's line that are no details.
_IDENTITY = (*DIMENSIONS, DRAW, "kind", "run", "metric", "value")
# Settings by which two runs of one name are two; and two evaluations, where both have a number.
_SETTINGS = ("model", "train", "weights", "length", "tokens")
_OF_NUMBERS = ("data", "evaluation")
# A run of `clearhead compare` and its folder are named by arm and seed.
_SEED = re.compile(r"(?P<arm>.+)[-/]seed(?P<seed>\d+)")


def load(paths: Path | Iterable[Path]) -> Records:
    """Read records from one or more files, of any study.

    A last line without its end, as an interrupted run leaves it, is skipped. Of two lines about
    the same step, measure or map the later counts, and so of two runs of one arm, seed, label.

    An evaluation of a run beside that run's own records, or beside another evaluation, adds to
    them. Where files have runs of one arm, seed and label with different settings, the file's name
    becomes the label.

    Raises:
        ClearheadError: naming file and line, for anything else that is not a record; two diagnoses
            of one name.
    """
    files: list[tuple[Path, list[Run]]] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        reader = Reader()
        jsonl.each(path, reader.add)
        with trusted(path):
            files.append((path, reader.runs()))
    with trusted(*(path for path, _ in files)):
        return records_of(_told_apart(files))


@contextmanager
def trusted(*paths: Path) -> Iterator[None]:
    """Turn errors of the body that wrongly typed values in these files cause into one line; without
    files nothing is caught.

    Raises:
        ClearheadError: naming the files.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not paths:  # what was just measured
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ClearheadError(
            f"{', '.join(map(str, paths))}: a value has another type than its key asks for, or "
            f"clearhead has a fault ({type(error).__name__}: {error}, {Path(place.filename).name} "
            f"line {place.lineno}): restore the file if it was changed"
        ) from error


def _told_apart(files: list[tuple[Path, list[Run]]]) -> list[Run]:
    """The runs of all files, labelled by file where two hold one with other settings."""
    settings: dict[tuple[object, ...], set[str]] = {}
    for run in (run for _, runs in files for run in runs if run.study != DIAGNOSIS):
        place = run.study, _is_evaluated(run), run.label, run.arm, run.seed
        numbers = run.measures if _is_evaluated(run) else [None]  # those that one has alone add up
        for key, wanted in [("", _SETTINGS), *((key, _OF_NUMBERS) for key in numbers)]:
            chosen = json.dumps([run.header.get(name) for name in wanted], sort_keys=True)
            settings.setdefault((*place, key), set()).add(chosen)
    if all(len(one) < 2 for one in settings.values()):
        return [run for _, runs in files for run in runs]
    names = [path.parent.name if path.stem == "records" else path.stem for path, _ in files]
    if len({*names}) < len(names):
        names = [str(path) for path, _ in files]
    return [
        replace(run, label=", ".join(filter(None, (name, run.label))))
        for name, (_, runs) in zip(names, files, strict=True)
        for run in runs
    ]


def parse(lines: Iterable[Line]) -> Records:
    """Records from lines that are not in a file."""
    reader = Reader()
    for line in lines:
        reader.add(line)
    return records_of(reader.runs())


def records_of(loaded: list[Run]) -> Records:
    """Records of runs, each arm, seed and label once; raises as `load`."""
    runs: dict[tuple[str, str, str, int], Run] = {}
    sizes: dict[tuple[str, str, str], str] = {}
    for run in sorted(loaded, key=_is_evaluated):
        place = str(run.study), run.label, run.arm, run.seed
        known = runs.get(place)
        if run.study == DIAGNOSIS and known is not None:
            raise ClearheadError(
                f"a second diagnosis named {run.id!r}: give each a name of its own"
            )
        if known is not None and _is_evaluated(run):
            if run.header.get("train") != known.header.get("train"):
                raise ClearheadError(
                    f"{run.id} (evaluated) and {known.id} (trained) have one arm, seed and label "
                    "but different settings: report these files apart"
                )
            kinds = {**known.payloads, **run.payloads}
            both = {
                kind: known.payloads.get(kind, []) + run.payloads.get(kind, []) for kind in kinds
            }
            run = replace(known, measures=known.measures | run.measures, payloads=both)
        runs[place] = run
    for run in runs.values():
        size = str(run.header.get("size", ""))
        first = sizes.setdefault((run.study, run.label, run.arm), size)
        if first != size:
            raise ClearheadError(
                f"{run.arm} is recorded at sizes {first!r} and {size!r} under one label "
                f"({run.label!r}): give the sizes labels of their own"
            )
    return Records(runs=tuple(runs.values()))


def _is_evaluated(run: Run) -> bool:
    return "evaluation" in run.header and "arm" not in run.header


Entry = tuple[Line, Measure | None]


class Reader:
    """Lines of one file to runs.

    Attributes:
        headers: the latest line of each run, by its name.
    """

    def __init__(self) -> None:
        self.headers: dict[str, Line] = {}
        self._entries: dict[str, list[Entry]] = {}

    def add(self, line: Line) -> None:
        """Add a line."""
        kind = str(line["kind"])
        if kind in _OLDER or (kind == "cell" and "result" in line):
            raise ValueError("its form is an older clearhead's: measure again, to another file")
        choose("kind", kind, KINDS)
        name = str(line["run"])
        known = self.headers.get(name)
        if kind == "run":
            _run(name, line)
            if known is None or not goes_on(line, known):
                self._entries[name] = []
            self.headers[name] = line
        elif known is None:
            raise ValueError(f'no line of kind "run" for {name!r} comes before it')
        else:
            self._entries[name].append((line, _measure(line) if kind == "measure" else None))

    def runs(self) -> list[Run]:
        """The runs, with all that counts."""
        runs = []
        for name, header in self.headers.items():
            runs.append(_run(name, header))
            for line, measure in _counting(self._entries[name]):
                _take(runs[-1], line, measure)
        return runs

    def counting(self, run: str) -> Iterator[Line]:
        """The lines of a run that count."""
        return (line for line, _ in _counting(self._entries[run]))


def _counting(entries: list[Entry]) -> Iterator[Entry]:
    """The entries that count: loose ones, and those of the latest closed cell of each place and
    draw, where the place was first met."""
    found: dict[str | int, dict[str, list[Entry]]] = {}
    unclosed: dict[str, list[Entry]] = {}
    for number, entry in enumerate(entries):
        line, cell = entry[0], str(entry[0].get("cell", ""))
        if line["kind"] == "cell":
            lines = unclosed.pop(cell, [])
            start = len(lines) - line["lines"]  # those of a write that was cut short come first
            if start < 0:
                continue
            lines = lines[start:]
            place = json.dumps([line["task"], line["at"]], sort_keys=True)
            setting = cell.partition("-")[0]  # without its draw
            if any(one.partition("-")[0] != setting for one in found.get(place, ())):
                del found[place]
            found.setdefault(place, {})[cell] = [*lines, entry]
        elif cell:
            unclosed.setdefault(cell, []).append(entry)
        else:
            found[number] = {"": [entry]}
    for cells in found.values():
        for lines in cells.values():
            yield from lines


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
    else:
        run.payloads.setdefault(kind, []).append(line)


def _run(name: str, header: Line) -> Run:
    study = choose("study", str(header.get("study", COMPARISON)), STUDIES)
    named = _SEED.fullmatch(name)
    arm, seed = (named["arm"], int(named["seed"])) if named else (name, 0)
    if study == COMPARISON:
        usual = arm if "evaluation" in header else header["preset"]
        arm, seed = str(header.get("arm", usual)), int(header["seed"])
    return Run(
        id=name,
        arm=arm,
        preset=str(header.get("preset", arm)),
        label=str(header.get("label", "")),
        seed=seed,
        study=study,
        header=header,
    )


def goes_on(header: Line, old: Line) -> bool:
    """True if `header` resumes the run `old`, whose measures are then kept. Another model measured
    under the same name replaces the first one's results, and so does another text of a
    quantisation, since costs of schemes are differences on one text."""
    weights = {header.get("weights"), old.get("weights")} - {None}
    one, other = (
        ((at.get("data") or {}).get("fingerprint"), at.get("length"), at.get("tokens"))
        for at in (header, old)
    )
    return len(weights) < 2 and (header.get("study") != QUANTIZATION or one == other)


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


class Store:
    """Records of one study in a file, to which each result is appended in one write.

    A result is the rows of one cell of a run and the line of kind "cell" that closes them. Without
    that line, as a kill leaves it, the rows do not count. Another process must not append.

    Args:
        path: of the file, which is made with the first result; None keeps results in memory.

    Raises:
        ClearheadError: naming file and line, for what is no record; for records of another study.
    """

    def __init__(self, path: Path | None, study: str = COMPARISON) -> None:
        self.path = path
        self._reader = Reader()
        self._rows: dict[tuple[str, str], list[Line]] = {}
        self._begun = set[str]()
        if path is None or not path.exists():
            return
        jsonl.each(path, self._reader.add)
        with trusted(path):
            if others := {run.study for run in self._reader.runs()} - {study}:
                raise ClearheadError(
                    f"{path} holds records of another study ({others.pop()}): name another"
                )
            for run in self._reader.headers:
                for line in self._reader.counting(run):
                    if "cell" in line:
                        self._rows.setdefault((run, str(line["cell"])), []).append(line)

    @property
    def headers(self) -> Mapping[str, Line]:
        """The latest line of each run, by its name."""
        return self._reader.headers

    def has(self, cell: str, header: Line) -> bool:
        """True if the result of a cell is there, and counts beside others of the run's `header`."""
        run = header["run"]
        if (run, cell) not in self._rows:
            return False
        with trusted(*([self.path] if self.path else [])):
            return goes_on(header, self._reader.headers[run])

    def rows(self, cell: str, header: Line) -> list[Line]:
        """The rows of a result and its closing line, as they are read from the file."""
        return self._rows[header["run"], cell]

    def add(self, cell: str, header: Line, rows: Iterable[Line], **closing: object) -> list[Line]:
        """Append a result; return its `rows` with the closing line.

        Args:
            cell: identifies the result within its run.
            header: line of the run, "run" its name; written before the first result that is added.
            rows: payloads of records; each gets the names of its run and cell.
            closing: facts of the closing line: "task", "at" and how the result was made.
        """
        run = header["run"]
        name = {"run": run, "cell": cell}
        lines = [{"kind": "measure", **line, **name} for line in rows]
        lines.append({"kind": "cell", **name, "task": "", "at": {}, "lines": len(lines), **closing})
        if run not in self._begun:
            lines.insert(0, {"kind": "run", **header})
            self._begun.add(run)
        lines = [json.loads(jsonl.encode(line)) for line in lines]
        for line in lines:
            self._reader.add(line)
        if self.path is not None:
            jsonl.append(self.path, *lines)
        self._rows[run, cell] = [line for line in lines if line["kind"] != "run"]
        return self._rows[run, cell]

    def records(self) -> Records:
        """All that counts."""
        return records_of(self._reader.runs())
