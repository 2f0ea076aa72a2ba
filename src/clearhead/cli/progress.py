"""Progress of a sweep on a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from clearhead.measure import Watcher
from clearhead.records.runs import DRAW, Line
from clearhead.report.evaluation import scaling_name
from clearhead.terminal import console, say


class Bar(Watcher):
    """A line of progress: cells done of all, the time left, which cell is at work and how far.

    Args:
        told: makes a line about a cell's lines, shown as soon as the cell is done.

    Attributes:
        lines: the runs' headers and what was measured of them so far.
    """

    def __init__(self, told: Callable[[Sequence[Line]], str] | None = None) -> None:
        self.lines = list[Line]()
        self._told = told
        self._task: TaskID | None = None

    def __enter__(self) -> "Bar":
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console(stderr=True),
            transient=True,
        )
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def started(self, header: Line, cells: int, done: int) -> None:
        self.lines.append(header)
        self._run = header["run"]
        if self._task is None:
            self._task = self._progress.add_task("", total=0)
        before = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=before + cells)

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        scaling = [scaling_name(at)] if "scaling" in at else []
        rest = [f"{key} {one}" for key, one in at.items() if key not in ("scaling", "factor", DRAW)]
        rest += [f"seed {at[DRAW]}"] if at.get(DRAW) else []
        self._what, self._steps = ", ".join([self._run, task, *scaling, *rest]), 0
        self._update()

    def advanced(self, steps: int) -> None:
        self._steps += steps
        self._update()

    def finished(self, lines: Sequence[Line]) -> None:
        self.lines += lines
        self._progress.advance(self._task or TaskID(0))
        if self._told is not None:
            say(self._told(lines))

    def _update(self) -> None:
        done = f": {self._steps} done" if self._steps else ""
        self._progress.update(self._task or TaskID(0), description=self._what + done)
