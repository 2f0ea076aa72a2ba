"""clearhead eval: what a model can do with a text, by length, depth and rope scaling."""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.experiments.evaluating import EvaluateConfig, run_evaluation
from clearhead.experiments.evaluation import Watcher
from clearhead.report.evaluations import grids, scaling_name, to_console
from clearhead.terminal import console, say


def run(words: list[str]) -> int:
    config: Any = parse(
        EvaluateConfig,
        words,
        verb="eval",
        description="Evaluate a model, by length, depth and rope scaling; losses in float32. "
        "Lists, but of files and sources, may also be separated by commas.",
    )
    bar = _Bar()
    try:
        with bar:
            lines = run_evaluation(config, watcher=bar, say=say)
    except ClearheadError:
        _print(bar.lines)  # what was measured before
        raise
    _print(lines)
    return 0


def _print(lines: Sequence[Mapping[str, Any]]) -> None:
    out = console()
    for grid in grids(lines):
        out.print(to_console(grid, lines[0]["run"]))


class _Bar(Watcher):
    """A line of progress: cells done of all, which one is at work, and how far it is."""

    def __init__(self) -> None:
        self.lines = list[Mapping[str, Any]]()

    def __enter__(self) -> "_Bar":
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

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
