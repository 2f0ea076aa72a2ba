"""Progress of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clearhead.measure import Watcher
from clearhead.progress import Line as ProgressLine
from clearhead.records.runs import DRAW, Line
from clearhead.report.evaluation import scaling_name


class Bar(Watcher):
    """Shows cells done of all, the time left, which cell is at work and how far.

    Args:
        models: number of models, taken to have as many cells as the first.
        told: makes a line about a cell's lines, shown as soon as the cell is done.

    Attributes:
        lines: the runs' headers and what was measured of them so far.
    """

    def __init__(
        self, models: int = 1, told: Callable[[Sequence[Line]], str] | None = None
    ) -> None:
        self.lines = list[Line]()
        self._models, self._told = models, told
        self._shown, self._begun = ProgressLine(unit="cell"), False

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def started(self, header: Line, cells: int, done: int) -> None:
        self.lines.append(header)
        self._run = header["run"]
        self._shown.start(self._models * cells)

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        scaling = [scaling_name(at)] if "scaling" in at else []
        rest = [f"{key} {one}" for key, one in at.items() if key not in ("scaling", "factor", DRAW)]
        rest += [f"seed {at[DRAW]}"] if at.get(DRAW) else []
        self._steps, self._begun = 0, True
        self._shown.begin(", ".join([self._run, task, *scaling, *rest]))

    def advanced(self, steps: int) -> None:
        self._steps += steps
        self._shown.update(0.0, f"{self._steps} done")

    def finished(self, lines: Sequence[Line]) -> None:
        self.lines += lines
        if self._begun:
            self._shown.end()
        else:
            self._shown.skip()
        self._begun = False
        if self._told is not None:
            self._shown.say(self._told(lines))
