"""Comparisons that claims make of the numbers of two arms."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
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

Arms = Patterns | Reading
"""Of one side of a comparison: an arm, or a number of its own."""


class Judgement(StrEnum):
    """Verdict of the records on a claim."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "untested"


OF_RATE = ("kurtosis", "kurtosis_rotated", "largest_activation")
"""Measures that grow with the learning rate, whatever the architecture."""


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
        return {name for one in readings for name in (*one.arm, *one.less)}

    def outcomes(self, frame: "DataFrame") -> "Iterator[Outcome]":
        """The difference in each source and under each label where both arms have a number."""
        mine, theirs = (one.side(frame) for one in (self.ours, self.theirs))
        gates = [(one, one.reading.side(frame)) for one in self.gates]
        within = [
            one.within.side(frame) for one in (self.ours, self.theirs) if one.within is not None
        ]
        for source in dict.fromkeys(one.source for one in mine.rows):
            for label in mine.labels(source):
                there: str | None = label
                if self.theirs.label != self.ours.label:
                    there = next(iter(theirs.labels(source)), None)
                if there is not None:
                    places = (source, label), (source, there)
                    chosen = mine.at(places[0]), theirs.at(places[1])
                    found = self._outcome(places, chosen, gates, within)
                    if found is not None:
                        yield found

    def _outcome(
        self,
        places: Sequence[Place],
        chosen: Sequence[Side],
        gates: Sequence[tuple[Gate, Side]],
        within: Sequence[Side],
    ) -> "Outcome | None":
        places_of_all = shared(chosen, self._apart)
        mine, theirs = (one.by_seed(places_of_all, self._apart) for one in chosen)
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
            missing=next(self._missing(places, chosen, gates, within), ""),
            at_edge=(chosen[0].at_edge, chosen[1].at_edge),
        )

    def _missing(
        self,
        places: Sequence[Place],
        chosen: Sequence[Side],
        gates: Sequence[tuple[Gate, Side]],
        within: Sequence[Side],
    ) -> Iterator[str]:
        """Reasons why the records do not count."""
        yield from (gate.why for gate, side in gates if not _passes(gate, side, places))
        for side, place in zip(within, places, strict=False):
            if not _has_learnt(side.at(place)):
                yield "a perplexity is not below √vocabulary"
        rates = chosen[0].rates | chosen[1].rates
        if self.ours.metric in OF_RATE and not self.own_rates and len(rates) > 1:
            yield f"the rates differ ({', '.join(f'{one:g}' for one in sorted(rates))})"

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
    apart = [mean(mine[seed]) - mean(theirs[seed]) for seed in seeds]
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


def _has_learnt(side: Side) -> bool:
    """True if the mean perplexity is below √vocabulary, or is not known."""
    found = side.by_seed(shared([side], ()), ())
    sizes = [one.vocabulary for one in side.rows if not math.isnan(one.vocabulary)]
    if not found or not sizes:
        return True
    level = fmean(by_seed(found))
    if side.rows[0].measure.metric.endswith("loss"):
        level = math.exp(level)
    return level < math.sqrt(min(sizes))


def _passes(gate: Gate, side: Side, places: Sequence[Place]) -> bool:
    """True if the mean under the first of these labels that the gate reads is high enough."""
    fitting = (place for place in places if fnmatchcase(place[1], gate.reading.label))
    side = side.at(next(fitting, places[0]))
    found = side.by_seed(shared([side], ()), ())
    return bool(found) and fmean(by_seed(found)) >= gate.least


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


# Verbs of claims


def number(metric: str, *, times: float | None = None, label: str = "*", **at: Any) -> Reading:
    """A number by its metric and dimensions, of no arm yet; see `Reading`."""
    return Reading(metric=metric, times=times, label=label, at=at)


LOSS = number("loss", times=1)


def lower(words: str, what: Reading, arm: Arms, than: Arms, *gates: Gate) -> Contrast:
    """The number of `arm` is lower than that of `than`."""
    return _contrast("lower", words, what, arm, than, gates=gates)


def higher(words: str, what: Reading, arm: Arms, than: Arms, *gates: Gate) -> Contrast:
    """The number of `arm` is higher than that of `than`."""
    return _contrast("higher", words, what, arm, than, gates=gates)


def no_worse(
    words: str,
    what: Reading,
    arm: Arms,
    than: Arms,
    *gates: Gate,
    by: float = 0.0,
    better: str = "lower",
) -> Contrast:
    """The number of `arm` is worse than that of `than` by no more than the margin `by`."""
    claimed = {"lower": "not higher", "higher": "not lower"}[better]
    return _contrast(claimed, words, what, arm, than, gates=gates, margin=by)


def ratio(
    words: str,
    what: Reading,
    arm: Arms,
    than: Arms,
    *,
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
    return _contrast(claimed, words, what, arm, than, margin=margin, relative=True, counted=counted)


def blocked(contrast: Contrast) -> Contrast:
    """The contrast of a factorial's arms, compared within each seed."""
    return replace(contrast, blocked=True)


def reaches(what: Reading, arm: Patterns, least: float, name: str = "") -> Gate:
    """The gate of an arm whose number must be at least so much."""
    return Gate(reading=what.of(arm), least=least, why=f"{name or arm} is below {least:g}")


def _contrast(
    claimed: str, words: str, what: Reading, arm: Arms, than: Arms, **others: Any
) -> Contrast:
    ours, theirs = (one if isinstance(one, Reading) else what.of(one) for one in (arm, than))
    return Contrast(words=words, claimed=claimed, ours=ours, theirs=theirs, **others)
