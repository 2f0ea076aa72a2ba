"""Comparisons that claims make of the numbers of two arms."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from clearhead.report.pivots import Found, by_seed, difference_of
from clearhead.report.statistics import LEVEL, Difference, Summary, Verdict, summarize
from clearhead.report.verdicts import holds
from clearhead.reproduce.readings import Patterns, Place, Reading, Side, mean, shared

if TYPE_CHECKING:
    from pandas import DataFrame

ALL = "*"  # arms
OF_RATE = ("kurtosis", "kurtosis_rotated", "largest_activation")
"""Measures that grow with the learning rate, whatever the architecture."""


class Judgement(StrEnum):
    """Verdict of the records on a claim."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "untested"


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
        gates: what a record must show to be counted, beside what is asked of all: of a loss or
            perplexity that both have learnt, of an outlier that both were trained at one rate.
        own_rates: the two optimizers take rates of different size, so that each has its own.
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
    own_rates: bool = False

    @property
    def bound(self) -> float:
        """The difference on whose other side the claim fails: 0, or the margin that it allows."""
        return {"not higher": self.margin, "not lower": -self.margin}.get(self.claimed, 0.0)

    @property
    def arms(self) -> set[str]:
        """Patterns of all arms that it reads."""
        readings = (self.ours, self.theirs, *(one.reading for one in self.gates))
        return {name for one in readings for part in one.parts for name in part.arm}

    def outcomes(self, frame: "DataFrame") -> "Iterator[Outcome]":
        """The difference in each source and under each label where both arms have a number."""
        mine, theirs = (one.sides(frame) for one in (self.ours, self.theirs))
        gates = [(one, one.reading.sides(frame)) for one in self.gates]
        within = [
            one.within.sides(frame) for one in (self.ours, self.theirs) if one.within is not None
        ]
        for place in mine:
            there: Place | None = place
            if self.theirs.label != self.ours.label:
                there = next((one for one in theirs if one[0] == place[0]), None)
            if there not in theirs:
                continue
            missing = [gate.why for gate, sides in gates if not _passes(gate, sides, place, there)]
            learnt = zip(within, (place, there), strict=False)
            if not all(_has_learnt(sides[at]) for sides, at in learnt if at in sides):
                missing.append("a perplexity is not below √vocabulary")
            outcome = self._outcome(place, mine[place], theirs[there], missing)
            if outcome is not None:
                yield outcome

    def _outcome(
        self, place: Place, ours: Side, than: Side, missing: list[str]
    ) -> "Outcome | None":
        places = shared((ours, than), self._apart)
        sides = [one.by_seed(places, self._apart) for one in (ours, than)]
        test = partial(_test, self, sides[0], sides[1])
        difference = test(self.bound)
        if difference is None:
            return None
        scale = 1 / fmean(by_seed(sides[1])) if self.relative else 1.0
        means = [summarize(by_seed(side, scale)) for side in sides]
        rates = {one.learning_rate for one in (*ours.rows, *than.rows)}
        rates = {one for one in rates if not math.isnan(one)}  # of models trained here
        if self.ours.metric in OF_RATE and not self.own_rates and len(rates) > 1:
            missing.append(f"the rates differ ({', '.join(f'{one:g}' for one in sorted(rates))})")
        return Outcome(
            contrast=self,
            source=", ".join(filter(None, place)),
            arm=cast("Summary", means[0]),
            than=cast("Summary", means[1]),
            difference=difference,
            test=test,
            missing=next(iter(missing), ""),
            at_edge=tuple(any(row.at_edge for row in one.all) for one in (ours, than)),
        )

    @property
    def _apart(self) -> Set[str]:
        """Dimensions in which the two sides may differ: the map, a length in training lengths, and
        those that one reading has otherwise than another."""
        ats = [part.at for one in (self.ours, self.theirs) for part in one.parts]
        names = {name for at in ats for name in at if len({one.get(name) for one in ats}) > 1}
        return {"map", *names, *(() if self.ours.times is None else ("length",))}


def _test(contrast: Contrast, mine: Found, theirs: Found, against: float) -> Difference | None:
    """The difference; of a blocked contrast its mean within a seed: compositions of one seed share
    its data and much of its luck."""
    from scipy.stats import ttest_1samp

    found = difference_of(mine, theirs, against=against, relative=contrast.relative)
    apart = [mean(mine[seed]) - mean(theirs[seed]) for seed in mine if seed in theirs]
    if not contrast.blocked or found is None or len(apart) < 2 or max(apart) == min(apart):
        return found
    test = ttest_1samp(apart, against)
    ends = test.confidence_interval(1 - LEVEL)
    interval = float(ends.low), float(ends.high)
    return replace(found, mean=fmean(apart), interval=interval, p=float(test.pvalue))


