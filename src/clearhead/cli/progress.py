"""Progress of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clearhead.measure import Watcher
from clearhead.progress import Line as Shown
from clearhead.records.runs import DRAW, Line
from clearhead.report.evaluation import scaling_name
from clearhead.terminal import say


class Bar(Watcher):
    """Shows cells done of all, the time left, which cell is at work and how far.

    Args:
        told: makes a line about a cell's lines, shown as soon as the cell is done.

    Attributes:
        lines: the runs' headers and what was measured of them so far.
    """

    def __init__(self, told: Callable[[Sequence[Line]], str] | None = None) -> None:
        self.lines = list[Line]()
        self._told = told
        self._work = Shown(unit="cell")
        self._begun = False

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._work.close()

    def started(self, header: Line, cells: int, done: int) -> None:
        self.lines.append(header)
        self._run = header["run"]
        self._work.expect(cells)

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        scaling = [scaling_name(at)] if "scaling" in at else []
        rest = [f"{key} {one}" for key, one in at.items() if key not in ("scaling", "factor", DRAW)]
        rest += [f"seed {at[DRAW]}"] if at.get(DRAW) else []
        self._begun, self._steps = True, 0
        self._work.begin(", ".join([self._run, task, *scaling, *rest]))

    def advanced(self, steps: int) -> None:
        self._steps += steps
        self._work.update(0, f"{self._steps} done")

    def finished(self, lines: Sequence[Line]) -> None:
        self.lines += lines
        if self._begun:
            self._work.end()
        else:
            self._work.skip()
        self._begun = False
        if self._told is not None:
            say(self._told(lines))
