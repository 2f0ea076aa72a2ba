"""Progress of an evaluation on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clearhead.experiments.evaluation import Watcher
from clearhead.report.evaluation import scaling_name
from clearhead.terminal import console


class Bar(Watcher):
    """A line of progress: cells done of all, which one is at work, and how far it is."""

    def __init__(self) -> None:
        self.lines = list[Mapping[str, Any]]()

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

    def started(self, cells: int, done: int) -> None:
        self._task = self._progress.add_task("", total=cells, completed=done)

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        rest = " ".join(
            f"{key} {value}" for key, value in at.items() if key not in ("scaling", "factor")
        )
        self._what, self._steps = f"{task}, {scaling_name(at)}, {rest}", 0
        self._progress.update(self._task, description=self._what)

    def advanced(self, steps: int) -> None:
        self._steps += steps
        self._progress.update(self._task, description=f"{self._what}: {self._steps} done")

    def finished(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self._progress.advance(self._task)
