"""A sweep of measurements: every cell of every task, written to the records as it is measured.

Cells that are in the records already, of the same weights, text, options and seed, are not measured
again, so that the same call goes on with a sweep that was stopped, or adds seeds to one.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic

from clearhead.errors import ClearheadError
from clearhead.measure.task import Cell, S, Task
from clearhead.models.inspection import dtype_name, within_memory
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


class Watcher:
    """Callbacks of a sweep; these do nothing."""

    def started(self, header: Line, cells: int, done: int) -> None:
        """A model's cells are known: so many, `done` of them in the records already."""

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        """The next cell begins."""

    def advanced(self, steps: int) -> None:
        """Windows or prompts of this cell were done."""

    def finished(self, lines: Sequence[Line]) -> None:
        """A cell is done and in the records: its lines, the one that closes it last."""


@dataclass(frozen=True, kw_only=True)
class Portion(Generic[S]):
    """One model's part of a sweep.

    Attributes:
        header: the run's line, with "run" its name and "study"; `sweep` adds provenance and text.
        subjects: the model's variants, such as its rope scalings, each with its dimensions.
        tasks: by name.
        seeds: of what tasks draw.
        less: what to give so that less memory is needed.
    """

    header: Line
    subjects: Sequence[tuple[Line, S]]
    tasks: Mapping[str, Task[S]]
    seeds: Sequence[int] = (0,)
    less: str


@dataclass(frozen=True, kw_only=True)
class _Planned(Generic[S]):
    """A cell to be measured. `key` tells it from every other: a hash of its settings, its draw."""

    task: str
    subject: S
    cell: Cell
    at: Line
    options: Line
    made: Line
    key: str
    draw: Line


def sweep(
    portions: Iterable[Portion[S]], *, records: Path | None, watcher: Watcher | None = None
) -> list[Line]:
    """Measure every cell; return each run's line and those of its cells, in order.

    All of a model's cells are checked before any is measured.

    Args:
        portions: each made, and its model loaded, when its turn comes, and dropped after it.
        records: a file to append to; None keeps nothing.

    Raises:
        ClearheadError: what a model, the text or an option makes impossible; too little memory;
            records of another study, in use by another process, or that cannot be written.
    """
    lines: list[Line] = []
    with hold_file(records):
        for portion in portions:
            lines += _swept(portion, records, watcher or Watcher())
            del portion  # before the next model is loaded
    return lines


def _swept(portion: Portion[S], records: Path | None, watcher: Watcher) -> list[Line]:
    run, study = str(portion.header["run"]), portion.header.get("study", COMPARISON)
    known = _known(records, run, study)
    cells = _planned(portion)
    first = portion.subjects[0][1]
    origin = provenance(first.model.device)
    header = _read({"kind": "run", **portion.header, **origin, **_text(first)})
    watcher.started(header, len(cells), sum(one.key in known for one in cells))
    kept = _Kept(records, header)
    lines = [header]
    for index, one in enumerate(cells):
        if index and one.subject is not cells[index - 1].subject:
            cells[index - 1].subject.release()
        found = known.get(one.key)
        if found is None:
            watcher.cell(one.task, {**one.at, **one.draw})
            with within_memory(portion.less + kept.advice):
                found = _measured(portion, one, watcher, origin)
        kept.add(one.key, found)
        lines += found
        watcher.finished(found)
    return lines


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


def _planned(portion: Portion[S]) -> list[_Planned[S]]:
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
        one = _Planned(
            task=name,
            subject=subject,
            cell=cell,
            at={key: value for key, value in at.items() if key != "digest"},
            options=options,
            made=made,
            key=_key(name, at, options, made, seed),
            draw={DRAW: seed} if task.drawn else {},
        )
        found.append(one)
    return found


def _measured(portion: Portion[S], one: _Planned[S], watcher: Watcher, origin: Line) -> list[Line]:
    peak, started = PeakMemory(one.subject.model.device), time.perf_counter()
    payloads = list(portion.tasks[one.task].measure(one.subject, one.cell, watcher.advanced))
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
