"""The papers' claims, each with its published numbers, and verdicts on them from records."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from clearhead.records.frame import frame
from clearhead.records.runs import Records
from clearhead.report.costs import add_costs
from clearhead.report.verdicts import threshold_of
from clearhead.reproduce.contrasts import Contrast, Judgement, Outcome

if TYPE_CHECKING:
    from pandas import DataFrame

ALL = "*"  # arms
FILES = ("differential", "coca", "blocks", "softmax1", "ours")
"""Modules of `claimed`, in the order of the book."""


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
    """

    name: str
    says: str
    published: str
    study: str
    contrasts: tuple[Contrast, ...]
    also: tuple[str, ...] = ()

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


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the book."""
    package = f"{__package__}.claimed"
    modules = (importlib.import_module(f"{package}.{name}") for name in FILES)
    return tuple(claim for one in modules for claim in one.CLAIMS)


def evidence(sources: Mapping[str, Records]) -> "DataFrame":
    """The numbers of records, with what each scheme adds to the perplexity."""
    for records in sources.values():
        for run in records.runs:
            add_costs(run)
    return frame(sources)


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
    numbers = evidence(sources)
    outcomes = {claim.name: claim.outcomes(numbers) for claim in claims()}
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
