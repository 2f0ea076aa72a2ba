"""The generic table: numbers of runs by arm, over seeds, with mean, interval and verdict.

A `Quantity` is a number's address in the records under a heading; its entries are cells.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from clearhead.errors import NOT_FINITE
from clearhead.records.runs import COMPARISON, Measure, Records, Run
from clearhead.report import style
from clearhead.report.statistics import (
    Component,
    Difference,
    Verdict,
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
class Pivot:
    """A table; `cells` are by row and column, and may be empty."""

    title: str
    corner: str
    rows: tuple[Heading, ...]
    columns: tuple[Heading, ...]
    cells: tuple[tuple[tuple[Entry, ...], ...], ...]

    def differences(self) -> Iterator[Difference]:
        """All differences that the table shows."""
        entries = (entry for row in self.cells for cell in row for entry in cell)
        return (entry.difference for entry in entries if entry.difference is not None)

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


SHARE = "first_token_argmax_share"


def _outlier(run: Run) -> float | None:
    top, median = run.value("hidden_top_1"), run.value("hidden_median")
    return None if top is None or not median else top / median


def _outlier_channels(run: Run) -> float | None:
    """Number of outlier channels; None if no hidden states were measured."""
    lines = run.payload("channel")
    measured = lines or run.measure("hidden_top_1") is not None
    return float(lines[0]["of"] if lines else 0) if measured else None


def _sink(run: Run) -> float | None:
    """First-token argmax share: of the difference of maps if there is one, else of softmax."""
    values = (run.value(SHARE, map=name) for name in ("difference", "softmax"))
    return next((one for one in values if one is not None), None)


DERIVED: dict[str, Callable[[Run], float | None]] = {
    "parameters": lambda run: run.header.get("parameters"),
    "non_embedding_parameters": lambda run: run.header.get("non_embedding_parameters"),
    "trained perplexity": lambda run: run.value("perplexity", length=run.sequence_length),
    "outlier": _outlier,
    "outlier_channels": _outlier_channels,
    "sink": _sink,
}
"""Numbers of a run that are no single measure: of its header, or made of several measures."""


@dataclass(frozen=True)
class Quantity(Heading):
    """A number of every run under its heading, shown as value × scale.

    Attributes:
        metric, at: the measure at exactly these dimensions, or one of `DERIVED`; "layer" may be
            "first" or "last".
        by_map: it has a number for each attention map.
        pooled: the mean over all other dimensions is meant.
        judged: whether a difference to the reference is a result.
        one_device: whether runs on other devices than most do not count.
    """

    metric: str = ""
    at: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    write: Callable[[float], str] | None = None
    by_map: bool = False
    pooled: bool = False
    judged: bool = True
    one_device: bool = False

    def measures(self, run: Run) -> list[Measure]:
        """Measures of a run, missing values included."""
        if self.pooled:
            return run.select(self.metric, **self.at)
        if self.metric in DERIVED:
            value = DERIVED[self.metric](run)
            return [] if value is None else [Measure(metric=self.metric, value=float(value))]
        if self.at.get("layer") in ("first", "last"):
            layers = [one for one in run.select(self.metric) if "layer" in one.dimensions]
            layers.sort(key=lambda one: one.dimensions["layer"])
            return layers[:1] if self.at["layer"] == "first" else layers[-1:]
        one = run.measure(self.metric, **self.at)
        return [] if one is None else [one]

    def found(self, records: Records, arm: str) -> Found:
        """The measures of an arm that have a value, by seed; of a pooled number none where one of
        its parts is not finite."""
        lines = {run.seed: self.measures(run) for run in records.of(arm)}
        if self.pooled and any(one.not_finite for ones in lines.values() for one in ones):
            return {}
        valued = {
            seed: [one for one in ones if one.value is not None] for seed, ones in lines.items()
        }
        return {seed: ones for seed, ones in valued.items() if ones}

    def entries(self, records: Records, arm: str, reference: str) -> tuple[Entry, ...]:
        """The cell of an arm; empty where nothing was recorded."""
        records = records.on_one_device() if self.one_device else records
        if not self.by_map:
            return self._entry("", records, arm, [self], reference)
        cell: tuple[Entry, ...] = ()
        for name in records.dimension(self.metric, "map", arm):
            # Maps that plain attention lacks are held against its only one.
            maps = [replace(self, at={**self.at, "map": one}) for one in (name, "softmax")]
            shown = "" if name == "softmax" else name
            cell += self._entry(shown, records, arm, maps, reference)
        return cell

    def _entry(
        self, name: str, records: Records, arm: str, numbers: list["Quantity"], reference: str
    ) -> tuple[Entry, ...]:
        """The first of `numbers`, its difference to the first that the reference has."""
        mine, theirs = numbers[0].found(records, arm), Found()
        if not mine:
            known = [one for run in records.of(arm) for one in numbers[0].measures(run)]
            reasons = [one.reason for one in known if one.reason]
            text = NOT_FINITE if any(one.not_finite for one in known) else "none"
            note = next(iter(reasons), "").removeprefix(text).removeprefix(": ")
            return (Entry(text, name, note=note),) if known else ()
        if self.judged and arm != reference:
            sides = (one.found(records, reference) for one in numbers)
            theirs = next(filter(None, sides), theirs)
        number = entry(
            mine,
            theirs,
            reference=reference,
            scale=self.scale,
            write=self.write,
            given=without_seeds(records),
        )
        return (replace(number, name=name),)


def arm_headings(records: Records) -> list[tuple[Heading, str]]:
    """A heading for each arm, whose note says what holds for all of its numbers: with one seed no
    difference is decided."""
    headings = []
    for place, arm in enumerate(records.arms()):
        runs, n = records.of(arm), len(records.whole(arm))
        seeds = str(Verdict.ONE_SEED) if n == 1 and place else seeds_in_words(n)
        notes = {
            "reference": place == 0 and len(records.arms()) > 1,
            seeds: not without_seeds(records),
            f"{len(runs) - n} of {len(runs)} runs diverged": n < len(runs),
            "rate at the edge": records.at_edge(arm),
            "hardly learnt": any(map(_hardly_learnt, runs)),
        }
        note = ", ".join(words for words, holds in notes.items() if holds)
        headings.append((Heading(arm, note=note, arm=arm), arm))
    return headings


def _hardly_learnt(run: Run) -> bool:
    """True of a perplexity above the square root of the vocabulary."""
    perplexity = run.value("perplexity", length=run.sequence_length)
    return perplexity is not None and perplexity**2 > (run.vocabulary or math.inf)


def by_arm(
    records: Records,
    title: str,
    quantities: Iterable[Quantity],
    *,
    corner: str = "model",
    arms_across: bool = False,
) -> Pivot | None:
    """A table of quantities by arm, a row an arm, or a column where `arms_across`."""
    arms, reference = arm_headings(records), next(iter(records.arms()), "")
    named = [(one, one) for one in quantities]
    if arms_across:
        return build(title, named, arms, lambda one, arm: one.entries(records, arm, reference))
    return build(
        title, arms, named, lambda arm, one: one.entries(records, arm, reference), corner=corner
    )


def without_seeds(records: Records) -> bool:
    """True of models whose seeds are no sample: those that came as they are, and those that were
    diagnosed or quantised once each, whatever trained them."""
    compared = any(run.study == COMPARISON or len(records.of(run.arm)) > 1 for run in records.runs)
    return records.given or not compared


def seeds_in_words(n: int) -> str:
    """1 seed; 3 seeds."""
    return "1 seed" if n == 1 else f"{n} seeds"
