"""What several runs scored: a row a model and setting, over seeds."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from clearhead.report import style
from clearhead.report.evaluations import Grid, row_name
from clearhead.report.records import Records
from clearhead.report.statistics import Summary, summarize


class Row(NamedTuple):
    """A model, and all dimensions of its cells but length and depth."""

    arm: str
    setting: str

    @property
    def name(self) -> str:
        return f"{self.arm} · {self.setting}"


def tasks(records: Records) -> list[str]:
    """The tasks that any of the runs was asked."""
    return list(dict.fromkeys(cell["task"] for run in records.runs for cell in run.cells))


def summaries(records: Records, task: str) -> list[Grid]:
    """A table a headline: mean ± standard deviation over seeds, means over depths within a seed."""
    cells = [cell for run in records.runs for cell in run.cells if cell["task"] == task]
    found = []
    for headline in dict.fromkeys(str(name) for cell in cells for name in cell["headlines"]):
        rows = values(records, task, headline)
        if rows:
            texts = {
                (row.name, length): style.with_spread(summary.mean, summary.deviation)
                for row, columns in rows.items()
                for (length,), summary in columns.items()
            }
            columns = tuple(sorted({length for _, length in texts}))
            names = tuple(row.name for row in rows)
            grid = Grid(task=task, headline=headline, columns=columns, rows=names, texts=texts)
            found.append(grid)
    return found


def values(
    records: Records, task: str, headline: str, *, apart: tuple[str, ...] = ()
) -> dict[Row, dict[tuple[Any, ...], Summary]]:
    """By row and by (length, *apart), over seeds; within a seed the mean over what is not apart."""
    found: dict[Row, dict[tuple[Any, ...], dict[int, list[float]]]] = {}
    for run in records.runs:
        # Of two lines on one cell the later counts.
        latest = {place(cell): cell for cell in run.cells if cell["task"] == task}
        for cell in latest.values():
            at, value = cell["at"], cell["result"].get(headline)
            if value is None:
                continue
            column = (at.get("length", 0), *(at.get(key) for key in apart))
            by_seed = found.setdefault(Row(run.arm, setting(at)), {}).setdefault(
                column, defaultdict(list)
            )
            by_seed[run.seed].append(float(value))
    out: dict[Row, dict[tuple[Any, ...], Summary]] = {}
    for row, columns in found.items():
        out[row] = {}
        for column, by_seed in columns.items():
            summary = summarize([fmean(scores) for scores in by_seed.values()])
            if summary is not None:
                out[row][column] = summary
    return out


def setting(at: Mapping[str, Any]) -> str:
    """All dimensions of a cell but its length and depth, in words."""
    return row_name({key: value for key, value in at.items() if key != "depth"})


def place(cell: Mapping[str, Any]) -> str:
    """What tells a cell from the others of its run and task."""
    return repr(sorted(cell["at"].items()))
