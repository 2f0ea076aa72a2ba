"""Claims as comparisons of two arms' numbers, and the verdict of each record on them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, cast

from clearhead.records.runs import MAPS, Key, Measure, Records, Run
from clearhead.report.pivots import Found, by_seed, difference_of
from clearhead.report.statistics import LEVEL, Difference, Summary, Verdict, holds, summarize

OF_RATE = ("kurtosis", "kurtosis_rotated", "largest_activation")
"""Measures that grow with the learning rate, whatever the architecture."""
# Patterns of an arm's name, new records' first and then committed ones': that with numbers counts.
Patterns = str | tuple[str, ...]
Rows = list[tuple[Run, list[Measure]]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number of every run of an arm, or of all arms of a pattern (a factorial's main effect): the
    mean of all measures that match. `times` is the length of the text in training lengths, `label`
    a pattern; `minus` is subtracted within each seed, for a `distance` without its sign."""

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

    def of(self, arm: Patterns, **changes: Any) -> "Reading":
        """The same number of an arm."""
        return replace(self, arm=(arm,) if isinstance(arm, str) else arm, **changes)

    def rows(self, runs: Sequence[Run]) -> Rows:
        """The runs of one label that have the number, of the first pattern that any matches."""
        fitting = [run for run in runs if fnmatchcase(run.label, self.label)]
        for pattern in self.arm:
            rows = [(run, self._measures(run)) for run in fitting if fnmatchcase(run.arm, pattern)]
            if rows := [row for row in rows if row[1]]:
                return rows
        return []

    def level(self, runs: Sequence[Run]) -> float | None:
        """The mean over seeds; None where a run has no number that the others have."""
        values = measures((self, runs))[0]
        return fmean(by_seed(values)) if values else None

    def _measures(self, run: Run) -> list[Measure]:
        """The final measures of a run; of several maps the last, which multiplies the values. What
        a task measured aside, on another text, counts only where there is no other; so do windows
        that open documents, unless the reading names `at`."""
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


def measures(*sides: tuple[Reading, Sequence[Run]], apart: Collection[str] = ()) -> list[Found]:
    """{seed: measures} of each reading, less the numbers subtracted, at the places that all runs of
    all readings have (but for the dimensions `apart`)."""

    def key(one: Measure) -> Key:
        metric, dimensions = one.key
        return metric, frozenset(item for item in dimensions if item[0] not in apart)

    rows = [[part.rows(runs) for part in reading.parts] for reading, runs in sides]
    places = [{*map(key, ones)} for side in rows for part in side for _, ones in part]
    shared = set.intersection(*places) if places else set()

    def at_shared(rows: Rows) -> Found:
        """Rows of the seeds that have all of the pattern's arms: other means would not compare."""
        arms, values = {run.arm for run, _ in rows}, Found()
        for seed in dict.fromkeys(run.seed for run, _ in rows):
            of_seed = [row for row in rows if row[0].seed == seed]
            there = [one for _, ones in of_seed for one in ones if key(one) in shared]
            if there and {run.arm for run, _ in of_seed} == arms:
                values[seed] = there
        return values

    found = []
    for (reading, _), parts in zip(sides, rows, strict=True):
        values, *subtracted = map(at_shared, parts)
        for minus in subtracted:
            left = {x: mean(values[x]) - mean(minus[x]) for x in values if x in minus}
            left = {seed: abs(x) if reading.distance else x for seed, x in left.items()}
            values = {seed: [Measure(metric=reading.metric, value=x)] for seed, x in left.items()}
        found.append(values)
    return found


def mean(ones: Sequence[Measure]) -> float:
    return fmean(one.value for one in ones if one.value is not None)


