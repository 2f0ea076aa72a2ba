"""A sweep of measurements: every cell of every task, written to the records as it is measured.

Cells that are in the records already, of the same weights, text, options and seed, are not measured
again, so that the same call goes on with a sweep that was stopped, or adds seeds to one.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import NotFinite
from clearhead.measure.task import Cell, Task
from clearhead.models.inspection import backbone, dtype_name, within_memory
from clearhead.progress import Work
from clearhead.records.cells import unmeasured
from clearhead.records.identity import canonical, digest_of
from clearhead.records.lock import hold_file
from clearhead.records.provenance import provenance
from clearhead.records.runs import COMPARISON, DRAW, Line
from clearhead.records.store import Store
from clearhead.train.memory import PeakMemory


@dataclass(frozen=True, kw_only=True)
class Portion:
    """One model's part of a sweep.

    Attributes:
        header: the run's line, with "run" its name; `sweep` adds study, provenance and text.
        subjects: the model's variants, such as its rope scalings, each with its dimensions.
        tasks: by name.
        seeds: of the tasks' random draws.
        less: advice for too little memory, such as smaller batches.
    """

    header: Line
    subjects: Sequence[tuple[Line, Any]]
    tasks: Mapping[str, Task]
    seeds: Sequence[int] = (0,)
    less: str


class _Planned(NamedTuple):
    """A cell to be measured; `key` is a hash of its settings, and its seed."""

    task: str
    subject: Any
    cell: Cell
    at: Line
    draw: Line
    key: str
    facts: Line

    def __str__(self) -> str:
        """perplexity, yarn × 4, length 128, seed 1."""
        at = dict(self.at)
        scaling, factor = at.pop("scaling", None), at.pop("factor", None)
        kind = [scaling if factor is None else f"{scaling} × {factor:g}"] * (scaling is not None)
        seeds = [f"seed {seed}" for seed in self.draw.values() if seed]
        return ", ".join([self.task, *kind, *(f"{k} {x}" for k, x in at.items()), *seeds])


def sweep(
    portions: Sequence[Callable[[], Portion]],
    *,
    records: Path | None,
    study: str = COMPARISON,
    work: Work | None = None,
    told: Callable[[list[Line]], object] | None = None,
) -> list[Line]:
    """Measure every cell; return each run's line and those of its cells, in order.

    All of a model's cells are checked before any is measured.

    Args:
        portions: each makes its portion, and loads its model, when its turn comes.
        records: a file to append to; None keeps nothing.
        work: shows which cell is at hand; models are taken to have as many cells as the first.
        told: called with a run's line, and with the lines of each cell as soon as it is done.

    Raises:
        ClearheadError: what a model, the text or an option makes impossible; too little memory;
            records of another study, in use by another process, or that cannot be written.
    """
    lines: list[Line] = []
    work = Work() if work is None else work
    with hold_file(records):
        store = Store(records, study)
        for make in portions:
            for done in _swept(make(), store, study, len(portions), work):
                lines += done
                if told is not None:
                    told(done)
    return lines


def _swept(
    portion: Portion, store: Store, study: str, portions: int, work: Work
) -> Iterator[list[Line]]:
    run = str(portion.header["run"])
    cells = _planned(portion)
    at_hand = portion.subjects[0][1]
    origin, read = provenance(at_hand.model.device), at_hand.texts.read
    text = {"weights": at_hand.weights, "data": read and read.describe()}
    header = {"kind": "run", **text, **portion.header, "study": study, **origin}
    less = portion.less
    if store.path is not None:
        less += f"; what is done is in {store.path}, and the same command goes on"
    work.start(portions * len(cells))
    yield [canonical(header)]
    for one in cells:
        if one.subject is not at_hand:
            at_hand.release()
            at_hand = one.subject
        if store.has(one.key, header):
            work.skip()
            yield store.rows(one.key, header)
            continue
        work.begin(f"{run}, {one}")
        with within_memory(less):
            rows, spent = _measured(portion.tasks[one.task], one, study, work)
        made = {**one.facts["made"], "seed": one.subject.seed, **origin, **spent}
        facts = {"task": one.task, "at": one.at, **one.draw, **one.facts, "made": made}
        yield store.add(one.key, header, rows, **facts)
        work.end()


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
    planned = []
    for name, subject, at, cell in listed:  # only now is it known whether text is read at all
        task: Any = portion.tasks[name]  # a dataclass
        text = subject.texts.read
        made = {
            "weights": subject.weights,
            "data": text and text.fingerprint,
            "splits": list(subject.texts.splits),
            "tokens": subject.tokens,
            "dtype": dtype_name(subject.model),
        }
        listing = {option.name for option in fields(task) if "listed" in option.metadata}
        options = canonical({k: x for k, x in asdict(task).items() if k not in listing})
        key = f"{digest_of([name, at, options, made])[:16]}-{subject.seed if task.drawn else 0}"
        at = {dimension: value for dimension, value in at.items() if dimension != "digest"}
        draw = {DRAW: subject.seed} if task.drawn else {}
        facts = {"options": options, "made": {**made, "batch_tokens": subject.batch_tokens}}
        planned.append(_Planned(name, subject, cell, at, draw, key, facts))
    return planned


def _measured(task: Task, one: _Planned, study: str, work: Work) -> tuple[list[Line], Line]:
    """The rows of a cell, and the time and memory that they took."""
    model, passes = one.subject.model, itertools.count(1)
    peak, started = PeakMemory(model.device), time.perf_counter()

    def count(*_: Any) -> None:
        work.update(0.0, f"{next(passes):,} forward passes")

    try:
        with backbone(model).register_forward_hook(count):
            lines = list(task.measure(one.subject, one.cell))
    except NotFinite as error:
        if not (headlines := getattr(task, "headlines", ())):
            raise
        lines = unmeasured(headlines, error)
    named = {"task": one.task} if study == COMPARISON else {}
    rows = [{**named, **one.at, **one.draw, **line} for line in lines]
    return rows, {"seconds": time.perf_counter() - started, "peak_memory_bytes": peak.bytes()}
