"""Numbers of runs, read from a frame of records (`records.frame`)."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
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
        less: a number that is taken away within each seed.
        distance: the absolute value of what then remains.
    """

    arm: tuple[str, ...] = ()
    metric: str
    at: Mapping[str, Any] = field(default_factory=dict)
    times: float | None = None
    label: str = "*"
    less: "Reading | None" = None
    distance: bool = False

    @property
    def parts(self) -> "tuple[Reading, ...]":
        """The number itself, and the one taken away."""
        return (self,) if self.less is None else (self, self.less)

    @property
    def within(self) -> "Reading | None":
        """The loss or perplexity at the training length that goes with one anywhere; None of a
        number of another kind."""
        metric = "loss" if self.metric.startswith("ar_hit") else self.metric
        if not metric.endswith(("loss", "perplexity")) or metric.startswith("added"):
            return None
        at = {} if metric == "loss" else self.at
        times = None if self.times is None else 1.0
        return replace(self, metric=metric, at=at, times=times, less=None)

    def of(self, arm: Patterns, **changes: Any) -> "Reading":
        """The same number of an arm."""
        return replace(self, arm=(arm,) if isinstance(arm, str) else arm, **changes)

    def sides(self, frame: "DataFrame") -> "dict[Place, Side]":
        """Its numbers by source and label, the run just made ("") before the labels of a source."""
        mine, less = self._rows(frame), self.less._rows(frame) if self.less else None
        sources = [*dict.fromkeys(source for source, _ in mine)]
        order = sorted(mine, key=lambda one: (sources.index(one[0]), one[1] != ""))
        return {
            place: Side(mine[place], None if less is None else less.get(place, []), self.distance)
            for place in order
        }

    def _rows(self, frame: "DataFrame") -> dict[Place, list[Row]]:
        """The final numbers: milestones of a training and missing values are none."""
        fits = (frame["metric"] == self.metric) & frame["step"].isna() & frame["value"].notna()
        if self.times is not None:
            fits &= frame["length"] == (self.times * frame["sequence_length"]).round()
        for name, value in self.at.items():
            fits &= frame[name] == value
        runs: dict[Any, list[Row]] = {}
        for one in frame.loc[fits, COLUMNS].itertuples(index=False):
            rank = next((n for n, each in enumerate(self.arm) if fnmatchcase(one.arm, each)), None)
            if rank is not None and fnmatchcase(one.label, self.label):
                runs.setdefault(((one.source, one.label), rank, one.run), []).append(one)
        best: dict[Place, int] = {}
        for place, rank, _ in runs:
            best[place] = min(rank, best.get(place, rank))
        by_place: dict[Place, list[Row]] = {}
        for (place, rank, _), rows in runs.items():
            if rank == best[place]:
                by_place.setdefault(place, []).extend(_counting(rows, self.at))
        return by_place


def _counting(rows: list[Row], at: Mapping[str, Any]) -> list[Row]:
    """The rows of one run that count.

    A number that a task measured aside has the name of another text's: it counts where it is
    alone. So does one of windows that open documents (`at`), unless it is asked for. Of several
    maps the one that multiplies the values counts, which is the last.
    """
    maps = {one.measure.dimensions.get("map") for one in rows}
    if last := next((name for name in reversed(MAPS) if name in maps), None):
        rows = [one for one in rows if one.measure.dimensions.get("map", last) == last]
    if "at" not in at:
        rows = [one for one in rows if "at" not in one.measure.dimensions] or rows
    return [one for one in rows if not one.measure.details.get("aside")] or rows


@dataclass(frozen=True)
class Side:
    """The numbers of a reading in one source and label.

    Attributes:
        taken: those that are taken away; None where nothing is.
    """

    rows: list[Row]
    taken: list[Row] | None = None
    distance: bool = False

    @property
    def all(self) -> list[Row]:
        return [*self.rows, *(self.taken or ())]

    @property
    def level(self) -> float | None:
        """The mean over seeds; None where a run has no number that the others have."""
        values = self.by_seed(shared([self], ()), ())
        return fmean(by_seed(values)) if values else None

    def by_seed(self, places: Set[Key], apart: Collection[str]) -> Found:
        """By seed, the measures at the shared places."""
        values = _by_seed(self.rows, places, apart)
        if self.taken is None:
            return values
        taken = _by_seed(self.taken, places, apart)
        both = [seed for seed in values if seed in taken]
        left = {seed: mean(values[seed]) - mean(taken[seed]) for seed in both}
        metric = self.rows[0].measure.metric
        return {
            seed: [Measure(metric=metric, value=abs(one) if self.distance else one)]
            for seed, one in left.items()
        }


def _by_seed(rows: Sequence[Row], places: Set[Key], apart: Collection[str]) -> Found:
    """A seed that lacks one of the pattern's arms is left out: its mean would be another mean."""
    arms = {one.arm for one in rows}
    values: Found = {}
    for seed in dict.fromkeys(one.seed for one in rows):
        ones = [one for one in rows if one.seed == seed]
        measures = [one.measure for one in ones if _key(one.measure, apart) in places]
        if measures and {one.arm for one in ones} == arms:
            values[seed] = measures
    return values


def shared(sides: Iterable[Side], apart: Collection[str]) -> Set[Key]:
    """The places at which all runs of these have a number."""
    places: dict[Any, set[Key]] = {}
    for one in (one for side in sides for one in side.all):
        run = one.source, one.label, one.run
        places.setdefault(run, set()).add(_key(one.measure, apart))
    return set.intersection(*places.values()) if places else set()


def _key(measure: Measure, apart: Collection[str]) -> Key:
    dimensions = {name: one for name, one in measure.dimensions.items() if name not in apart}
    return measure_key(measure.metric, dimensions)


def mean(measures: Sequence[Measure]) -> float:
    return fmean(one.value for one in measures if one.value is not None)
