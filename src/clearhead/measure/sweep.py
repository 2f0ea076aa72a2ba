"""A sweep of measurements: every cell of every task, written to the records as it is measured.

Cells that are in the records already, of the same weights, text, options and seed, are not measured
again, so that the same call goes on with a sweep that was stopped, or adds seeds to one.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError
from clearhead.measure.task import Cell, Task
from clearhead.models.inspection import dtype_name, within_memory
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.cells import whole
from clearhead.records.identity import digest_of
from clearhead.records.loading import append, load
from clearhead.records.lock import hold_file
from clearhead.records.provenance import KEYS, provenance
from clearhead.records.runs import COMPARISON, DRAW, Line
from clearhead.train.memory import PeakMemory

# What of a cell's making decides its numbers: where one differs, it is another cell.
_DECISIVE = ("weights", "data", "splits", "tokens", "dtype")


@dataclass(frozen=True, kw_only=True)
class Portion:
    """One model's part of a sweep.

    Attributes:
        header: the run's line, with "run" its name and "study"; `sweep` adds provenance and text.
        subjects: the model's variants, such as its rope scalings, each with its dimensions.
        tasks: by name.
        seeds: of what tasks draw.
        less: what to give so that less memory is needed.
    """

    header: Line
    subjects: Sequence[tuple[Line, Any]]
    tasks: Mapping[str, Task[Any]]
    seeds: Sequence[int] = (0,)
    less: str


class _Planned(NamedTuple):
    """A cell to be measured. `key` tells it from every other: a hash of its settings, its draw."""

    task: str
    subject: Any
    cell: Cell
    at: Line
    options: Line
    made: Line
    key: str
    draw: Line

    def __str__(self) -> str:
        """perplexity, yarn × 4, length 128, seed 1."""
        scaling = self.at.get("scaling")
        factor = "" if self.at.get("factor") is None else f" × {self.at['factor']:g}"
        words = [self.task] if scaling is None else [self.task, f"{scaling}{factor}"]
        words += [f"{k} {x}" for k, x in self.at.items() if k not in ("scaling", "factor")]
        return ", ".join([*words, *(f"seed {x}" for x in self.draw.values() if x)])


def sweep(
    portions: Sequence[Callable[[], Portion]],
    *,
    records: Path | None,
    work: Work | None = None,
    told: Callable[[list[Line]], object] | None = None,
) -> list[Line]:
    """Measure every cell; return each run's line and those of its cells, in order.

    All of a model's cells are checked before any is measured.

    Args:
        portions: each makes its portion, and loads its model, when its turn comes.
        records: a file to append to; None keeps nothing.
        work: shows which cell is at hand; models are taken to have as many cells as the first.
        told: is given a run's line, and the lines of each cell as soon as it is done.

    Raises:
        ClearheadError: what a model, the text or an option makes impossible; too little memory;
            records of another study, in use by another process, or that cannot be written.
    """
    lines: list[Line] = []
    work = Work() if work is None else work
    with hold_file(records):
        for make in portions:
            for done in _swept(make(), records, len(portions), work):
                lines += done
                if told is not None:
                    told(done)
    return lines


def _swept(
    portion: Portion, records: Path | None, portions: int, work: Work
) -> Iterator[list[Line]]:
    run, study = str(portion.header["run"]), portion.header.get("study", COMPARISON)
    known = _known(records, run, study)
    cells = _planned(portion)
    first = portion.subjects[0][1]
    origin = provenance(first.model.device)
    header = _read({"kind": "run", **portion.header, **origin, **_text(first)})
    work.start(portions * len(cells))
    kept = _Kept(records, header)
    yield [header]
    at_hand = first
    for one in cells:
        if one.subject is not at_hand:
            at_hand.release()
            at_hand = one.subject
        found = known.get(one.key)
        if found is None:
            work.begin(f"{run}, {one}")
            with within_memory(portion.less + kept.advice):
                found = _measured(portion, one, work, origin)
            kept.add(one.key, found)
            work.end()
        else:
            kept.add(one.key, found)
            work.skip()
        yield found


class _Kept:
    """The file of a sweep. Its header is written before the first cell that is new, or where it
    says other settings: of known cells it would name a command and a commit that measured none."""

    def __init__(self, path: Path | None, header: Line) -> None:
        self._path, self._header, self._due = path, header, [header]
        self._current: set[str] | None = None

    @property
    def advice(self) -> str:
        """The end of an error message: what to do then."""
        if self._path is None:
            return ""
        return f"; what is done is in {self._path}, and the same command goes on"

    def add(self, key: str, lines: list[Line]) -> None:
        """Append a cell, unless it is there and counts."""
        if self._path is None:
            return
        if self._current is None:
            runs = load(self._path).runs if self._path.exists() else ()
            before = [run for run in runs if run.id == self._header["run"]]
            self._current = {str(one["cell"]) for run in before for one in run.cells}
            if _settings(self._header) not in [_settings(run.header) for run in before]:
                append(self._path, self._due.pop())
        if key not in self._current:
            append(self._path, *self._due, *lines)
            self._due.clear()


def _settings(header: Line) -> Line:
    """A header without when, where and by what it was made."""
    return {key: value for key, value in header.items() if key not in KEYS}


def _planned(portion: Portion) -> list[_Planned]:
    listed = []
    for dimensions, first in portion.subjects:
        for place, seed in enumerate(portion.seeds):
            subject = first if seed == first.seed else replace(first, seed=seed)
            vars(subject)["weights"] = first.weights  # of one model
            listed += [
                (name, subject, {**dimensions, **cell}, cell)
                for name, task in portion.tasks.items()
                if place == 0 or task.drawn
                for cell in task.cells(subject)
            ]
    found = []
    for name, subject, at, cell in listed:  # only now is it known whether text is read at all
        task, made = portion.tasks[name], _made(subject)
        options, seed = _options(task), subject.seed if task.drawn else 0
        key = _key(name, at, options, made, seed)
        at = {dimension: value for dimension, value in at.items() if dimension != "digest"}
        draw = {DRAW: seed} if task.drawn else {}
        found.append(_Planned(name, subject, cell, at, options, made, key, draw))
    return found


def _measured(portion: Portion, one: _Planned, work: Work, origin: Line) -> list[Line]:
    peak, started = PeakMemory(one.subject.model.device), time.perf_counter()
    done = 0

    def advanced(steps: int) -> None:
        nonlocal done
        done += steps
        work.update(0.0, f"{done} done")

    payloads = list(portion.tasks[one.task].measure(one.subject, one.cell, advanced))
    run = {"run": portion.header["run"]}
    named = {"task": one.task} if portion.header.get("study", COMPARISON) == COMPARISON else {}
    where = {**named, **one.at, **one.draw}
    found = [{"kind": "measure", **run, **where, **line, "cell": one.key} for line in payloads]
    spent = {"seconds": time.perf_counter() - started, "peak_memory_bytes": peak.bytes()}
    closing = {
        "kind": "cell",
        **run,
        "cell": one.key,
        "task": one.task,
        "at": one.at,
        **one.draw,
        "lines": len(found),
        "options": one.options,
        "made": {**one.made, "seed": one.subject.seed, **origin, **spent},
    }
    return [_read(line) for line in (*found, closing)]


def _read(line: Line) -> Line:
    """A line as it is read from a file."""
    found: Line = json.loads(jsonl.encode(line))
    return found


def _options(task: Any) -> Line:
    """As JSON, but for those that only list cells."""
    listed = {option.name for option in fields(task) if "listed" in option.metadata}
    return _read({key: value for key, value in asdict(task).items() if key not in listed})


def _text(subject: Any) -> Line:
    read = subject.texts.read
    return {"weights": subject.weights, "data": read and read.describe()}


def _made(subject: Any) -> Line:
    return {
        "weights": subject.weights,
        "data": subject.texts.read and subject.texts.read.fingerprint,
        "splits": list(subject.texts.splits),
        "tokens": subject.tokens,
        "dtype": dtype_name(subject.model),
        "batch_tokens": subject.batch_tokens,
    }


def _key(task: str, at: Line, options: Line, made: Line, seed: int) -> str:
    settings = [task, at, options, {name: made.get(name) for name in _DECISIVE}]
    return f"{digest_of(settings)[:16]}-{seed}"


def _known(records: Path | None, run: str, study: str) -> dict[str, list[Line]]:
    """The lines of this run's whole cells in the file, by their keys."""
    if records is None or not records.exists():
        return {}
    others = [one.study for one in load(records).runs if one.study != study]
    if others:
        raise ClearheadError(
            f"{records} holds records of another study ({others[0]}): name another"
        )
    found: dict[str, list[Line]] = {}
    unclosed: dict[str, list[Line]] = {}
    for line in jsonl.read(records):
        if line["run"] != run or (line["kind"] != "cell" and "cell" not in line):
            continue
        if line["kind"] == "cell":
            lines = whole(unclosed.pop(str(line["cell"]), []), line)
            if lines is not None:
                found[str(line["cell"])] = [*lines, line]
        else:
            unclosed.setdefault(str(line["cell"]), []).append(line)
    return found
