"""The papers' claims, each with its published numbers, and verdicts on them from records."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from clearhead.records.frame import frame
from clearhead.records.runs import Records
from clearhead.report.costs import add_costs
from clearhead.report.verdicts import threshold_of
from clearhead.reproduce.contrasts import Contrast, Judgement, Outcome
from clearhead.reproduce.pooling import Pooled, pool

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


Judged = tuple[Claim, tuple[Pooled, ...], Judgement]


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


def threshold_over(rows: Iterable[Sequence[Pooled]]) -> float:
    """The largest p that holds among all comparisons of all claims that chance can decide."""
    tested = (one.difference for ones in rows for one in ones if one.tested)
    return threshold_of(one for one in tested if one is not None)


def judged(sources: Mapping[str, Records]) -> list[Judged]:
    """Every claim with its comparisons, each over all records, and its verdict.

    A claim holds where all its comparisons do, and does not where one is decided the other way, at
    a false discovery rate of 5 % over all comparisons of the book (Benjamini-Hochberg). It is
    untested where no record counts for any of them.
    """
    numbers = evidence(sources)
    rows = {
        claim.name: tuple(pool(one, [*one.outcomes(numbers)]) for one in claim.contrasts)
        for claim in claims()
    }
    threshold = threshold_over(rows.values())
    return [
        (
            claim,
            rows[claim.name],
            verdict_of([one.judgement(threshold) for one in rows[claim.name]]),
        )
        for claim in claims()
    ]


def verdict_of(verdicts: Sequence[Judgement]) -> Judgement:
    """The verdict of a claim by those of its comparisons."""
    if Judgement.DOES_NOT_HOLD in verdicts:
        return Judgement.DOES_NOT_HOLD
    (one, *others) = {*verdicts}
    return Judgement.UNDECIDED if others else one
