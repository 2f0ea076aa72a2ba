"""Numbers of runs, read from a frame of records (`records.frame`)."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import TYPE_CHECKING, Any

from clearhead.records.runs import MAPS, Key, Measure, measure_key
from clearhead.report.pivots import Found, by_seed

if TYPE_CHECKING:
    from pandas import DataFrame

Place = tuple[str, str]
"""A source and a label in it."""
Patterns = str | tuple[str, ...]
"""Patterns of an arm's name, in order of preference: the first with numbers counts (committed
records have other names than new ones)."""
Row = Any
"""A row of the frame (`itertuples`)."""
COLUMNS = ["source", "label", "run", "arm", "seed", "measure"]
COLUMNS += ["vocabulary", "learning_rate", "at_edge"]


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

    def sides(self, frame: "DataFrame") -> "dict[Place, Side]":
        """Its numbers by source and label."""
        subtracted = {} if self.minus is None else self.minus._rows(frame)
        return {
            place: Side(self, rows, subtracted.get(place, []))
            for place, rows in self._rows(frame).items()
        }

    def _rows(self, frame: "DataFrame") -> dict[Place, list[Row]]:
        """The final numbers: milestones of a training and missing values are none."""
        fits = (frame["metric"] == self.metric) & frame["step"].isna() & frame["value"].notna()
        if self.times is not None:
            fits &= frame["length"] == (self.times * frame["sequence_length"]).round()
        for name, value in self.at.items():
            fits &= frame[name] == value
        # By place the rows of each run, with the rank of the pattern that its arm matches.
        runs: dict[Place, dict[tuple[int, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in frame.loc[fits, COLUMNS].itertuples(index=False):
            ranks = [n for n, pattern in enumerate(self.arm) if fnmatchcase(row.arm, pattern)]
            if ranks and fnmatchcase(row.label, self.label):
                runs[row.source, row.label][ranks[0], row.run].append(row)
        return {
            place: [
                row
                for (rank, _), rows in by_run.items()
                if rank == min(by_run)[0]
                for row in _counting(rows, self.at)
            ]
            for place, by_run in runs.items()
        }


def _counting(rows: list[Row], at: Mapping[str, Any]) -> list[Row]:
    """The rows of one run that count.

    A number that a task measured aside has the name of another text's: it counts where it is
    alone. So does one of windows that open documents (`at`), unless it is asked for. Of several
    maps the one that multiplies the values counts, which is the last.
    """
    maps = {row.measure.dimensions.get("map") for row in rows}
    if last := next((name for name in reversed(MAPS) if name in maps), None):
        rows = [row for row in rows if row.measure.dimensions.get("map", last) == last]
    if "at" not in at:
        rows = [row for row in rows if "at" not in row.measure.dimensions] or rows
    return [row for row in rows if not row.measure.details.get("aside")] or rows


@dataclass(frozen=True)
class Side:
    """The rows of a reading in one source and label, and those of the number subtracted."""

    reading: Reading
    rows: list[Row]
    subtracted: list[Row]

    @property
    def all(self) -> list[Row]:
        return [*self.rows, *self.subtracted]

    @property
    def level(self) -> float | None:
        """The mean over seeds; None where a run has no number that the others have."""
        (values,) = measures(self)
        return fmean(by_seed(values)) if values else None

    @property
    def has_learnt(self) -> bool:
        """True if the mean perplexity is below √vocabulary, or is not known."""
        level, sizes = self.level, [row.vocabulary for row in self.rows if row.vocabulary > 0]
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
    places: dict[Any, set[Key]] = defaultdict(set)
    for row in (row for side in sides for row in side.all):
        places[row.source, row.label, row.run].add(_key(row.measure, apart))
    shared = set.intersection(*places.values()) if places else set()

    def at_shared(rows: Sequence[Row]) -> Found:
        """A seed that lacks one of the pattern's arms is left out: its mean would be another."""
        arms, values = {row.arm for row in rows}, Found()
        for seed in dict.fromkeys(row.seed for row in rows):
            of_seed = [row for row in rows if row.seed == seed]
            there = [row.measure for row in of_seed if _key(row.measure, apart) in shared]
            if there and {row.arm for row in of_seed} == arms:
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


def _key(measure: Measure, apart: Collection[str]) -> Key:
    dimensions = {name: x for name, x in measure.dimensions.items() if name not in apart}
    return measure_key(measure.metric, dimensions)


def mean(ones: Sequence[Measure]) -> float:
    return fmean(one.value for one in ones if one.value is not None)
