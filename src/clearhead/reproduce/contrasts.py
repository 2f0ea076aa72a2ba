"""Comparisons that claims make, read from a frame of records (`records.frame`)."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from clearhead.records.runs import MAPS, Key, Measure, measure_key
from clearhead.report.pivots import Found, by_seed, difference_of
from clearhead.report.statistics import LEVEL, Difference, Summary, Verdict, summarize
from clearhead.report.verdicts import holds

if TYPE_CHECKING:
    from pandas import DataFrame

Place = tuple[str, str]
"""A source and a label in it."""
Patterns = str | tuple[str, ...]
"""Patterns of an arm's name, in order of preference: the first with numbers counts (committed
records have other names than new ones)."""


class Judgement(StrEnum):
    """Verdict of the records on a claim."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "untested"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number of every run of an arm.

    Attributes:
        metric, at: the measures; a seed's number is the mean of all that match, over all arms of
            the pattern, so that the main effects of a factorial are contrasts.
        times: length of the text in training lengths; None is any.
        label: pattern of the labels of the records to read.
        swing: dimensions in whose place the number is read once more; how far the two lie apart is
            then the number.
        less: arm whose number is taken away within a seed; the number is then a lead.
    """

    arm: tuple[str, ...] = ()
    metric: str
    at: Mapping[str, Any] = field(default_factory=dict)
    times: float | None = None
    label: str = "*"
    swing: Mapping[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ()

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
        means = [{run: _mean([m.measure for m in ones]) for run, ones in x.items()} for x in sides]
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
            seed: [Measure(metric=ones[0].metric, value=_mean(ones) - _mean(taken[seed]))]
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


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A number that must be reached; below it a record decides nothing.

    Attributes:
        why: what is missing where it is not.
    """

    reading: Reading
    least: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One comparison that a claim makes: a number of one arm against that of another.

    Attributes:
        words: the comparison as the book writes it.
        claimed: "lower" or "higher"; "not lower" or "not higher", by no more than `margin`, against
            which the difference is then tested.
        ours, theirs: the two numbers. Theirs is read under the label of ours unless it names
            another one.
        relative: both are divided by the mean of theirs; `margin` is then a share of it.
        counted: both numbers are counted and the same in every run, so that no spread is needed.
        blocked: both are means over the arms of a factorial, compared within each seed.
        gates: what a record must show to be counted.
    """

    words: str
    claimed: str
    ours: Reading
    theirs: Reading
    margin: float = 0.0
    relative: bool = False
    counted: bool = False
    blocked: bool = False
    gates: tuple[Gate, ...] = ()

    @property
    def bound(self) -> float:
        """The difference on whose other side the claim fails: 0, or the margin that it allows."""
        return {"not higher": self.margin, "not lower": -self.margin}.get(self.claimed, 0.0)

    @property
    def arms(self) -> set[str]:
        """Patterns of all arms that it reads."""
        readings = (self.ours, self.theirs, *(one.reading for one in self.gates))
        return {name for one in readings for name in (*one.arm, *one.less)}

    def outcomes(self, frame: "DataFrame") -> "Iterator[Outcome]":
        """The difference in each source and under each label where both arms have a number."""
        mine, theirs = (one.side(frame) for one in (self.ours, self.theirs))
        gates = [(one, one.reading.side(frame)) for one in self.gates]
        for source in dict.fromkeys(one.source for one in mine.rows):
            for label in mine.labels(source):
                there: str | None = label
                if self.theirs.label != self.ours.label:
                    there = next(iter(theirs.labels(source)), None)
                if there is not None:
                    places = (source, label), (source, there)
                    chosen = mine.at(places[0]), theirs.at(places[1])
                    found = self._outcome(places, chosen, gates)
                    if found is not None:
                        yield found

    def _outcome(
        self, places: Sequence[Place], chosen: Sequence[Side], gates: Sequence[tuple[Gate, Side]]
    ) -> "Outcome | None":
        shared = _shared(chosen, self._apart)
        mine, theirs = (one.by_seed(shared, self._apart) for one in chosen)
        test = partial(_blocked, mine, theirs)
        if not self.blocked:
            test = partial(_test, mine, theirs, self.relative)
        difference = test(self.bound)
        if difference is None:
            return None
        scale = 1 / fmean(by_seed(theirs)) if self.relative else 1.0
        arm, than = (summarize(by_seed(side, scale)) for side in (mine, theirs))
        assert arm is not None
        assert than is not None
        source, label = places[0]
        return Outcome(
            contrast=self,
            source=f"{source}, {label}" if label else source,
            arm=arm,
            than=than,
            difference=difference,
            test=test,
            missing=next((g.why for g, rows in gates if not _passes(g, rows, places)), ""),
            at_edge=(chosen[0].at_edge, chosen[1].at_edge),
        )

    @property
    def _apart(self) -> Set[str]:
        """Dimensions in which the two sides may differ: the map, a length in training lengths, and
        those that one reading has otherwise than the other."""
        ours, theirs = self.ours.at, self.theirs.at
        named = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
        return {"map", *named, *(() if self.ours.times is None else ("length",))}


def _test(mine: Found, theirs: Found, relative: bool, against: float) -> Difference | None:
    return difference_of(mine, theirs, against=against, relative=relative)


def _blocked(mine: Found, theirs: Found, against: float) -> Difference | None:
    """The mean difference within a seed: compositions of one seed share its data and much of its
    luck, so that seeds are blocks."""
    from scipy.stats import ttest_1samp

    found = difference_of(mine, theirs, against=against)
    seeds = [seed for seed in mine if seed in theirs]
    apart = [_mean(mine[seed]) - _mean(theirs[seed]) for seed in seeds]
    if found is None or len(seeds) < 2 or max(apart) == min(apart):
        return found
    test = ttest_1samp(apart, against)
    interval = test.confidence_interval(1 - LEVEL)
    return replace(
        found,
        mean=fmean(apart),
        interval=(float(interval.low), float(interval.high)),
        p=float(test.pvalue),
    )


def _passes(gate: Gate, side: Side, places: Sequence[Place]) -> bool:
    """True if the mean under the first of these labels that the gate reads is high enough."""
    fitting = (place for place in places if fnmatchcase(place[1], gate.reading.label))
    side = side.at(next(fitting, places[0]))
    found = side.by_seed(_shared([side], ()), ())
    return bool(found) and fmean(by_seed(found)) >= gate.least


def _shared(sides: Iterable[Side], apart: Collection[str]) -> Set[Key]:
    """The places at which all runs of these have a number."""
    places: dict[Any, set[Key]] = {}
    for side in sides:
        for one in (*side.rows, *(side.taken or ())):
            places.setdefault((one.place, one.run), set()).add(_place(one.measure, apart))
    return set.intersection(*places.values()) if places else set()


def _place(measure: Measure, apart: Collection[str]) -> Key:
    kept = {name: one for name, one in measure.dimensions.items() if name not in apart}
    return measure_key(measure.metric, kept)


def _mean(measures: Sequence[Measure]) -> float:
    return fmean(one.value for one in measures if one.value is not None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A contrast in the records of one source, a file or an experiment, under one label.

    Attributes:
        test: the difference, tested against another number.
        missing: why these records say nothing on the claim: the model compared with lacks the
            defect, or one of both has not learnt the task. Empty where they count.
        at_edge: of either side, whether some learning rate of its runs may not be the best.
    """

    contrast: Contrast
    source: str
    arm: Summary
    than: Summary
    difference: Difference
    test: Callable[[float], Difference | None]
    missing: str = ""
    at_edge: tuple[bool, bool] = (False, False)

    @property
    def applies(self) -> bool:
        """True where these records say something on the claim."""
        return not self.missing

    @property
    def tested(self) -> bool:
        """True where it has a p-value that counts."""
        return self.applies and not self.contrast.counted and self.difference.p is not None

    @property
    def weight(self) -> float:
        """The number of runs that a balanced comparison of this precision has on each side."""
        return 2 / (1 / self.arm.n + 1 / self.than.n)

    def repeats(self, other: "Outcome") -> bool:
        """True if a side of it has no number that the other record has not."""
        mine, theirs = (cast("frozenset[Any]", x.difference.compared) for x in (self, other))
        return any(a <= b for a in mine for b in theirs)

    def judgement(self, threshold: float) -> Judgement:
        """The verdict by itself, where `threshold` is the largest p that holds in the book."""
        if not self.applies:
            return Judgement.UNTESTED
        return judgement_of(self.contrast, self.difference, threshold)


def judgement_of(contrast: Contrast, difference: Difference, threshold: float) -> Judgement:
    """The verdict of a difference on what a contrast claims."""
    higher = difference.verdict is Verdict.HIGHER
    if contrast.counted:
        if difference.mean == difference.against:
            equal_holds = contrast.claimed.startswith("not ")
            return Judgement.HOLDS if equal_holds else Judgement.DOES_NOT_HOLD
        higher = difference.mean > difference.against
    elif not holds(difference, threshold):
        return Judgement.UNDECIDED
    as_claimed = higher == (contrast.claimed in ("higher", "not lower"))
    return Judgement.HOLDS if as_claimed else Judgement.DOES_NOT_HOLD
