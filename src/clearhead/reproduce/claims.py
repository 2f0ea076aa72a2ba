"""The papers' claims, each with its published numbers, and verdicts on them from records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from statistics import fmean
from typing import Any

from clearhead.records.runs import MAPS, Key, Measure, Records, Run, measure_key
from clearhead.report.costs import add_costs
from clearhead.report.pivots import Found, by_seed, difference_of
from clearhead.report.statistics import Difference, Summary, Verdict, summarize
from clearhead.report.verdicts import holds, threshold_of
from clearhead.reproduce import rows

ALL = "*"  # arms


Side = tuple[Records, Sequence[str]]  # records, and patterns of an arm in them
Reading = tuple[Run, Sequence[Measure]]


class Judgement(StrEnum):
    """Verdict of the records on a claim."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "untested"


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One comparison that a claim makes: an arm, the arm it is compared with, and a number of both.

    Attributes:
        arm, than: patterns of arms' names, in order of preference (committed records have other
            names than new ones); the first with numbers counts.
        metric, at: the measures; a seed's number is the mean of all that match and that every run
            of both sides has, over all arms of the pattern (so that a factorial's main effects are
            contrasts).
        than_at: where the model compared with is read, where it is elsewhere.
        minus: dimensions in whose place both read once more: the number is the first less that,
            without its sign: how much it matters.
        less: patterns of an arm whose number is taken away on both sides, within a seed: the
            contrast is then one of leads.
        times: length of the text in training lengths; None is any.
        claimed: "lower" or "higher"; "not lower" or "not higher", by no more than `margin`, against
            which the difference is then tested.
        relative: both are divided by the mean of `than`; `margin` is then a share of it.
        label: pattern of the labels of the records to read.
        than_label: pattern of the label under which the other side is read, where it is another;
            without that label there is no comparison.
        needs: least number of `than`; below it there is nothing to repair, and no verdict.
        needs_in: patterns of the arm of that number, where it is another than `than`.
        learnt: least number of both, at the training length where `times` is given; below it one
            of them has not learnt the task, and there is no verdict.
        needs_of, learnt_of: the measures of these numbers, where they are others.
        counted: both numbers are counted and the same in every run, so that no spread is needed.
        words: the comparison as the book writes it.
    """

    arm: tuple[str, ...]
    than: tuple[str, ...]
    metric: str
    claimed: str
    words: str
    at: dict[str, Any]
    than_at: dict[str, Any] = field(default_factory=dict)
    minus: dict[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ()
    times: float | None = None
    margin: float = 0.0
    relative: bool = False
    label: str = "*"
    than_label: str = ""
    needs: float = float("-inf")
    needs_in: tuple[str, ...] = ()
    learnt: float = float("-inf")
    needs_of: str = ""
    learnt_of: str = ""
    counted: bool = False

    @property
    def bound(self) -> float:
        """The difference on whose other side the claim fails: 0, or the margin that it allows."""
        return {"not higher": self.margin, "not lower": -self.margin}.get(self.claimed, 0.0)

    def judge(self, source: str, records: Records) -> "Iterator[Outcome]":
        """The difference under each label of a source, where both arms have a number."""
        there = {**self.at, **self.than_at}
        for label in records.labels():
            if not fnmatchcase(label, self.label):
                continue
            elsewhere = (one for one in records.labels() if fnmatchcase(one, self.than_label))
            other = next(elsewhere, None) if self.than_label else label
            if other is None:
                continue
            sides = (records.labelled(label), self.arm), (records.labelled(other), self.than)
            shared = self._shared(
                reading
                for (of, names), at in zip(sides, (self.at, there), strict=True)
                for reading in (*self._runs(of, names, at), *self._runs(of, self.less, at))
            )
            mine = self._side(*sides[0], self.at, shared)
            theirs = self._side(*sides[1], there, shared)
            difference = difference_of(mine, theirs, against=self.bound, relative=self.relative)
            if difference is not None:
                scale = 1 / fmean(by_seed(theirs)) if self.relative else 1.0
                arm, than = (summarize(by_seed(side, scale)) for side in (mine, theirs))
                assert arm is not None
                assert than is not None
                yield Outcome(
                    contrast=self,
                    source=f"{source}, {label}" if label else source,
                    arm=arm,
                    than=than,
                    difference=difference,
                    applies=self._applies(sides),
                    at_edge=(self._at_edge(*sides[0], self.at), self._at_edge(*sides[1], there)),
                )

    def _applies(self, sides: Sequence[Side]) -> bool:
        """True if there is a defect to repair, and both have learnt the task."""
        records, than = sides[1]
        within = None if self.times is None else 1.0
        return self._reach(
            self.needs, self.needs_of, [(records, self.needs_in or than)], self.times
        ) and self._reach(self.learnt, self.learnt_of, sides, within)

    def _reach(self, least: float, metric: str, sides: Iterable[Side], times: float | None) -> bool:
        """True if each of these sides has a number, and its mean is at least so much."""
        if least == float("-inf"):
            return True
        read = replace(self, metric=metric or self.metric, minus={}, times=times)
        found = (read._side(*side, self.at) for side in sides)
        return all(one and fmean(by_seed(one)) >= least for one in found)

    def _side(
        self,
        records: Records,
        names: Sequence[str],
        at: Mapping[str, Any],
        shared: Set[Key] | None = None,
    ) -> Found:
        found = self._found(records, names, at, shared)
        if not self.less:
            return found
        taken = self._found(records, self.less, at, shared)
        return {
            seed: [Measure(metric=self.metric, value=_mean(ones) - _mean(taken[seed]))]
            for seed, ones in found.items()
            if seed in taken
        }

    def _found(
        self, records: Records, names: Sequence[str], at: Mapping[str, Any], shared: Set[Key] | None
    ) -> Found:
        """By seed, what all runs measured. A seed that lacks one of the pattern's arms is left out:
        its mean would be another mean."""
        readings = self._runs(records, names, at)
        kept = self._shared(readings) if shared is None else shared
        joined: dict[int, list[Measure]] = {}
        arms: dict[int, set[str]] = {}
        for run, measures in readings:
            found = [one for one in measures if self._place(one) in kept]
            joined.setdefault(run.seed, []).extend(found)
            arms.setdefault(run.seed, set()).add(run.arm)
        whole = {run.arm for run, _ in readings}
        return {seed: ones for seed, ones in joined.items() if ones and arms[seed] == whole}

    def _shared(self, readings: Iterable[Reading]) -> Set[Key]:
        """The places at which all of these runs have a number."""
        places = [{*map(self._place, measures)} for _, measures in readings]
        return set.intersection(*places) if places else set()

    def _place(self, measure: Measure) -> Key:
        """Where a measure was taken, but for what a contrast has apart by itself: its map, the
        other side's dimensions, and a length in training lengths."""
        apart = {"map", *self.than_at, *(() if self.times is None else ("length",))}
        kept = {name: one for name, one in measure.dimensions.items() if name not in apart}
        return measure_key(measure.metric, kept)

    def _runs(self, records: Records, names: Sequence[str], at: Mapping[str, Any]) -> list[Reading]:
        """The runs of the first pattern with numbers, and their numbers."""
        for name in names:
            matching = (run for run in records.runs if fnmatchcase(run.arm, name))
            if found := [(run, read) for run in matching if (read := self._read(run, at))]:
                return found
        return []

    def _at_edge(self, records: Records, names: Sequence[str], at: Mapping[str, Any]) -> bool:
        used = (*self._runs(records, names, at), *self._runs(records, self.less, at))
        return any(run.at_edge for run, _ in used)

    def _read(self, run: Run, at: Mapping[str, Any]) -> Sequence[Measure]:
        at = dict(at)
        if self.times is not None:
            if run.sequence_length is None:
                return []
            at["length"] = round(self.times * run.sequence_length)
        if self.metric == "added_perplexity":
            add_costs(run)
        first, second = self._selected(run, at), self._selected(run, {**at, **self.minus})
        if not self.minus:
            return first
        if not first or not second:
            return []
        return [Measure(metric=self.metric, value=abs(_mean(first) - _mean(second)))]

    def _selected(self, run: Run, at: Mapping[str, Any]) -> list[Measure]:
        """Measures with a value. A step is one of training: milestones are not the final number.

        What a task measured aside has the name of another text's: it counts where it is alone. So
        does what windows measure that open documents (`at`), unless a contrast asks for them. Of
        several maps the one that multiplies the values counts, which is the last.
        """
        found = [
            one
            for one in run.select(self.metric, **at)
            if "step" not in one.dimensions and one.value is not None
        ]
        maps = {one.dimensions.get("map") for one in found}
        if last := next((name for name in reversed(MAPS) if name in maps), None):
            found = [one for one in found if one.dimensions.get("map", last) == last]
        if "at" not in at:
            found = [one for one in found if "at" not in one.dimensions] or found
        return [one for one in found if not one.details.get("aside")] or found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A contrast in the records of one source, a file or an experiment, under one label.

    Attributes:
        applies: False where the model compared with lacks the defect, or one of both has not
            learnt the task: these records say nothing on the claim.
        at_edge: of either side, whether some learning rate of its runs may not be the best.
    """

    contrast: Contrast
    source: str
    arm: Summary
    than: Summary
    difference: Difference
    applies: bool = True
    at_edge: tuple[bool, bool] = (False, False)

    @property
    def tested(self) -> bool:
        """True where the p-value makes a verdict, so that it counts among those of the book."""
        return self.applies and not self.contrast.counted and self.difference.p is not None

    @property
    def of_one_seed(self) -> bool:
        """True where one side has a single seed, so that chance cannot be told from effect."""
        return not self.contrast.counted and self.difference.verdict is Verdict.ONE_SEED

    def judgement(self, threshold: float) -> Judgement:
        """The verdict, where `threshold` is the largest p that holds among all of the book."""
        if not self.applies:
            return Judgement.UNDECIDED
        claimed, difference = self.contrast.claimed, self.difference
        higher = difference.verdict is Verdict.HIGHER
        if self.contrast.counted:
            if difference.mean == difference.against:
                equal_holds = claimed.startswith("not ")
                return Judgement.HOLDS if equal_holds else Judgement.DOES_NOT_HOLD
            higher = difference.mean > difference.against
        elif not holds(difference, threshold):
            return Judgement.UNDECIDED
        as_claimed = higher == (claimed in ("higher", "not lower"))
        return Judgement.HOLDS if as_claimed else Judgement.DOES_NOT_HOLD


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A table, figure or sentence of a paper.

    Attributes:
        name: FAMILY/PLACE, such as diff/table2.
        also: names of other tables and figures that show the same.
        says: the claim in one sentence.
        published: its numbers in the paper; empty for a claim of ours.
        study: the experiment that trains and measures its models.
        why: what a record of it leaves out, or why none can decide it.
    """

    name: str
    says: str
    study: str
    published: str = ""
    why: str = ""
    also: tuple[str, ...] = ()
    contrasts: tuple[Contrast, ...] = ()

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def arms(self) -> set[str]:
        """Patterns of the arms that its experiment runs for it."""
        named = {
            one
            for each in self.contrasts
            for one in (*each.arm, *each.than, *each.less, *each.needs_in)
        }
        return trained_arms(named) or {ALL}

    def outcomes(self, sources: Mapping[str, Records]) -> list[Outcome]:
        """Outcomes of the contrasts in each source; those without numbers are left out."""
        return [
            one
            for each in self.contrasts
            for source, records in sources.items()
            for one in each.judge(source, records)
        ]