def _has_learnt(side: Side) -> bool:
    """True if the mean perplexity is below √vocabulary, or is not known."""
    level = side.level
    sizes = [one.vocabulary for one in side.rows if not math.isnan(one.vocabulary)]
    if level is None or not sizes:
        return True
    if side.rows[0].measure.metric.endswith("loss"):
        level = math.exp(level)
    return level < math.sqrt(min(sizes))


def _passes(gate: Gate, sides: "Mapping[Place, Side]", *places: Place) -> bool:
    """True if the mean under the first of these labels that the gate reads is high enough."""
    fitting = (one for one in places if fnmatchcase(one[1], gate.reading.label))
    side = sides.get(next(fitting, places[0]))
    level = None if side is None else side.level
    return level is not None and level >= gate.least


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
    at_edge: tuple[bool, ...] = (False, False)

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


@dataclass(frozen=True)
class Claim:
    """A table, figure or sentence of a paper.

    Attributes:
        name: FAMILY/PLACE, such as diff/table2.
        says: the claim in one sentence.
        published: its numbers in the paper; empty for a claim of ours.
        study: the experiment that trains and measures its models.
        contrasts: the comparisons that it makes.
        also: names of other tables and figures that show the same.
        by_construction: it follows from the formulas; a record shows that the code has them.
    """

    name: str
    says: str
    published: str
    study: str
    contrasts: tuple[Contrast, ...]
    also: tuple[str, ...] = ()
    by_construction: bool = False

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def arms(self) -> set[str]:
        """Patterns of the arms that its experiment runs for it."""
        return trained_arms(name for one in self.contrasts for name in one.arms) or {ALL}

    def outcomes(self, frame: "DataFrame") -> list[Outcome]:
        """Outcomes of the contrasts in each source; those without numbers are left out."""
        return [one for each in self.contrasts for one in each.outcomes(frame)]


def trained_arms(patterns: Iterable[str]) -> set[str]:
    """Patterns of arms without the task that their models are fine-tuned on."""
    return {name.partition(" on ")[0] for name in patterns}


def number(metric: str, *, times: float | None = None, label: str = "*", **at: Any) -> Reading:
    """A number by its metric and dimensions, of no arm yet; see `Reading`."""
    return Reading(metric=metric, times=times, label=label, at=at)


LOSS = number("loss", times=1)


def lower(
    words: str,
    what: Reading,
    arm: Patterns | Reading,
    than: Patterns | Reading,
    *gates: Gate,
    claimed: str = "lower",
    **options: Any,
) -> Contrast:
    """The number of `arm` is lower than that of `than`; either may be a number of its own."""
    ours, theirs = (one if isinstance(one, Reading) else what.of(one) for one in (arm, than))
    return Contrast(words=words, claimed=claimed, ours=ours, theirs=theirs, gates=gates, **options)


higher = partial(lower, claimed="higher")


def no_worse(*given: Any, by: float = 0.0, better: str = "lower") -> Contrast:
    """As `lower`, by no more than the margin `by` on the other side."""
    claimed = {"lower": "not higher", "higher": "not lower"}[better]
    return lower(*given, claimed=claimed, margin=by)


def ratio(
    *given: Any,
    below: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
    counted: bool = False,
) -> Contrast:
    """The number of `arm` as a share of that of `than`: below 1, above 1 where no bound is given,
    or within a bound."""
    claimed, margin = ("higher" if below is None else "lower"), 0.0
    if at_most is not None:
        claimed, margin = "not higher", at_most - 1
    if at_least is not None:
        claimed, margin = "not lower", 1 - at_least
    return lower(*given, claimed=claimed, margin=margin, relative=True, counted=counted)


def blocked(contrast: Contrast) -> Contrast:
    """The contrast of a factorial's arms, compared within each seed."""
    return replace(contrast, blocked=True)


def reaches(what: Reading, arm: Patterns, least: float, name: str = "") -> Gate:
    """The gate of an arm whose number must be at least so much."""
    return Gate(reading=what.of(arm), least=least, why=f"{name or arm} is below {least:g}")