class Judgement(StrEnum):
    """Verdict of the records on a claim."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "untested"


class Gate(NamedTuple):
    """A minimum that a number must reach, by its name; below it a record is not counted."""

    reading: Reading
    least: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A number of one arm, `claimed` to be "lower" or "higher" than that of another, or with a
    `margin` by at most so much on the other side. A `relative` difference, and its margin, are
    shares of the mean of theirs; `counted` numbers are the same in every run; `blocked` ones, means
    over the arms of a factorial, are compared within each seed. Optimizers may have `own_rates`."""

    words: str
    ours: Reading
    theirs: Reading
    claimed: str = "lower"
    margin: float | None = None
    relative: bool = False
    counted: bool = False
    blocked: bool = False
    gates: tuple[Gate, ...] = ()
    own_rates: bool = False

    @property
    def bound(self) -> float:
        """The difference beyond which the claim fails: 0, or the margin that it allows."""
        return (self.margin or 0.0) * (1 if self.claimed == "lower" else -1)

    def outcomes(self, sources: Mapping[str, Records]) -> "Iterator[Outcome]":
        """The difference in each source and under each label where both arms have a number; places
        may differ in the map, in a length by `times`, and in what the readings name differently."""
        ats = [part.at for one in (self.ours, self.theirs) for part in one.parts]
        apart = {name for at in ats for name in at if len({one.get(name) for one in ats}) > 1}
        apart |= {"map"} if self.ours.times is None else {"map", "length"}
        for source, records in sources.items():
            runs = {label: records.labelled(label).runs for label in records.labels()}
            for label in runs:
                labels = [label] if self.theirs.label == self.ours.label else runs
                other = next((one for one in labels if self.theirs.rows(runs[one])), label)
                sides = (self.ours, runs[label]), (self.theirs, runs[other])
                mine, others = measures(*sides, apart=apart)
                test = partial(_test, self, mine, others)
                if (difference := test(self.bound)) is None:
                    continue
                scale = 1 / fmean(by_seed(others)) if self.relative else 1.0
                yield Outcome(
                    self,
                    ", ".join(filter(None, (source, label))),
                    cast("Summary", summarize(by_seed(mine, scale))),
                    cast("Summary", summarize(by_seed(others, scale))),
                    difference=difference,
                    test=test,
                    missing=next(self._missing(runs[label], runs[other]), ""),
                    at_edge=tuple(
                        any(run.at_edge for part in one.parts for run, _ in part.rows(some))
                        for one, some in sides
                    ),
                )

    def _missing(self, *runs: Sequence[Run]) -> Iterator[str]:
        """Reasons why the runs under the label of ours and that of theirs are not counted."""
        for reading, least, name in self.gates:
            fitting = (some for some in runs if fnmatchcase(some[0].label, reading.label))
            level = reading.level(next(fitting, ()))
            if level is None or level < least:
                yield f"{name} is below {least:g}"
        if not all(map(_has_learnt, (self.ours, self.theirs), runs)):
            yield "a model had hardly learnt"
        rows = (*self.ours.rows(runs[0]), *self.theirs.rows(runs[1]))
        rates = {run.train.get("learning_rate") for run, _ in rows}
        words = ", ".join(f"{rate:g}" for rate in sorted(filter(None, rates)))
        if self.ours.metric in OF_RATE and not self.own_rates and "," in words:
            yield f"the rates differ ({words})"


def _has_learnt(reading: Reading, runs: Sequence[Run]) -> bool:
    """False of losses and perplexities where that at the training length is √vocabulary or more."""
    metric = "loss" if reading.metric.startswith("ar_hit") else reading.metric
    if not metric.endswith(("loss", "perplexity")) or metric.startswith("added"):
        return True
    at, times = {} if metric == "loss" else reading.at, None if reading.times is None else 1.0
    within = replace(reading, metric=metric, at=at, times=times, minus=None)
    level, sizes = within.level(runs), [run.vocabulary or math.inf for run, _ in within.rows(runs)]
    if level is None:
        return True
    return 2 * (level if metric.endswith("loss") else math.log(level)) < math.log(min(sizes))