def trained_arms(patterns: Iterable[str]) -> set[str]:
    """Patterns of arms without the task that their models are fine-tuned on."""
    return {name.partition(" on ")[0] for name in patterns}


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the book."""
    return tuple(
        Claim(
            contrasts=tuple(_contrasts(row.pop("contrast", []))),
            also=tuple(row.pop("also", [])),
            **row,
        )
        for row in rows("claims")
    )


def threshold_over(outcomes: Iterable[Sequence[Outcome]]) -> float:
    """The largest p that holds among all contrasts of all claims that chance can decide."""
    return threshold_of(one.difference for ones in outcomes for one in ones if one.tested)


def counting(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of one claim without comparisons of one seed that other records make with several."""
    repeated = {one.contrast.words for one in outcomes if one.applies and not one.of_one_seed}
    return [one for one in outcomes if not (one.of_one_seed and one.contrast.words in repeated)]


def judged(sources: Mapping[str, Records]) -> Iterator[tuple[Claim, list[Outcome], Judgement]]:
    """Every claim with its outcomes and its verdict; arms are compared within a source and a label.

    A claim holds where all its contrasts do, and does not where one is decided the other way, at a
    false discovery rate of 5 % over all contrasts of the book (Benjamini-Hochberg). Records in
    which a contrast does not apply neither support a claim nor stand in its way; nor do those of
    one seed, where others have several for the same contrast.
    """
    outcomes = {claim.name: claim.outcomes(sources) for claim in claims()}
    threshold = threshold_over(outcomes.values())
    for claim in claims():
        telling = [one for one in counting(outcomes[claim.name]) if one.applies]
        verdicts = {one.judgement(threshold) for one in telling}
        order = (Judgement.DOES_NOT_HOLD, Judgement.UNDECIDED, Judgement.HOLDS)
        none = Judgement.UNDECIDED if outcomes[claim.name] else Judgement.UNTESTED
        verdict = next((one for one in order if one in verdicts), none)
        measured = {one.contrast.words for one in telling}
        if verdict is Judgement.HOLDS and len(measured) < len(claim.contrasts):
            verdict = Judgement.UNDECIDED  # some of what it says has no record
        yield claim, outcomes[claim.name], verdict


def _mean(measures: Sequence[Measure]) -> float:
    return fmean(one.value for one in measures if one.value is not None)


def _contrasts(rows: Sequence[dict[str, Any]]) -> Iterator[Contrast]:
    for row in rows:
        given: dict[str, Any] = {"at": {}, **row}
        named = ("arm", "than", "less", "needs_in")
        for key in given.keys() & named:
            given[key] = (given[key],) if isinstance(given[key], str) else tuple(given[key])
        yield Contrast(**given)
