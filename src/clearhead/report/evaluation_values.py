"""What several runs scored: a row a model and setting, over seeds."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from clearhead.report import style
from clearhead.report.evaluations import Grid, row_name
from clearhead.report.records import Records
from clearhead.report.statistics import (
    Component,
    Difference,
    Summary,
    compare,
    component,
    summarize,
)

Cells = dict[int, list[Mapping[str, Any]]]  # by seed


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
    """A table a headline: mean ± standard deviation over seeds, means over depths within a seed;
    and the difference of each number to the baseline's under the same setting."""
    cells = [cell for run in records.runs for cell in run.cells if cell["task"] == task]
    found = []
    for headline in dict.fromkeys(str(name) for cell in cells for name in cell["headlines"]):
        rows = _measured(records, task, headline)
        texts, differences = {}, {}
        for row, columns in rows.items():
            reference = rows.get(Row(records.arms()[0], row.setting), {})
            for column, cells_by_seed in columns.items():
                place_of = row.name, column[0]
                summary = summarize(_by_seed(cells_by_seed, headline))
                assert summary is not None
                texts[place_of] = style.with_spread(summary.mean, summary.deviation)
                if row.arm != records.arms()[0] and column in reference:
                    differences[place_of] = _difference(cells_by_seed, reference[column], headline)
        if rows:
            grid = Grid(
                task=task,
                headline=headline,
                columns=tuple(sorted({length for _, length in texts})),
                rows=tuple(row.name for row in rows),
                texts=texts,
                differences=differences,
            )
            found.append(grid)
    return found


def values(
    records: Records, task: str, headline: str, *, apart: tuple[str, ...] = ()
) -> dict[Row, dict[tuple[Any, ...], Summary]]:
    """By row and by (length, *apart), over seeds; within a seed the mean over what is not apart."""
    return {
        row: {
            column: summary
            for column, by_seed in columns.items()
            if (summary := summarize(_by_seed(by_seed, headline))) is not None
        }
        for row, columns in _measured(records, task, headline, apart=apart).items()
    }


def _measured(
    records: Records, task: str, headline: str, *, apart: tuple[str, ...] = ()
) -> dict[Row, dict[tuple[Any, ...], Cells]]:
    """The cells that have the headline, by row and by (length, *apart)."""
    found: dict[Row, dict[tuple[Any, ...], Cells]] = {}
    for run in records.runs:
        # Of two lines on one cell the later counts.
        latest = {place(cell): cell for cell in run.cells if cell["task"] == task}
        for cell in latest.values():
            at = cell["at"]
            if cell["result"].get(headline) is None:
                continue
            column = (at.get("length", 0), *(at.get(key) for key in apart))
            columns = found.setdefault(Row(run.arm, setting(at)), {})
            columns.setdefault(column, defaultdict(list))[run.seed].append(cell)
    return found


def _by_seed(cells: Cells, headline: str) -> list[float]:
    return [fmean(float(cell["result"][headline]) for cell in mine) for mine in cells.values()]


def _difference(cells: Cells, reference: Cells, headline: str) -> Difference:
    """The difference to the reference, with the error of the drawn items where cells carry them."""
    error = _item_error(cells, reference, headline)
    found = compare(
        _by_seed(cells, headline), _by_seed(reference, headline), () if error is None else (error,)
    )
    assert found is not None
    return found


def _item_error(cells: Cells, reference: Cells, headline: str) -> Component | None:
    """The error of drawing these keys or documents and no others; None where cells lack them.

    Items are drawn a cell at a time, so the variances of its depths' means are added. An item's
    number is its mean over seeds less the reference's: what both find hard is no error.
    """
    strata: list[Component] = []
    for name in {place(cell) for mine in cells.values() for cell in mine}:
        means = []
        for side in (cells, reference):
            found = [
                items(cell, headline)
                for mine in side.values()
                for cell in mine
                if place(cell) == name
            ]
            if not found or len({len(one) for one in found}) != 1 or len(found[0]) < 2:
                return None
            means.append([fmean(one) for one in zip(*found, strict=True)])
        if len(means[0]) != len(means[1]):
            return None
        strata.append(component([a - b for a, b in zip(*means, strict=True)]))
    return Component(
        variance=sum(one.variance for one in strata) / len(strata) ** 2,
        degrees=sum(one.degrees for one in strata),
    )


def items(cell: Mapping[str, Any], headline: str) -> list[float]:
    """A number for each key or document of a cell, their mean near the headline; none if unknown.

    A document's perplexity is set beside the whole's on the scale of the loss.
    """
    result = cell["result"]
    if headline == "perplexity":
        whole = float(result[headline])
        documents = [one["loss"] for one in result.get("documents", ())]
        if not documents or None in documents:
            return []
        return [whole * (1 + loss - result["loss"]) for loss in documents]
    return [float(one) for one in result.get(f"{headline}_by_item", ())]


def setting(at: Mapping[str, Any]) -> str:
    """All dimensions of a cell but its length and depth, in words."""
    return row_name({key: value for key, value in at.items() if key != "depth"})


def place(cell: Mapping[str, Any]) -> str:
    """What tells a cell from the others of its run and task."""
    return repr(sorted(cell["at"].items()))
