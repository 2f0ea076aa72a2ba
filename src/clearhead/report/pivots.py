"""The generic table: arms and dimensions, over seeds, with mean, interval and verdict."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

from clearhead.records.runs import Measure
from clearhead.report import style
from clearhead.report.statistics import (
    Component,
    Difference,
    alike_trials,
    compare,
    compare_ratio,
    component,
    summarize,
)
from clearhead.report.verdicts import interval_in_words

Found = dict[int, list[Measure]]  # by seed, those with a value
R = TypeVar("R")
C = TypeVar("C")


class Block:
    """A part of a section, which the template shows by its kind."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Heading:
    """A row's or a column's name; `arm` is whose colour it has."""

    title: str
    group: str = ""
    note: str = ""
    arm: str | None = None


@dataclass(frozen=True)
class Entry:
    """One number of a cell.

    Attributes:
        name: tells apart numbers of one cell, such as the maps of differential attention.
        detail: shown when one points at the number.
        difference: to the reference.
        note: shown under the number where no verdict is: why it is missing.
    """

    text: str
    name: str = ""
    detail: str = ""
    difference: Difference | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Pivot(Block):
    """A table; `cells` are by row and column, and may be empty."""

    title: str
    corner: str
    rows: tuple[Heading, ...]
    columns: tuple[Heading, ...]
    cells: tuple[tuple[tuple[Entry, ...], ...], ...]

    def differences(self) -> Iterator[Difference]:
        """All differences that the table shows."""
        for row in self.cells:
            for cell in row:
                yield from (entry.difference for entry in cell if entry.difference is not None)

    def groups(self) -> dict[str, list[int]]:
        """Places of the columns by group, in order."""
        places: dict[str, list[int]] = {}
        for place, column in enumerate(self.columns):
            places.setdefault(column.group, []).append(place)
        return places


def entry(
    mine: Found,
    theirs: Found,
    *,
    reference: str,
    scale: float = 1.0,
    write: Callable[[float], str] | None = None,
    given: bool = False,
) -> Entry:
    """A number over seeds, within a seed the mean of its measures, and its difference.

    Args:
        theirs: measures of the reference; empty where there is nothing to compare with.
        given: as `Records.given`.
    """
    unit = ""
    if write is style.percent:
        scale, unit = 100 * scale, "\u00a0%"
    over = summarize(by_seed(mine, scale))
    assert over is not None
    text = style.with_spread(over.mean, over.deviation) + unit
    if write is not None and not over.deviation:
        text = write(over.mean / (100 if unit else 1))
    detail = "one model" if given else "one seed" if over.n == 1 else f"{over.n} seeds, all alike"
    if over.interval is not None:
        low, high = (style.number(bound, 4) for bound in over.interval)
        detail = f"{over.n} seeds, 95 % interval of the mean: {low} to {high}"
    elif over.n == 1 and len(measures := next(iter(mine.values()))) == 1:
        text += _error_of_one(measures[0], scale)
    difference = difference_of(mine, theirs, scale, given=given)
    if difference is not None:
        detail += interval_in_words(difference, f"difference to {reference}")
    return Entry(text, detail=detail, difference=difference)


def difference_of(
    mine: Found,
    theirs: Found,
    scale: float = 1.0,
    against: float = 0.0,
    *,
    relative: bool = False,
    given: bool = False,
) -> Difference | None:
    """The difference of two arms over their seeds, its error that of drawn items included; None
    where an arm has no number.

    Args:
        relative: as a share of the mean of `theirs`, whatever the scale.
        given: as `Records.given`: drawn items are then the only error.
    """
    if not mine or not theirs:
        return None
    compared = frozenset(
        frozenset((seed, one.key, one.value) for seed, ones in side.items() for one in ones)
        for side in (mine, theirs)
    )
    sides = by_seed(mine, scale), by_seed(theirs, scale)
    items = partial(_item_error, mine, theirs, scale)
    if relative:
        return compare_ratio(*sides, items, against=against, compared=compared)
    return compare(*sides, items(1.0), against=against, compared=compared, given=given)


def by_seed(measures: Found, scale: float = 1.0) -> list[float]:
    """One number a seed, the mean of its measures, times `scale`."""
    return [
        scale * fmean(one.value for one in ones if one.value is not None)
        for ones in measures.values()
    ]


def _error_of_one(measure: Measure, scale: float) -> str:
    """Error of one number: a 95 % interval, or one standard error."""
    if (interval := measure.details.get("interval")) is not None:
        return f" {style.interval(*(scale * bound for bound in interval))}"
    if (error := measure.details.get("stderr")) is not None:
        return f" ± {style.number(scale * error, 2)}"
    return ""


def _item_error(mine: Found, theirs: Found, scale: float, ratio: float) -> tuple[Component, ...]:
    """The error of drawing these keys or documents and no others; empty where records lack them.

    Items are drawn a cell at a time, so the variances of its depths' means are added. An item's
    number is its mean over seeds less `ratio` times the reference's: what both find hard is no
    error.
    """
    strata, trials = list[Component](), True
    for key in {one.key for ones in mine.values() for one in ones}:
        means = []
        for side in (mine, theirs):
            same = [one for ones in side.values() for one in ones if one.key == key]
            items = [one.details.get("items", ()) for one in same]
            if not items or len({len(one) for one in items}) != 1 or len(items[0]) < 2:
                return ()
            trials = trials and all(item in (0, 1) for one in items for item in one)
            means.append([fmean(one) for one in zip(*items, strict=True)])
        if len(means[0]) != len(means[1]):
            return ()
        strata.append(component([a - ratio * b for a, b in zip(*means, strict=True)]))
    variance = sum(one.variance for one in strata) / len(strata) ** 2
    degrees = sum(one.degrees for one in strata)
    error = Component(variance=variance, degrees=degrees)
    if trials and not variance:
        error = alike_trials(int(degrees) + len(strata))
    return (replace(error, variance=scale**2 * error.variance),)


def build(
    title: str,
    rows: Iterable[tuple[Heading, R]],
    columns: Iterable[tuple[Heading, C]],
    fill: Callable[[R, C], tuple[Entry, ...]],
    *,
    corner: str = "",
) -> Pivot | None:
    """Fill a table; rows and columns without numbers are left out, None where all are."""
    rows, columns = list(rows), list(columns)
    cells = [[fill(row, column) for _, column in columns] for _, row in rows]
    across = [place for place in range(len(columns)) if any(row[place] for row in cells)]
    down = [place for place in range(len(rows)) if any(cells[place])]
    if not down:
        return None
    return Pivot(
        title=title,
        corner=corner,
        rows=tuple(rows[place][0] for place in down),
        columns=tuple(columns[place][0] for place in across),
        cells=tuple(tuple(cells[i][j] for j in across) for i in down),
    )
