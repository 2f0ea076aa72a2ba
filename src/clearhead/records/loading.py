"""Lines of records to runs and measures, and their writing.

A file holds, a JSON object a line, `run` headers and under each name `measure` lines, besides the
payloads that are no single number: `step` (the training curve), `attention` (one map), `curve` (x
and y), `channel` (an outlier), `note` (what could not be measured) and `advice`. Lines of a sweep
name their "cell", and count once the line of kind `cell` that closes it is there: those of an
earlier measurement of the same cell count no more. Lines of before are converted here: the headers
`diagnosis` and `quantization`, `scheme`, one result of a quantisation, and cells with a "result".
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.records import jsonl
from clearhead.records.cells import lines_of, pooled, setting_of, whole
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
_OLD = (DIAGNOSIS, QUANTIZATION, "scheme")
_HEADERS = ("run", DIAGNOSIS, QUANTIZATION)
# Of a model in a header: what says nothing on its settings.
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
    """Read records from one or more files, of any study and of any version.

    A last line without its end, as an interrupted run leaves it, is skipped. Of two lines about
    the same step, measure or map the later counts, and so of two runs of one arm, seed, label.

    An evaluation of a run beside that run's own records adds to them.

    Raises:
        ClearheadError: naming file and line, for anything else that is not a record; two diagnoses
            of one name.
    """
    files = []
    for path in [paths] if isinstance(paths, Path) else paths:
        reader = _Reader()
        jsonl.each([path], reader.add)
        files.append(reader.runs.values())
    return _records(run for runs in files for run in runs)


def parse(lines: Iterable[Line]) -> Records:
    """Records from lines that are not in a file."""
    reader = _Reader()
    for line in lines:
        reader.add(line)
    return _records(reader.runs.values())


def _records(found: Iterable[Run]) -> Records:
    runs: dict[tuple[str, str, int], Run] = {}
    sizes: dict[tuple[str, str], str] = {}
    for run in _told_apart(_joined(list(found))):
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
    """The runs, each with what evaluations in other files measured of it."""
    found = [run for run in runs if not _is_evaluated(run)]
    for run in filter(_is_evaluated, runs):
        own = [place for place, one in enumerate(found) if _is_training_of(one, run)]
        if len(own) == 1:
            found[own[0]] = _with_measures_of(run, found[own[0]])
        else:
            found.append(run)
    return found


def _is_training_of(run: Run, evaluated: Run) -> bool:
    return (
        run.study == COMPARISON
        and not _is_evaluated(run)
        and (run.id, run.seed) == (evaluated.id, evaluated.seed)
        and run.header.get("train") == evaluated.header.get("train")
    )


def _with_measures_of(evaluated: Run, run: Run) -> Run:
    kinds = {*run.payloads, *evaluated.payloads}
    payloads = {
        kind: [*run.payloads.get(kind, []), *evaluated.payloads.get(kind, [])] for kind in kinds
    }
    return replace(run, measures={**run.measures, **evaluated.measures}, payloads=payloads)


def _told_apart(runs: list[Run]) -> list[Run]:
    """Evaluated runs of a preset, whose headers name no arm: one arm where they differ in their
    seeds alone, else each by its own name."""
    alike: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if _is_evaluated(run):
            alike.setdefault((run.label, run.arm), []).append(run)
    several = {
        place
        for place, ones in alike.items()
        if len({*map(_settings, ones)}) > 1
        or len({run.seed for run in ones}) < len({run.id for run in ones})
    }
    return [
        replace(run, arm=run.id) if _is_evaluated(run) and (run.label, run.arm) in several else run
        for run in runs
    ]


def _is_evaluated(run: Run) -> bool:
    return "evaluation" in run.header and "arm" not in run.header


def _settings(run: Run) -> str:
    """Settings of a model and of its training, but for its seed, its place and its library."""
    model, train = (run.header.get(name) or {} for name in ("model", "train"))
    kept = {key: value for key, value in model.items() if key not in _OF_ONE_MODEL}
    return json.dumps([kept, {**train, "seed": None}], sort_keys=True)


class _Reader:
    """Lines of one file to runs."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self._open: dict[tuple[str, str], list[Line]] = {}  # lines of cells not closed yet
        self._settings: dict[tuple[str, str], str] = {}  # those that count, by run and place

    def add(self, line: Line) -> None:
        """Add a line."""
        kind = choose("kind", str(line["kind"]), (*KINDS, *_OLD))
        check_line(line)
        name = str(line["run"])
        if kind in _HEADERS:
            self.runs[name] = _run(name, line, self.runs.get(name))
            return
        if name not in self.runs:
            raise ValueError(f'no line of kind "run" for {name!r} comes before it')
        run = self.runs[name]
        if kind == "cell":
            self._close(run, line)
        elif "cell" in line:
            self._open.setdefault((name, str(line["cell"])), []).append(line)
        else:
            _take(run, line)

    def _close(self, run: Run, line: Line) -> None:
        if "result" in line:
            lines = list(_of_old_cell(line))
        else:
            cell, setting = str(line["cell"]), setting_of(line)
            found = whole(self._open.pop((run.id, cell), []), line)
            if found is None:
                return
            lines = found
            place = run.id, json.dumps([line["task"], line["at"]], sort_keys=True)
            before = self._settings.get(place)
            if before is not None:
                for payloads in run.payloads.values():
                    payloads[:] = [x for x in payloads if not _replaced(x, cell, setting, before)]
                for key, measure in [*run.measures.items()]:
                    if setting != before and setting_of(measure.details) == before:
                        del run.measures[key]
            self._settings[place] = setting
        for one in lines:
            _take(run, one)
        run.payloads.setdefault("cell", []).append(line)


