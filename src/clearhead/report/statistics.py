"""Mean and spread over seeds, intervals of differences between two arms, and verdicts on them.

Arms are compared by Welch's test, not paired by seed. A seed gives two architectures the same order
of data but other initial weights. With three seeds pairing halves the degrees of freedom, which
pays only where paired runs correlate by more than 0.58; over 313 contrasts of the committed records
they do by 0.15 on average, by 0.11 in the loss at the training length.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from clearhead.records.intervals import LEVEL, t_quantile, t_tails


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary over n seeds: `deviation` is the sample standard deviation, `interval` the 95 %
    t-interval of the mean; both are None for a single seed."""

    n: int
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Component:
    """One independent source of a mean's error: its variance and that estimate's degrees of
    freedom."""

    variance: float
    degrees: float


class Verdict(StrEnum):
    """Verdict of the seeds on a difference to the baseline."""

    LOWER = "lower"
    HIGHER = "higher"
    UNDECIDED = "undecided"
    ONE_SEED = "one seed: undecided"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of the variant less mean of the baseline, and its two-sided 95 % interval and p-value.

    `interval` and `p` are None where either arm has a single seed.
    """

    mean: float
    interval: tuple[float, float] | None
    p: float | None

    @property
    def verdict(self) -> Verdict:
        """Decided where the interval excludes zero."""
        if self.interval is None:
            return Verdict.ONE_SEED
        low, high = self.interval
        return Verdict.HIGHER if low > 0 else Verdict.LOWER if high < 0 else Verdict.UNDECIDED

    @property
    def decidable(self) -> float | None:
        """The smallest effect that seeds of this spread could have decided: half the interval."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def summarize(values: Sequence[float]) -> Summary | None:
    """Summarise one number a seed; None for no numbers."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(n=1, mean=mean, deviation=None, interval=None)
    error = component(values)
    half = t_quantile(error.degrees) * math.sqrt(error.variance)
    deviation = math.sqrt(error.variance * n)
    return Summary(n=n, mean=mean, deviation=deviation, interval=(mean - half, mean + half))


def component(values: Sequence[float]) -> Component:
    """The error of the mean of two or more independent numbers."""
    n = len(values)
    mean = math.fsum(values) / n
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Component(variance=squares / (n - 1) / n, degrees=n - 1)


def compare(
    variant: Sequence[float], baseline: Sequence[float], items: Sequence[Component] = ()
) -> Difference | None:
    """Compare two arms by one number a seed; None where one of them has none.

    Args:
        items: further errors of the difference, such as that of the questions which were drawn.
            Degrees of freedom are Welch's and Satterthwaite's, of all components together.
    """
    if not variant or not baseline:
        return None
    mean = math.fsum(variant) / len(variant) - math.fsum(baseline) / len(baseline)
    if len(variant) < 2 or len(baseline) < 2:
        return Difference(mean=mean, interval=None, p=None)
    components = (component(variant), component(baseline), *items)
    variance = math.fsum(c.variance for c in components)
    if variance == 0:
        return Difference(mean=mean, interval=(mean, mean), p=float(mean == 0))
    degrees = variance**2 / math.fsum(c.variance**2 / c.degrees for c in components)
    error = math.sqrt(variance)
    half = t_quantile(degrees) * error
    return Difference(
        mean=mean, interval=(mean - half, mean + half), p=t_tails(mean / error, degrees)
    )


def false_discovery_threshold(p_values: Iterable[float], rate: float = LEVEL) -> float:
    """Benjamini and Hochberg's threshold: differences with p up to it hold at that rate together.

    Negative where none does.
    """
    ordered = sorted(p_values)
    limits = [rate * rank / len(ordered) for rank in range(1, len(ordered) + 1)]
    return max((p for p, limit in zip(ordered, limits, strict=True) if p <= limit), default=-1.0)
