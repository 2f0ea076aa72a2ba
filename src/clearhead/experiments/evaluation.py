"""A sweep of evaluations: every task, under every rope scaling, a cell at a time, kept as done."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError
from clearhead.eval import Subject, Task
from clearhead.models import scaled
from clearhead.records.loading import append, load
from clearhead.records.provenance import provenance

NONE = "none"
# What of a cell's making decides its numbers: where one differs, it is another cell.
DECISIVE = ("weights", "data", "splits", "tokens", "dtype", "seed")


class Scaling(NamedTuple):
    """A rope scaling and its factor; "none" has none."""

    kind: str
    factor: float | None = None


class Watcher:
    """Callbacks of a sweep; these do nothing."""

    def started(self, cells: int, done: int) -> None:
        """The sweep starts, with `cells` in all, `done` of them in the records already."""

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        """The next cell begins."""

    def advanced(self, steps: int) -> None:
        """Windows or prompts of this cell were done."""

    def finished(self, line: Mapping[str, Any]) -> None:
        """The cell is done and its line is in the records."""


@dataclass(frozen=True, kw_only=True)
class _Cell:
    task: str
    options: dict[str, Any]
    at: dict[str, Any]
    subject: Subject
    measure: Callable[[Callable[[int], None]], dict[str, Any]]
    headlines: tuple[str, ...]


def scalings(kinds: Sequence[str], factors: Sequence[float]) -> list[Scaling]:
    """Every kind with every factor; "none" once.

    Raises:
        ClearheadError: factors that nothing takes, or a scaling without one.
    """
    takes = [kind for kind in kinds if kind != NONE]
    if factors and not takes:
        raise ClearheadError(
            "factors have no effect without a scaling: give some, for example "
            "--rope-scaling none ntk yarn"
        )
    if takes and not factors:
        raise ClearheadError(f"rope scaling {takes[0]} takes a factor: for example --factors 2 4 8")
    found = [Scaling(NONE)] if NONE in kinds else []
    return found + [Scaling(kind, factor) for kind in takes for factor in factors]


def evaluate(
    subject: Subject,
    tasks: Mapping[str, Task],
    variants: Sequence[Scaling],
    *,
    run: Mapping[str, Any],
    records: Path | None,
    watcher: Watcher,
) -> list[dict[str, Any]]:
    """Measure every cell, and return their lines in order.

    Everything is checked before anything is measured. Each cell is written to `records` as it is
    done; those that are there already, of the same weights, text, options and seed, are not
    measured again, so that the same call goes on with a sweep that was stopped.

    Args:
        run: the run's line in the records, with "run" its name.
        records: a file to append to; None keeps nothing.

    Raises:
        ClearheadError: what the model, the text or an option makes impossible.
    """
    cells = list(_cells(subject, tasks, variants))
    made = _made(subject)
    known = _known(records, str(run["run"]), made)
    lines = [known.get(_identity(cell.task, cell.at, cell.options)) for cell in cells]
    watcher.started(len(cells), sum(line is not None for line in lines))
    if records is not None:
        read = subject.texts.read
        append(records, {"kind": "run", **run, "data": read and read.describe()})
    for index, cell in enumerate(cells):
        if index and cell.subject is not cells[index - 1].subject:
            cells[index - 1].subject.release()
        if lines[index] is not None:
            continue
        watcher.cell(cell.task, cell.at)
        started = time.perf_counter()
        result = cell.measure(watcher.advanced)
        line = {
            "kind": "cell",
            "run": run["run"],
            "task": cell.task,
            "at": cell.at,
            "headlines": result.pop("headlines", cell.headlines),
            "result": result,
            "options": cell.options,
            "made": {**made, "seconds": time.perf_counter() - started},
        }
        if records is not None:
            append(records, line)
        lines[index] = line
        watcher.finished(line)
    return [line for line in lines if line is not None]


def _cells(
    subject: Subject, tasks: Mapping[str, Task], variants: Sequence[Scaling]
) -> Iterator[_Cell]:
    for variant in variants:
        one = subject
        if variant.factor is not None:
            one = replace(subject, model=scaled(subject.model, variant.kind, variant.factor))
        for name, task in tasks.items():
            for cell in task.cells(one):
                yield _Cell(
                    task=name,
                    options=_options(task),
                    at={"scaling": variant.kind, "factor": variant.factor, **cell},
                    subject=one,
                    measure=_measure(task, one, cell),
                    headlines=task.headlines,
                )


def _options(task: Any) -> dict[str, Any]:
    """As JSON, but for those that only list cells."""
    listed = {option.name for option in fields(task) if "listed" in option.metadata}
    options = {key: value for key, value in asdict(task).items() if key not in listed}
    return json.loads(json.dumps(options))


def _measure(
    task: Task, subject: Subject, cell: Mapping[str, Any]
) -> Callable[[Callable[[int], None]], dict[str, Any]]:
    return lambda advanced: task.measure(subject, cell, advanced)


def _made(subject: Subject) -> dict[str, Any]:
    model = subject.model
    return {
        "weights": subject.weights,
        "data": subject.texts.read and subject.texts.read.fingerprint,
        "splits": list(subject.texts.splits),
        "tokens": subject.tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": subject.seed,
        "batch_tokens": subject.batch_tokens,
        **provenance(model.device),
    }


def _known(records: Path | None, run: str, made: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The lines of this run's cells that are in the file and were made alike."""
    if records is None or not records.exists():
        return {}
    found = {}
    for kept in load(records).runs:
        for line in kept.cells if kept.id == run else ():
            if all(line["made"].get(key) == made[key] for key in DECISIVE):
                found[_identity(line["task"], line["at"], line["options"])] = line
    return found


def _identity(task: str, at: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps([task, at, options], sort_keys=True)