def _replaced(line: Line, cell: str, setting: str, before: str) -> bool:
    """True of a line of the same cell, or of its place under other settings."""
    return line.get("cell") == cell or (setting != before and setting_of(line) == before)


def _take(run: Run, line: Line) -> None:
    kind = line["kind"]
    for one in _MEASURES.get(kind, lambda _: ())(line):
        if DRAW in line:
            one = pooled(one, line[DRAW], run.measures.get(one.key))
        run.measures[one.key] = one
    if kind == "step":
        # After a resume the steps since the last checkpoint are recorded again.
        while run.steps and run.steps[-1]["step"] >= line["step"]:
            run.steps.pop()
        run.steps.append(line)
    elif kind == "attention":
        key = (int(line["layer"]), int(line["head"]), str(line["map"]))
        size = len(line["text"])
        if len(line["weights"]) != size or any(len(row) != size for row in line["weights"]):
            raise ValueError(f"the weights are not {size} × {size}, one for each pair of tokens")
        run.attention[key] = line
    elif kind in PAYLOADS:
        if kind == "curve" and len(line["x"]) != len(line["y"]):
            raise ValueError(f"{len(line['x'])} x and {len(line['y'])} y")
        run.payloads.setdefault(kind, []).append(line)


def _run(name: str, header: Line, old: Run | None) -> Run:
    kind = header["kind"]
    study = choose(
        "study", str(header.get("study", COMPARISON)) if kind == "run" else kind, STUDIES
    )
    arm, seed = name, 0
    if study != COMPARISON and (named := _SEED.fullmatch(name)) is not None:
        arm, seed = named["arm"], int(named["seed"])
    if study == COMPARISON:
        arm, seed = str(header.get("arm", header["preset"])), int(header["seed"])
    weights = header.get("weights")
    same = old is not None and weights is not None and weights == old.header.get("weights")
    if study == QUANTIZATION and old is not None:  # what schemes add is a difference on one text
        same = same and _text(header) == _text(old.header)
    if study == DIAGNOSIS and old is not None and weights is None:
        raise ValueError(f"a second diagnosis named {name!r}")
    # A resumed run states its header again; what it had measured stays. Another model that is
    # measured under the same name replaces the first one's results, and so does another text of
    # a quantisation.
    if study == COMPARISON:
        same = old is None or not _is_of_another(header, old.header)
    kept = old if same else None
    return Run(
        id=name,
        arm=arm,
        preset=str(header.get("preset", arm)),
        label=str(header.get("label", "")),
        seed=seed,
        study=study,
        header=header,
        steps=kept.steps if kept else [],
        measures=kept.measures if kept else {},
        attention=kept.attention if kept else {},
        payloads=kept.payloads if kept else {},
    )


def _text(header: Line) -> list[Any]:
    """The text on which a header's schemes were measured."""
    read = (header.get("data") or {}).get("fingerprint")
    return [read, header.get("length"), header.get("tokens")]


def _is_of_another(header: Line, old: Line) -> bool:
    """True of an evaluation of other weights from another place. A rope scaling changes `weights`,
    which are those of a model's first variant."""
    if "evaluation" not in header or "evaluation" not in old:
        return False
    weights = [one.get("weights") for one in (header, old)]
    sources = [(one.get("model") or {}).get("from") for one in (header, old)]
    return None not in (*weights, *sources) and len({*weights}) == len({*sources}) == 2


def _measures_of_line(line: Line) -> Iterator[Measure]:
    value = _number(line["value"])
    dimensions = {name: line[name] for name in DIMENSIONS if line.get(name) is not None}
    details = {
        name: item
        for name, item in line.items()
        if name not in (*DIMENSIONS, DRAW, "kind", "run", "metric", "value")
    }
    for name in ("interval", "items"):
        if details.get(name) is not None:
            details[name] = [_number(one) for one in details[name]]
            if None in details[name]:  # one that was not finite
                del details[name]
    if details.get("interval") is not None and len(details["interval"]) != 2:
        raise ValueError(f"an interval has two ends, found {len(details['interval'])}")
    yield Measure(metric=str(line["metric"]), value=value, dimensions=dimensions, details=details)


def _measures_of_scheme(line: Line) -> Iterator[Measure]:
    """The measures of one scheme of a quantisation; without a scheme, of full precision."""
    scheme = line["scheme"]
    dimensions = {} if scheme is None else {"scheme": str(scheme)}
    details = {name: line.get(name) for name in ("family", "bits", "reason")}
    details["unused"] = tuple(line.get("unused", ()))
    for metric, name in (
        ("perplexity", "perplexity"),
        ("added_perplexity", "delta"),
        ("accuracy", "accuracy"),
        ("accuracy_normalised", "accuracy_normalised"),
    ):
        value = _number(line["perplexity"] if name == "perplexity" else line.get(name))
        if value is not None or name == "perplexity":
            yield Measure(metric=metric, value=value, dimensions=dimensions, details=details)


def _of_old_cell(line: Line) -> Iterator[Line]:
    """The lines of a cell as it was written when it held its "result"."""
    if not isinstance(line["result"], dict) or not isinstance(line["headlines"], list | tuple):
        raise ValueError("a cell's result is an object, its headlines a list")
    where = {"kind": "measure", "run": line["run"], "task": line["task"], **line["at"]}
    headlines = list(map(str, line["headlines"]))
    for one in lines_of(headlines, {**dict.fromkeys(headlines), **line["result"]}):
        if "aside" not in one:
            yield {**where, **one}


_MEASURES: dict[str, Callable[[Line], Iterable[Measure]]] = {
    "measure": _measures_of_line,
    "scheme": _measures_of_scheme,
}


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measured value")
    return number
