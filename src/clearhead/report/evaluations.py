"""Evaluations as tables for the terminal: a row a scaling and setting, a column a length.

Everything is read from cells; a task that is new here is shown by the numbers its cells headline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.report import style
from clearhead.report.statistics import Difference
from clearhead.report.verdicts import verdict_in_words

if TYPE_CHECKING:
    from rich.table import Table

# Dimensions that name no row: the column, and what only decides which text is read.
_COLUMN, _SILENT = "length", ("longest", "digest")
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One number of one task: `texts` by (row, column), each number with its interval, if any;
    `differences` to the baseline where several models are compared."""

    task: str
    headline: str
    columns: tuple[int, ...]
    rows: tuple[str, ...]
    texts: Mapping[tuple[str, int], str]
    differences: Mapping[tuple[str, int], Difference] = field(default_factory=dict)

    def text(self, row: str, column: int) -> str:
        """A number as it is shown; a dash where there is none."""
        return self.texts.get((row, column), "–")

    def verdict(self, row: str, column: int, threshold: float) -> str:
        """What the seeds say of a number's difference to the baseline's, if anything."""
        found = self.differences.get((row, column))
        return "" if found is None else verdict_in_words(found, threshold)


def grids(lines: Sequence[Line]) -> list[Grid]:
    """The tables of one run's cells, one a task and headline; of two lines on a cell the later."""
    found = []
    for task in dict.fromkeys(line["task"] for line in lines):
        mine = [line for line in lines if line["task"] == task]
        places = [(row_name(line["at"]), int(line["at"].get(_COLUMN, 0))) for line in mine]
        for headline in dict.fromkeys(name for line in mine for name in line["headlines"]):
            # Some of a task's cells may have others: the harness's tasks have each their own.
            having = [
                (place, line)
                for place, line in zip(places, mine, strict=True)
                if headline in line["headlines"]
            ]
            if all(line["result"].get(headline) is None for _, line in having):
                continue  # what this task finds only of other data
            found.append(
                Grid(
                    task=task,
                    headline=str(headline),
                    columns=tuple(sorted({column for (_, column), _ in having})),
                    rows=tuple(dict.fromkeys(row for (row, _), _ in having)),
                    texts={place: _text(line, headline) for place, line in having},
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


def to_console(grid: Grid, title: str, threshold: float = 0.0) -> "Table":
    """A table for the terminal, under a title of one's own unless that is empty.

    Args:
        threshold: the largest p of a difference that holds among all that are shown.
    """
    from rich.markup import escape
    from rich.table import Table

    words = grid.headline.replace("_", " ")
    by_length = " by length" if any(grid.columns) else ""
    name = f"{title}: " if title else ""
    table = Table(title=escape(f"{name}{grid.task}, {words}{by_length}"))
    table.add_column("")
    for column in grid.columns:
        table.add_column(column_name(column), justify="right")
    for row in grid.rows:
        cells = [
            "\n".join(filter(None, (grid.text(row, one), grid.verdict(row, one, threshold))))
            for one in grid.columns
        ]
        table.add_row(escape(row), *cells)
    return table


def _text(line: Line, headline: str) -> str:
    """The number, and what is known of its error: a 95 % interval, or one standard error."""
    result = line["result"]
    value = result.get(headline)
    if value is None:
        return "–"
    interval = ""
    if headline == "accuracy" and result.get("low") is not None:
        interval = f" [{result['low']:.2f}, {result['high']:.2f}]"
    if (error := result.get(f"{headline}_stderr")) is not None:
        interval = f" ± {style.number(error, 2)}"
    return style.number(value) + interval
