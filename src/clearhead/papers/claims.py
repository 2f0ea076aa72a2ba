"""The papers' claims, each with its published numbers, and verdicts on them from records.

A contrast's records, of n_i runs each, are pooled by Stouffer's method: z = Σ √n_i z_i / √Σ n_i.
The interval holds every difference that the pooled test does not reject.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from clearhead.papers import blocks, coca, differential, ours, softmax1
from clearhead.papers.contrasts import Claim, Contrast, Judgement, Outcome, judge
from clearhead.records.runs import Records
from clearhead.report.statistics import LEVEL, Difference, threshold_of

PAPERS = (differential, coca, blocks, softmax1, ours)
CLAIMS: tuple[Claim, ...] = tuple(claim for paper in PAPERS for claim in paper.CLAIMS)
"""All claims, in the order of the book."""
_Z = 1.959963984540054


@dataclass(frozen=True)
class Pooled:
    """One comparison of a claim: its difference over the records that are `counted`; `agreement` is
    the p-value of the hypothesis that all have the same (Cochran's Q)."""

    contrast: Contrast
    outcomes: tuple[Outcome, ...]
    counted: tuple[Outcome, ...]
    difference: Difference | None
    agreement: float | None = None
    verdict: Judgement = Judgement.UNTESTED

    @property
    def records_differ(self) -> bool:
        return self.agreement is not None and self.agreement <= LEVEL

    def judgement(self, threshold: float) -> Judgement:
        """The verdict where `threshold` is the largest p that holds in the book."""
        # Where numbers are counted, without chance, all records must agree.
        ones = tuple(one.difference for one in self.counted) if self.contrast.counted else ()
        return verdict_of([judge(self.contrast, x, threshold) for x in ones or (self.difference,)])


def pool(contrast: Contrast, sources: Mapping[str, Records]) -> Pooled:
    """Pool the records of a contrast: those without a test (one seed, or seeds that all agree) only
    if none has a test; runs that two records share count once."""
    outcomes = tuple(contrast.outcomes(sources))
    applying = [one for one in outcomes if not one.missing]
    tested = [one for one in applying if one.difference.p is not None and not contrast.counted]
    counted: list[Outcome] = []
    for one in sorted(tested or applying, key=lambda one: -one.weight):
        sides = [side for other in counted for side in other.difference.compared]
        if not any(mine <= side for mine in one.difference.compared for side in sides):
            counted.append(one)
    difference, agreement = counted[0].difference if counted else None, None
    if len(counted) > 1 and difference is not None and difference.p and not contrast.counted:
        difference, agreement = _pooled(counted, contrast.bound)
    return Pooled(contrast, outcomes, tuple(counted), difference, agreement)


def _pooled(outcomes: Sequence[Outcome], bound: float) -> tuple[Difference, float]:
    """The difference of all records together, and Cochran's p-value."""
    import numpy as np
    from scipy.optimize import brentq
    from scipy.stats import chi2, norm

    weights = np.sqrt([one.weight for one in outcomes])
    weights /= np.linalg.norm(weights)

    def scores(against: float) -> Any:
        tests = [test for one in outcomes if (test := one.test(against)) is not None]
        tails = norm.isf([max(one.p or 0.0, 1e-300) / 2 for one in tests])
        return np.copysign(tails, [one.mean - against for one in tests])

    def z(against: float, less: float = 0.0) -> float:
        return float(weights @ scores(against)) - less

    means = [one.difference.mean for one in outcomes]
    reach = max(one.difference.decidable or 0.0 for one in outcomes) + 1e-12
    low, high = min(means) - 2 * reach, max(means) + 2 * reach
    middle, start, end = (brentq(z, low, high, (one,), xtol=1e-12) for one in (0.0, _Z, -_Z))
    difference = Difference(
        mean=middle,
        interval=(start, end),
        p=float(2 * norm.sf(abs(z(bound)))),
        against=bound,
        compared=frozenset(one.difference.compared for one in outcomes),
    )
    return difference, float(chi2.sf(np.sum(scores(middle) ** 2), len(outcomes) - 1))


class Judged(NamedTuple):
    """A claim, its comparisons, each over all records, and its verdict."""

    claim: Claim
    comparisons: tuple[Pooled, ...]
    verdict: Judgement


def threshold_over(rows: Iterable[Sequence[Pooled]]) -> float:
    """The largest p that holds among all comparisons of all claims that chance can decide."""
    tested = (one for ones in rows for one in ones if not one.contrast.counted)
    return threshold_of(one.difference for one in tested if one.difference is not None)


def judged(sources: Mapping[str, Records]) -> list[Judged]:
    """Every claim with its verdict, at a false discovery rate of 5 % (Benjamini-Hochberg)."""
    rows = [[pool(one, sources) for one in claim.contrasts] for claim in CLAIMS]
    threshold = threshold_over(rows)
    found = []
    for claim, ones in zip(CLAIMS, rows, strict=True):
        comparisons = tuple(replace(one, verdict=one.judgement(threshold)) for one in ones)
        found.append(Judged(claim, comparisons, verdict_of([one.verdict for one in comparisons])))
    return found


def verdict_of(verdicts: Sequence[Judgement]) -> Judgement:
    """The verdict of a claim: that of its comparisons where they agree, or that one fails."""
    if Judgement.DOES_NOT_HOLD in verdicts:
        return Judgement.DOES_NOT_HOLD
    (one, *others) = {*verdicts}
    return Judgement.UNDECIDED if others else one
