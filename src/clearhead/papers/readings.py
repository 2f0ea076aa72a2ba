"""Numbers of the runs of one source and label."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from statistics import fmean
from typing import Any

from clearhead.records.runs import MAPS, Key, Measure, Run
from clearhead.report.pivots import Found, by_seed

Patterns = str | tuple[str, ...]
"""Patterns of an arm's name, in order of preference: the first with numbers counts (committed
records have other names than new ones)."""
Labelled = Mapping[str, Sequence[Run]]
"""Runs by label."""
Rows = list[tuple[Run, list[Measure]]]
"""Runs, each with its measures of a number."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number of every run of an arm.

    Attributes:
        metric, at: the measures; a seed's number is the mean of all that match, over all arms of
            the pattern, so that the main effects of a factorial are contrasts.
        times: length of the text in training lengths; None is any.
        label: pattern of the labels of the records to read.
        minus: a number that is subtracted within each seed.
        distance: the absolute value of that difference.
    """

    arm: tuple[str, ...] = ()
    metric: str
    at: Mapping[str, Any] = field(default_factory=dict)
    times: float | None = None
    label: str = "*"
    minus: "Reading | None" = None
    distance: bool = False

    @property
    def parts(self) -> "tuple[Reading, ...]":
        """The number itself, and the one subtracted."""
        return (self,) if self.minus is None else (self, self.minus)

    @property
    def within(self) -> "Reading | None":
        """The loss or perplexity at the training length that goes with one anywhere; None of a
        number of another kind."""
        metric = "loss" if self.metric.startswith("ar_hit") else self.metric
        if not metric.endswith(("loss", "perplexity")) or metric.startswith("added"):
            return None
        at = {} if metric == "loss" else self.at
        times = None if self.times is None else 1.0
        return replace(self, metric=metric, at=at, times=times, minus=None)

    def of(self, arm: Patterns, **changes: Any) -> "Reading":
        """The same number of an arm."""
        return replace(self, arm=(arm,) if isinstance(arm, str) else arm, **changes)

    def side(self, label: str, runs: Labelled) -> "Side | None":
        """Its numbers under a label of one source; None where there is none."""
        subtracted = self.minus._rows(label, runs) if self.minus else []
        return Side(self, rows, subtracted) if (rows := self._rows(label, runs)) else None

    def _rows(self, label: str, runs: Labelled) -> Rows:
        """The runs that have the number, of the first pattern that any matches."""
        by_rank: dict[int, Rows] = defaultdict(list)
        for run in runs[label] if fnmatchcase(label, self.label) else ():
            rank = _rank(run.arm, self.arm)
            if rank is not None and (measures := self._measures(run)):
                by_rank[rank].append((run, measures))
        return by_rank[min(by_rank)] if by_rank else []

    def _measures(self, run: Run) -> list[Measure]:
        """The final measures of a run: milestones of its training and missing values are none.

        A number that a task measured aside has the name of another text's: it counts where it is
        alone. So does one of windows that open documents (`at`), unless it is asked for. Of several
        maps the one that multiplies the values counts, which is the last.
        """
        at = {"step": None, **self.at}
        if self.times is not None:
            at["length"] = round(self.times * (run.sequence_length or -1))
        ones = [one for one in run.select(self.metric, **at) if one.value is not None]
        maps = {one.dimensions.get("map") for one in ones}
        if last := next((name for name in reversed(MAPS) if name in maps), None):
            ones = [one for one in ones if one.dimensions.get("map", last) == last]
        if "at" not in self.at:
            ones = [one for one in ones if "at" not in one.dimensions] or ones
        return [one for one in ones if not one.details.get("aside")] or ones


@cache
def _rank(name: str, patterns: tuple[str, ...]) -> int | None:
    """The place of the first pattern that a name matches."""
    return next((n for n, one in enumerate(patterns) if fnmatchcase(name, one)), None)


@dataclass(frozen=True)
class Side:
    """The runs of a reading under one label, and those of the number subtracted."""

    reading: Reading
    rows: Rows
    subtracted: Rows

    @property
    def runs(self) -> list[Run]:
        return [run for run, _ in (*self.rows, *self.subtracted)]

    @property
    def level(self) -> float | None:
        """The mean over seeds; None where a run has no number that the others have."""
        (values,) = measures(self)
        return fmean(by_seed(values)) if values else None

    @property
    def has_learnt(self) -> bool:
        """True if the mean perplexity is below √vocabulary, or is not known."""
        level, sizes = self.level, [run.vocabulary for run, _ in self.rows if run.vocabulary]
        if level is None or not sizes:
            return True
        loss = self.reading.metric.endswith("loss")
        return (2 * level < math.log(min(sizes))) if loss else level**2 < min(sizes)


def measures(*sides: Side, apart: Collection[str] = ()) -> list[Found]:
    """{seed: measures} of each side, at the places that all runs of all sides have, less the
    numbers subtracted.

    Args:
        apart: dimensions in which the sides may differ.
    """

    def key(one: Measure) -> Key:
        metric, dimensions = one.key
        return metric, frozenset(item for item in dimensions if item[0] not in apart)

    places: dict[int, set[Key]] = defaultdict(set)
    for run, ones in (row for side in sides for row in (*side.rows, *side.subtracted)):
        places[id(run)].update(map(key, ones))
    shared = set.intersection(*places.values()) if places else set()

    def at_shared(rows: Rows) -> Found:
        """A seed that lacks one of the pattern's arms is left out: its mean would be another."""
        arms, values = {run.arm for run, _ in rows}, Found()
        for seed in dict.fromkeys(run.seed for run, _ in rows):
            of_seed = [row for row in rows if row[0].seed == seed]
            there = [one for _, ones in of_seed for one in ones if key(one) in shared]
            if there and {run.arm for run, _ in of_seed} == arms:
                values[seed] = there
        return values

    def of(side: Side) -> Found:
        values, reading = at_shared(side.rows), side.reading
        if reading.minus is None:
            return values
        minus = at_shared(side.subtracted)
        left = {seed: mean(values[seed]) - mean(minus[seed]) for seed in values if seed in minus}
        left = {seed: abs(x) if reading.distance else x for seed, x in left.items()}
        return {seed: [Measure(metric=reading.metric, value=x)] for seed, x in left.items()}

    return [of(side) for side in sides]


def mean(ones: Sequence[Measure]) -> float:
    return fmean(one.value for one in ones if one.value is not None)
