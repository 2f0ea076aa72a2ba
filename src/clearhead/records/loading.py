"""Records in files, to which lines are only appended, so that a stopped measurement resumes.

A file holds, one JSON object a line, `run` headers and under each name `measure` lines, besides
`step` (the training curve), `attention` (one map), `curve` (x and y), `channel` (an outlier),
`note` (a part that could not be measured) and `advice`. Lines of a sweep name their "cell", and
count once its closing line, of kind `cell`, is there; a later cell replaces an equal one.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
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
    pooled,
)

KINDS = (*("run", "step", "measure", "cell"), *("attention", "curve", "channel", "note", "advice"))
STUDIES = (COMPARISON, DIAGNOSIS, QUANTIZATION)
# Keys of a measure's line that are no details.
_IDENTITY = (*DIMENSIONS, DRAW, "kind", "run", "metric", "value")
# Settings by which two runs of one name are two; and two evaluations, where both have a number.
_SETTINGS = ("model", "train", "weights", "length", "tokens")
_OF_NUMBERS = ("data", "evaluation")
# A run of `clearhead compare` and its folder are named by arm and seed.
_SEED = re.compile(r"(?P<arm>.+)[-/]seed(?P<seed>\d+)")
Entry = tuple[Line, Measure | None]


def load(paths: Path | Iterable[Path]) -> Records:
    """Read records from one or more files, of any study.

    Of two lines about the same step, measure or map the later counts, and so of two runs of one
    arm, seed and label; an evaluation adds to the run's records. Where their settings differ, the
    file's name becomes the label. An unfinished last line is skipped.

    Raises:
        ClearheadError: a line that is not a record, by file and number; two diagnoses of one name;
            runs of one arm and label that differ in size, or in how they were trained.
    """
    files: dict[Path, list[Run]] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        lines = Lines()
        jsonl.each(path, lines.read)
        files[path] = lines.runs()
    return _joined(_told_apart(files))


def parse(lines: Iterable[Line]) -> Records:
    """Records from lines that are not in a file."""
    read = Lines()
    for line in lines:
        read.read(line)
    return read.records()


def _told_apart(files: dict[Path, list[Run]]) -> list[Run]:
    """The runs of all files, labelled by file where two hold one with other settings."""
    settings: dict[object, set[str]] = defaultdict(set)
    for run in (run for runs in files.values() for run in runs if run.study != DIAGNOSIS):
        place = run.study, _is_evaluated(run), run.label, run.arm, run.seed
        numbers = run.measures if _is_evaluated(run) else ()  # those that one has alone add up
        for key, wanted in (("", _SETTINGS), *((key, _OF_NUMBERS) for key in numbers)):
            chosen = [run.header.get(name) for name in wanted]
            settings[place, key].add(json.dumps(chosen, sort_keys=True))
    if all(len(one) < 2 for one in settings.values()):
        return [run for runs in files.values() for run in runs]
    names = [path.parent.name if path.stem == "records" else path.stem for path in files]
    if len({*names}) < len(names):
        names = [str(path) for path in files]
    return [
        replace(run, label=", ".join(filter(None, (name, run.label))))
        for name, runs in zip(names, files.values(), strict=True)
        for run in runs
    ]


def _joined(loaded: list[Run]) -> Records:
    """Records of runs, each arm, seed and label once: the later of two, of an evaluation both."""
    runs: dict[tuple[str, str, str, int], Run] = {}
    sizes: dict[tuple[str, str, str], str] = {}
    for run in sorted(loaded, key=_is_evaluated):
        place = run.study, run.label, run.arm, run.seed
        known = runs.get(place)
        if known and run.study == DIAGNOSIS:
            raise ClearheadError(f"a second diagnosis named {run.id!r}: give each its own name")
        if known and _is_evaluated(run):
            if run.header.get("train") != known.header.get("train"):
                both = f"{run.id} (evaluated) and {known.id} (trained) have one arm, seed and label"
                raise ClearheadError(f"{both} but different settings: report these files apart")
            payloads = dict(known.payloads)
            for kind, lines in run.payloads.items():
                payloads[kind] = [*payloads.get(kind, ()), *lines]
            run = replace(known, measures=known.measures | run.measures, payloads=payloads)
        runs[place] = run
    for run in runs.values():
        size = str(run.header.get("size", ""))
        first = sizes.setdefault((run.study, run.label, run.arm), size)
        if first != size:
            both = f"{run.arm} is recorded at sizes {first!r} and {size!r} under one label"
            raise ClearheadError(f"{both} ({run.label!r}): give the sizes labels of their own")
    return Records(runs=tuple(runs.values()))


def _is_evaluated(run: Run) -> bool:
    return "evaluation" in run.header and "arm" not in run.header


class Lines:
    """Lines of one file to runs; `headers` has the latest of each run, by its name."""

    def __init__(self) -> None:
        self.headers: dict[str, Line] = {}
        # By run, and by place of a cell or of a loose line: the entries that count, by cell.
        self._places: dict[str, dict[object, dict[str, list[Entry]]]] = {}
        self._unclosed: dict[tuple[str, str], list[Entry]] = defaultdict(list)

    def read(self, line: Line) -> None:
        """Add a line."""
        kind = choose("kind", str(line["kind"]), KINDS)
        run, cell = str(line["run"]), str(line.get("cell", ""))
        known = self.headers.get(run)
        if kind == "run":
            _run(run, line)
            if known is None or not _goes_on(line, known):
                self._places[run] = {}
            self.headers[run] = line
            return
        if known is None:
            raise ValueError(f'no line of kind "run" for {run!r} comes before it')
        entry = line, _measure(line) if kind == "measure" else None
        places = self._places[run]
        if kind != "cell":
            if cell:
                self._unclosed[run, cell].append(entry)
            else:
                places[object()] = {"": [entry]}
            return
        entries = self._unclosed.pop((run, cell), [])
        start = len(entries) - line["lines"]  # those of a write that was cut short come first
        if start >= 0:
            # A cell, named by its setting and draw, replaces those measured under another setting.
            place = json.dumps([line["task"], line["at"]], sort_keys=True)
            setting = cell.partition("-")[0]
            if any(one.partition("-")[0] != setting for one in places.get(place, ())):
                del places[place]
            places.setdefault(place, {})[cell] = [*entries[start:], entry]

    def runs(self) -> list[Run]:
        """The runs, with all that counts."""
        runs = [_run(name, header) for name, header in self.headers.items()]
        for run in runs:
            for cells in self._places[run.id].values():
                for line, measure in (entry for entries in cells.values() for entry in entries):
                    _add(run, line, measure)
        return runs

    def records(self) -> Records:
        """Records of all lines that count."""
        return _joined(self.runs())


def _add(run: Run, line: Line, measure: Measure | None) -> None:
    kind = line["kind"]
    if measure is not None:
        if DRAW in line:
            known = run.measures.get(measure.key)
            measure = pooled({**(known.draws if known else {}), line[DRAW]: measure})
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
    preset, label = str(header.get("preset", arm)), str(header.get("label", ""))
    return Run(id=name, arm=arm, preset=preset, label=label, seed=seed, study=study, header=header)


def _goes_on(header: Line, old: Line) -> bool:
    """True if `header` resumes the run `old`: one model, and one text if it is a quantisation."""
    weights = {header.get("weights"), old.get("weights")} - {None}
    if len(weights) == 2 or header.get("study") != QUANTIZATION:
        return len(weights) < 2
    text, before = ((one.get("data") or {}).get("fingerprint") for one in (header, old))
    return text == before and all(header.get(key) == old.get(key) for key in ("length", "tokens"))


def _measure(line: Line) -> Measure:
    dimensions = {name: line[name] for name in DIMENSIONS if line.get(name) is not None}
    details = {name: item for name, item in line.items() if name not in _IDENTITY}
    for name in ("interval", "items"):
        if details.get(name) is not None:
            details[name] = [_number(one) for one in details[name]]
            if None in details[name]:  # one that was not finite
                del details[name]
    if (ends := details.get("interval")) is not None and len(ends) != 2:
        raise ValueError(f"an interval has two ends, found {len(ends)}")
    metric, value = str(line["metric"]), _number(line["value"])
    return Measure(metric=metric, value=value, dimensions=dimensions, details=details)


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measured value")
    return number


class Store(Lines):
    """Records of one study in a file, or in memory, to which each cell is appended in one write."""

    def __init__(self, path: Path | None, study: str = COMPARISON) -> None:
        super().__init__()
        self.path, self.study = path, study
        self._begun = set[str]()
        if path is not None and path.exists():
            jsonl.each(path, self.read)
            if others := {_run(name, line).study for name, line in self.headers.items()} - {study}:
                study = f"another study ({others.pop()})"
                raise ClearheadError(f"{path} holds records of {study}: name another")

    def has(self, cell: str, header: Line) -> bool:
        """True if the result of a cell is there, and counts beside others of the run's `header`."""
        known = self.headers.get(header["run"])
        return bool(known and self.rows(cell, header) and _goes_on(header, known))

    def rows(self, cell: str, header: Line) -> list[Line]:
        """The rows of a result and its closing line, as they are read from the file."""
        cells = self._places.get(header["run"], {}).values()
        entries = next((one[cell] for one in cells if cell in one), [])
        return [line for line, _ in entries]

    def add(self, cell: str, header: Line, rows: Iterable[Line], **closing: object) -> list[Line]:
        """Append a result; return its `rows` with the closing line, which has `closing` facts."""
        run = header["run"]
        name = {"run": run, "cell": cell}
        lines = [{"kind": "measure", **line, **name} for line in rows]
        lines.append({"kind": "cell", **name, "task": "", "at": {}, "lines": len(lines), **closing})
        if run not in self._begun:
            lines.insert(0, {"kind": "run", **header})
            self._begun.add(run)
        lines = [json.loads(jsonl.encode(line)) for line in lines]
        for line in lines:
            self.read(line)
        if self.path is not None:
            jsonl.append(self.path, *lines)
        return [line for line in lines if line["kind"] != "run"]