def _test(contrast: Contrast, ours: Found, theirs: Found, against: float) -> Difference | None:
    """The difference; of a blocked contrast its mean within a seed: compositions of one seed share
    its data and much of its luck."""
    from scipy.stats import ttest_1samp

    difference = difference_of(ours, theirs, against=against, relative=contrast.relative)
    apart = [mean(ours[seed]) - mean(theirs[seed]) for seed in ours if seed in theirs]
    if not contrast.blocked or difference is None or len(apart) < 2 or max(apart) == min(apart):
        return difference
    test = ttest_1samp(apart, against)
    ends = test.confidence_interval(1 - LEVEL)
    interval = float(ends.low), float(ends.high)
    return replace(difference, mean=fmean(apart), interval=interval, p=float(test.pvalue))


@dataclass(frozen=True)
class Outcome:
    """A contrast in the records of one source under one label, tested against any number by `test`;
    `missing`: why it is not counted, `at_edge`: whether some run of a side is at a sweep's edge."""

    contrast: Contrast
    source: str
    ours: Summary
    theirs: Summary
    difference: Difference
    test: Callable[[float], Difference | None]
    missing: str = ""
    at_edge: tuple[bool, ...] = (False, False)

    @property
    def weight(self) -> float:
        """The number of runs that a balanced comparison of this precision has on each side."""
        return 2 / (1 / self.ours.n + 1 / self.theirs.n)


def judge(contrast: Contrast, difference: Difference | None, threshold: float) -> Judgement:
    """The verdict of a difference, where `threshold` is the largest p that holds in the book."""
    if difference is None:
        return Judgement.UNTESTED
    upward = contrast.claimed == "higher"
    if contrast.counted:
        beyond = difference.mean - difference.against
        as_claimed = (beyond > 0) == upward if beyond else contrast.margin is not None
    elif holds(difference, threshold):
        as_claimed = (difference.verdict is Verdict.HIGHER) == upward
    else:
        return Judgement.UNDECIDED
    return Judgement.HOLDS if as_claimed else Judgement.DOES_NOT_HOLD


@dataclass(frozen=True)
class Claim:
    """A statement of a paper at FAMILY/PLACE, such as diff/table2, with its numbers there ("" if it
    is ours) and the experiment that decides it; one `by_construction` follows from formulas."""

    name: str
    says: str
    published: str
    study: str
    contrasts: tuple[Contrast, ...]
    also: tuple[str, ...] = ()  # other places that show the same
    by_construction: bool = False

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that select it on the command line; `all` selects every claim."""
        return (self.name, *self.also, self.family, "all")

    @property
    def arms(self) -> set[str]:
        """Patterns of all arms that it reads."""
        sides = [side for one in self.contrasts for side in (one.ours, one.theirs)]
        gates = [gate.reading for one in self.contrasts for gate in one.gates]
        return {name for one in sides + gates for part in one.parts for name in part.arm}


def number(metric: str, *, times: float | None = None, label: str = "*", **at: Any) -> Reading:
    """A number by its metric and dimensions, of no arm yet; see `Reading`."""
    return Reading(metric=metric, times=times, label=label, at=at)


LOSS = number("loss", times=1)
Side = Patterns | Reading  # of a comparison: an arm, or a number of its own


def lower(
    words: str, what: Reading, arm: Side, than: Side, *gates: Gate, least: float = 0, **options: Any
) -> Contrast:
    """The number of `arm` is lower than that of `than`, which is a defect from `least` on."""
    ours, theirs = (one if isinstance(one, Reading) else what.of(one) for one in (arm, than))
    if least:
        gates += (Gate(theirs, least, "the number compared with"),)
    return Contrast(words=words, ours=ours, theirs=theirs, gates=gates, **options)


higher = partial(lower, claimed="higher")


def no_worse(*given: Any, by: float = 0.0, better: str = "lower", **options: Any) -> Contrast:
    """As `lower`, by no more than the margin `by` on the other side."""
    return lower(*given, claimed=better, margin=by, **options)


def ratio(
    *given: Any, at_most: float | None = None, at_least: float | None = None, **options: Any
) -> Contrast:
    """The number of `arm` as a share of that of `than`: above 1, or within another bound."""
    if at_most is not None:
        options |= {"claimed": "lower", "margin": at_most - 1}
    if at_least is not None:
        options |= {"margin": 1 - at_least}
    return lower(*given, relative=True, **{"claimed": "higher", **options})
