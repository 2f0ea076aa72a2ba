"""Comparable records of one contrast, taken together.

Stouffer's method: each record's test gives a z, weighted by the square root of its runs, so that a
record of few seeds keeps the caution of its own few degrees of freedom. The interval holds every
difference that the pooled test does not reject.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clearhead.report.statistics import Difference
from clearhead.reproduce.contrasts import Contrast, Judgement, Outcome, judgement_of

_Z = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """One comparison of a claim over all records.

    Attributes:
        outcomes: that of each record; `counted` are those that make the difference.
        difference: over the counted records; None where there is none.
        agreement: p-value of the hypothesis that all counted records have the same difference
            (Cochran's Q); None of a single one.
    """

    contrast: Contrast
    outcomes: tuple[Outcome, ...]
    counted: tuple[Outcome, ...]
    difference: Difference | None
    agreement: float | None = None

    @property
    def tested(self) -> bool:
        """True where the p-value makes a verdict, so that it counts among those of the book."""
        return (
            not self.contrast.counted
            and self.difference is not None
            and self.difference.p is not None
        )

    def judgement(self, threshold: float) -> Judgement:
        """The verdict, where `threshold` is the largest p that holds among all of the book."""
        if not self.counted or self.difference is None:
            return Judgement.UNTESTED
        if self.contrast.counted:
            verdicts = {one.judgement(threshold) for one in self.counted}
            return verdicts.pop() if len(verdicts) == 1 else Judgement.DOES_NOT_HOLD
        return judgement_of(self.contrast, self.difference, threshold)


def pool(contrast: Contrast, outcomes: Sequence[Outcome]) -> Pooled:
    """The records of a contrast together.

    Records in which it does not apply say nothing. Those without a test, of one seed or of seeds
    that all agree, count only where no other has one. Runs that two records share count once.
    """
    applying = [one for one in outcomes if one.applies]
    testing = [one for one in applying if one.tested] or applying
    counted: list[Outcome] = []
    for one in sorted(testing, key=lambda one: -one.weight):
        if not any(one.repeats(other) for other in counted):
            counted.append(one)
    found = Pooled(
        contrast=contrast, outcomes=tuple(outcomes), counted=tuple(counted), difference=None
    )
    if not counted:
        return found
    first = counted[0].difference
    if len(counted) == 1 or not first.p or contrast.counted:
        return replace(found, difference=first)
    difference, agreement = _together(counted, contrast.bound)
    return replace(found, difference=difference, agreement=agreement)


def _together(outcomes: Sequence[Outcome], bound: float) -> tuple[Difference, float]:
    from scipy.optimize import brentq
    from scipy.stats import chi2, norm

    weights = [math.sqrt(one.weight) for one in outcomes]
    norm_of_weights = math.sqrt(math.fsum(one**2 for one in weights))

    def scores(against: float) -> list[float]:
        tests = [test for one in outcomes if (test := one.test(against)) is not None]
        return [
            math.copysign(norm.isf(max(one.p or 1e-300, 1e-300) / 2), one.mean - against)
            for one in tests
        ]

    def z(against: float) -> float:
        pairs = zip(weights, scores(against), strict=True)
        return math.fsum(weight * score for weight, score in pairs) / norm_of_weights

    means = [one.difference.mean for one in outcomes]
    widths = [one.difference.decidable for one in outcomes]
    reach = max(one for one in widths if one is not None) + 1e-12
    low, high = min(means) - 2 * reach, max(means) + 2 * reach
    middle = brentq(z, low, high, xtol=1e-12)
    ends = [brentq(lambda x, side=side: z(x) - side, low, high, xtol=1e-12) for side in (_Z, -_Z)]
    q = math.fsum(one**2 for one in scores(middle))
    compared = frozenset(one.difference.compared for one in outcomes)
    difference = Difference(
        mean=middle,
        interval=(ends[0], ends[1]),
        p=float(2 * norm.sf(abs(z(bound)))),
        against=bound,
        compared=compared,
    )
    return difference, float(chi2.sf(q, len(outcomes) - 1))
