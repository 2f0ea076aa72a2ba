"""Claims as comparisons of two arms' numbers, and the verdict of each record on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import Any, cast

from clearhead.papers.readings import Labelled, Patterns, Reading, Side, mean, measures
from clearhead.records.runs import Records, Run
from clearhead.report.pivots import Found, by_seed, difference_of
from clearhead.report.statistics import LEVEL, Difference, Summary, Verdict, holds, summarize

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
    """A minimum that a number must reach; below it a record is not counted, with reason `why`."""

    reading: Reading
    least: float
    why: str

    def is_met(self, runs: Labelled, labels: Sequence[str]) -> bool:
        """True if the mean under the first of these labels that it reads is high enough."""
        fitting = (label for label in labels if fnmatchcase(label, self.reading.label))
        side = self.reading.side(next(fitting, labels[0]), runs)
        level = None if side is None else side.level
        return level is not None and level >= self.least


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One comparison that a claim makes: a number of one arm against that of another.

    Attributes:
        claimed: "lower" or "higher"; "not lower" or "not higher", by no more than `margin`, against
            which the difference is then tested.
        ours, theirs: the two numbers. Theirs is read under the label of ours unless it names
            another one.
        relative: both are divided by the mean of theirs; `margin` is then a share of it.
        counted: both numbers are counted and the same in every run, so that no spread is needed.
        blocked: both are means over the arms of a factorial, compared within each seed.
        gates: conditions of a record to be counted, beside those of all records: of a loss or
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
        """The difference beyond which the claim fails: 0, or the margin that it allows."""
        return {"not higher": self.margin, "not lower": -self.margin}.get(self.claimed, 0.0)

    @property
    def arms(self) -> set[str]:
        """Patterns of all arms that it reads."""
        readings = (self.ours, self.theirs, *(gate.reading for gate in self.gates))
        return {name for one in readings for part in one.parts for name in part.arm}

    def outcomes(self, sources: Mapping[str, Records]) -> "Iterator[Outcome]":
        """The difference in each source and under each label where both arms have a number."""
        for source, records in sources.items():
            runs: dict[str, list[Run]] = {}
            for run in records.runs:
                runs.setdefault(run.label, []).append(run)
            for label in runs:
                if (outcome := self._outcome(source, label, runs)) is not None:
                    yield outcome

    def _outcome(self, source: str, label: str, runs: Labelled) -> "Outcome | None":
        ours, alike = self.ours.side(label, runs), self.theirs.label == self.ours.label
        labels = (label,) if alike else tuple(runs) if ours else ()
        beside = ((one, self.theirs.side(one, runs)) for one in labels)
        other, theirs = next((one for one in beside if one[1]), (label, None))
        if ours is None or theirs is None:
            return None
        mine, others = measures(ours, theirs, apart=self._apart)
        test = partial(_test, self, mine, others)
        if (difference := test(self.bound)) is None:
            return None
        scale = 1 / fmean(by_seed(others)) if self.relative else 1.0
        return Outcome(
            contrast=self,
            source=", ".join(filter(None, (source, label))),
            ours=cast("Summary", summarize(by_seed(mine, scale))),
            theirs=cast("Summary", summarize(by_seed(others, scale))),
            difference=difference,
            test=test,
            missing=next(self._missing(ours, theirs, runs, (label, other)), ""),
            at_edge=tuple(any(run.at_edge for run in side.runs) for side in (ours, theirs)),
        )

    def _missing(
        self, ours: Side, theirs: Side, runs: Labelled, labels: Sequence[str]
    ) -> Iterator[str]:
        """Reasons why the records of these labels are not counted."""
        yield from (gate.why for gate in self.gates if not gate.is_met(runs, labels))
        for one, label in zip((self.ours, self.theirs), labels, strict=True):
            side = one.within and one.within.side(label, runs)
            if side and not side.has_learnt:
                yield "a model had hardly learnt"
        rates = {run.train.get("learning_rate") for run, _ in (*ours.rows, *theirs.rows)}
        words = ", ".join(f"{rate:g}" for rate in sorted(filter(None, rates)))
        if self.ours.metric in OF_RATE and not self.own_rates and "," in words:
            yield f"the rates differ ({words})"

    @property
    def _apart(self) -> Set[str]:
        """Dimensions in which the two sides may differ: the map, a length in training lengths, and
        those that one reading has otherwise than another."""
        ats = [part.at for one in (self.ours, self.theirs) for part in one.parts]
        names = {name for at in ats for name in at if len({one.get(name) for one in ats}) > 1}
        return {"map", *names, *(() if self.ours.times is None else ("length",))}


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A contrast in the records of one source, a file or an experiment, under one label.

    Attributes:
        test: the difference, tested against another number.
        missing: reason why these records are not counted: the reference model lacks the defect,
            or one of the two has not learnt the task. Empty where they count.
        at_edge: for each side, whether the learning rate of some run may not be the best.
    """

    contrast: Contrast
    source: str
    ours: Summary
    theirs: Summary
    difference: Difference
    test: Callable[[float], Difference | None]
    missing: str = ""
    at_edge: tuple[bool, ...] = (False, False)

    @property
    def applies(self) -> bool:
        """True if these records count for the claim."""
        return not self.missing

    @property
    def weight(self) -> float:
        """The number of runs that a balanced comparison of this precision has on each side."""
        return 2 / (1 / self.ours.n + 1 / self.theirs.n)

    def repeats(self, other: "Outcome") -> bool:
        """True if a side of it has no number that the other record has not."""
        mine, theirs = (cast("frozenset[Any]", x.difference.compared) for x in (self, other))
        return any(a <= b for a in mine for b in theirs)

    def judgement(self, threshold: float) -> Judgement:
        """The verdict by itself, where `threshold` is the largest p that holds in the book."""
        return judge(self.contrast, self.difference if self.applies else None, threshold)


def judge(contrast: Contrast, difference: Difference | None, threshold: float) -> Judgement:
    """The verdict of a difference on what a contrast claims; untested without one."""
    if difference is None:
        return Judgement.UNTESTED
    upward = contrast.claimed in ("higher", "not lower")
    if contrast.counted:
        beyond = difference.mean - difference.against
        as_claimed = (beyond > 0) == upward if beyond else contrast.claimed.startswith("not ")
    elif holds(difference, threshold):
        as_claimed = (difference.verdict is Verdict.HIGHER) == upward
    else:
        return Judgement.UNDECIDED
    return Judgement.HOLDS if as_claimed else Judgement.DOES_NOT_HOLD


@dataclass(frozen=True)
class Claim:
    """A table, figure or sentence of a paper.

    Attributes:
        name: FAMILY/PLACE, such as diff/table2; `also` other places that show the same.
        published: its numbers in the paper; empty for a claim of ours.
        study: the experiment that trains and measures its models.
        by_construction: it follows from the formulas; a record shows that the code follows them.
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
    def names(self) -> tuple[str, ...]:
        """The names that select it on the command line; `all` selects every claim."""
        return (self.name, *self.also, self.family, "all")

    @property
    def arms(self) -> set[str]:
        """Patterns of the arms that its experiment runs for it."""
        return trained_arms(name for one in self.contrasts for name in one.arms)


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
