"""Numbers of runs, read from a frame of records (`records.frame`)."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.records.runs import MAPS, Key, Measure, measure_key
from clearhead.report.pivots import Found

if TYPE_CHECKING:
    from pandas import DataFrame

Place = tuple[str, str]
"""A source and a label in it."""
Patterns = str | tuple[str, ...]
"""Patterns of an arm's name, in order of preference: the first with numbers counts (committed
records have other names than new ones)."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number of every run of an arm.

    Attributes:
        metric, at: the measures; a seed's number is the mean of all that match, over all arms of
            the pattern, so that the main effects of a factorial are contrasts.
        times: length of the text in training lengths; None is any.
        label: pattern of the labels of the records to read.
        swing: dimensions at which the number is read once more; the number is then how far the two
            lie apart.
        less: arm whose number is taken away within a seed; the number is then a lead.
    """

    arm: tuple[str, ...] = ()
    metric: str
    at: Mapping[str, Any] = field(default_factory=dict)
    times: float | None = None
    label: str = "*"
    swing: Mapping[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ()

    @property
    def within(self) -> "Reading | None":
        """The loss or perplexity at the training length that goes with one anywhere; None of a
        number of another kind."""
        metric = "loss" if self.metric.startswith("ar_hit") else self.metric
        if not metric.endswith(("loss", "perplexity")) or metric.startswith("added"):
            return None
        at = {} if metric == "loss" else self.at
        times = None if self.times is None else 1.0
        return replace(self, metric=metric, at=at, times=times, swing={}, less=())

    def of(self, arm: Patterns, **changes: Any) -> "Reading":
        """The same number of an arm."""
        return replace(self, arm=(arm,) if isinstance(arm, str) else arm, **changes)

    def side(self, frame: "DataFrame") -> "Side":
        """Its numbers, and those of what is taken away."""
        less = replace(self, arm=self.less, less=()) if self.less else None
        return Side(rows=self.rows(frame), taken=None if less is None else less.rows(frame))

    def rows(self, frame: "DataFrame") -> "list[Row]":
        """The final numbers: milestones of a training and missing values are none.

        A number that a task measured aside has the name of another text's: it counts where it is
        alone. So does one of windows that open documents (`at`), unless it is asked for. Of several
        maps the one that multiplies the values counts, which is the last.
        """
        fits = (frame["metric"] == self.metric) & frame["step"].isna() & frame["value"].notna()
        if self.times is not None:
            fits &= frame["length"] == (self.times * frame["sequence_length"]).round()
        rows = frame[fits]
        ranks = {
            arm: next(n for n, one in enumerate(self.arm) if fnmatchcase(arm, one))
            for arm in rows["arm"].unique()
            if any(fnmatchcase(arm, one) for one in self.arm)
        }
        found = self._selected(rows, self.at, ranks)
        if self.swing:
            found = self._swings(found, self._selected(rows, {**self.at, **self.swing}, ranks))
        best: dict[Place, int] = {}
        for one in found:
            best[one.place] = min(best.get(one.place, len(ranks)), ranks[one.arm])
        return [one for one in found if ranks[one.arm] == best[one.place]]

    def _selected(
        self, rows: "DataFrame", at: Mapping[str, Any], arms: Collection[str]
    ) -> "list[Row]":
        for name, value in at.items():
            rows = rows[rows[name] == value]
        runs: dict[Any, list[Row]] = {}
        for one in map(Row._make, rows[[*Row._fields]].itertuples(index=False)):
            if one.arm in arms and fnmatchcase(one.label, self.label):
                runs.setdefault((one.source, one.label, one.run), []).append(one)
        return [one for found in runs.values() for one in _counting(found, at)]

    def _swings(self, first: "list[Row]", second: "list[Row]") -> "list[Row]":
        sides: list[dict[Any, list[Row]]] = [{}, {}]
        for side, rows in zip(sides, (first, second), strict=True):
            for one in rows:
                side.setdefault((one.source, one.run), []).append(one)
        means = [{run: mean([m.measure for m in ones]) for run, ones in x.items()} for x in sides]
        return [
            ones[0]._replace(
                measure=Measure(metric=self.metric, value=abs(means[0][run] - means[1][run]))
            )
            for run, ones in sides[0].items()
            if run in means[1]
        ]


class Row(NamedTuple):
    """A number of a run."""

    source: str
    label: str
    run: str
    arm: str
    seed: int
    at_edge: bool
    vocabulary: float
    learning_rate: float
    measure: Measure

    @property
    def place(self) -> Place:
        return self.source, self.label


def _counting(rows: "list[Row]", at: Mapping[str, Any]) -> "list[Row]":
    """Those of one run that count."""
    maps = {one.measure.dimensions.get("map") for one in rows}
    if last := next((name for name in reversed(MAPS) if name in maps), None):
        rows = [one for one in rows if one.measure.dimensions.get("map", last) == last]
    if "at" not in at:
        rows = [one for one in rows if "at" not in one.measure.dimensions] or rows
    return [one for one in rows if not one.measure.details.get("aside")] or rows


@dataclass(frozen=True, kw_only=True)
class Side:
    """The numbers of a reading; `taken` are those of the arm whose number is taken away."""

    rows: list[Row]
    taken: list[Row] | None = None

    def at(self, place: Place) -> "Side":
        """Those of one source and label."""
        rows, taken = (
            None if ones is None else [one for one in ones if one.place == place]
            for ones in (self.rows, self.taken)
        )
        return Side(rows=rows or [], taken=taken)

    def labels(self, source: str) -> list[str]:
        """The labels of a source: of the run just made ("") first."""
        labels = dict.fromkeys(one.label for one in self.rows if one.source == source)
        return sorted(labels, key=lambda one: one != "")

    @property
    def rates(self) -> set[float]:
        """The learning rates of its runs; none of models that were not trained here."""
        return {one.learning_rate for one in self.rows if not math.isnan(one.learning_rate)}

    @property
    def at_edge(self) -> bool:
        """True if a better learning rate may be had for one of the runs."""
        return any(one.at_edge for one in (*self.rows, *(self.taken or ())))

    def by_seed(self, shared: Set[Key], apart: Collection[str]) -> Found:
        """By seed, the measures at the shared places. A seed that lacks one of the pattern's arms
        is left out: its mean would be another mean."""
        found = _by_seed(self.rows, shared, apart)
        if self.taken is None:
            return found
        taken = _by_seed(self.taken, shared, apart)
        return {
            seed: [Measure(metric=ones[0].metric, value=mean(ones) - mean(taken[seed]))]
            for seed, ones in found.items()
            if seed in taken
        }


def _by_seed(rows: Sequence[Row], shared: Set[Key], apart: Collection[str]) -> Found:
    seeds: dict[int, list[Row]] = {}
    for one in rows:
        seeds.setdefault(one.seed, []).append(one)
    arms = {one.arm for one in rows}
    found = {
        seed: [one.measure for one in ones if _place(one.measure, apart) in shared]
        for seed, ones in seeds.items()
        if {one.arm for one in ones} == arms
    }
    return {seed: ones for seed, ones in found.items() if ones}


def shared(sides: Iterable[Side], apart: Collection[str]) -> Set[Key]:
    """The places at which all runs of these have a number."""
    places: dict[Any, set[Key]] = {}
    for side in sides:
        for one in (*side.rows, *(side.taken or ())):
            places.setdefault((one.place, one.run), set()).add(_place(one.measure, apart))
    return set.intersection(*places.values()) if places else set()


def _place(measure: Measure, apart: Collection[str]) -> Key:
    kept = {name: one for name, one in measure.dimensions.items() if name not in apart}
    return measure_key(measure.metric, kept)


def mean(measures: Sequence[Measure]) -> float:
    """The mean of the values."""
    return fmean(one.value for one in measures if one.value is not None)
