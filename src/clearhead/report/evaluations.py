"""Evaluations as tables for the terminal: a row a scaling and setting, a column a length.

Everything is read from cells; a task that is new here is shown by the numbers its cells headline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.report import style

if TYPE_CHECKING:
    from rich.table import Table

# Dimensions that name no row: the column, and what only decides which text is read.
_COLUMN, _SILENT = "length", ("longest", "digest")
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One number of one task and run: `values` by (row, column), each with its interval, if any."""

    task: str
    headline: str
    columns: tuple[int, ...]
    rows: tuple[str, ...]
    values: Mapping[tuple[str, int], tuple[float | None, str]]

    def text(self, row: str, column: int) -> str:
        """A number as it is shown, its interval after it; a dash where there is none."""
        value, interval = self.values.get((row, column), (None, ""))
        return "–" if value is None else style.number(value) + interval


def grids(lines: Sequence[Line]) -> list[Grid]:
    """The tables of one run's cells, one a task and headline; of two lines on a cell the later."""
    found = []
    for task in dict.fromkeys(line["task"] for line in lines):
        mine = [line for line in lines if line["task"] == task]
        places = [(row_name(line["at"]), int(line["at"].get(_COLUMN, 0))) for line in mine]
        for headline in mine[-1]["headlines"]:
            if all(line["result"].get(headline) is None for line in mine):
                continue  # what this task finds only of other data
            found.append(
                Grid(
                    task=task,
                    headline=str(headline),
                    columns=tuple(sorted({column for _, column in places})),
                    rows=tuple(dict.fromkeys(row for row, _ in places)),
                    values={
                        place: _value(line, headline)
                        for place, line in zip(places, mine, strict=True)
                    },
                )
            )
    return found


def scaling_name(at: Line) -> str:
    """A rope scaling in words: "none", "yarn × 4"."""
    factor = at.get("factor")
    return str(at.get("scaling", "none")) + (f" × {factor:g}" if factor is not None else "")


def column_name(length: int) -> str:
    """A length in tokens; nothing where a task's texts are as long as they are."""
    return f"{length:,}" if length else ""


def row_name(at: Line) -> str:
    """All dimensions of a cell but its length."""
    rest = {
        key: value
        for key, value in at.items()
        if key not in ("scaling", "factor", _COLUMN, *_SILENT)
    }
    words = [
        f"{key} {value:g}" if _is_number(value) else f"{key} {value}" for key, value in rest.items()
    ]
    return ", ".join([scaling_name(at), *words])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_console(grid: Grid, title: str) -> "Table":
    """A table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    words = grid.headline.replace("_", " ")
    by_length = " by length" if any(grid.columns) else ""
    table = Table(title=escape(f"{title}: {grid.task}, {words}{by_length}"))
    table.add_column("")
    for column in grid.columns:
        table.add_column(column_name(column), justify="right")
    for row in grid.rows:
        table.add_row(escape(row), *(grid.text(row, column) for column in grid.columns))
    return table


def _value(line: Line, headline: str) -> tuple[float | None, str]:
    """The number, and for an accuracy its 95 % interval."""
    result = line["result"]
    value = result.get(headline)
    interval = ""
    if headline == "accuracy" and result.get("low") is not None:
        interval = f" [{result['low']:.2f}, {result['high']:.2f}]"
    return (None if value is None else float(value)), interval
