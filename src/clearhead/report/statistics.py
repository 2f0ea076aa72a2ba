"""Differences between two arms over seeds, by Welch's test (docs/log.md says why not paired).

The error of drawn items, added by Satterthwaite's rule, may narrow the interval of a few seeds: a
difference has the wider interval and the larger p-value of the tests with and without it."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from clearhead.records.intervals import LEVEL, Component, component, of_numbers, t_quantile
from clearhead.report import style


class Summary(NamedTuple):
    """Mean over n seeds, sample standard deviation, 95 % t-interval (None without spread)."""

    n: int
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None


class Verdict(StrEnum):
    """Verdict of the seeds on a difference to the baseline."""

    LOWER = "lower"
    HIGHER = "higher"
    UNDECIDED = "undecided"
    NO_SPREAD = "no spread: undecided"
    ONE_SEED = "one seed: undecided"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of the variant less mean of the baseline, or their ratio less 1, with a two-sided 95 %
    interval and p-value `against` 0 or a margin: None where an arm has a single seed or nothing
    varies (`alike`). By the numbers `compared` a comparison that is shown twice counts once."""

    mean: float
    interval: tuple[float, float] | None
    p: float | None
    against: float = 0.0
    alike: bool = False
    compared: Any = None

    @property
    def verdict(self) -> Verdict:
        """Decided where the interval excludes what it is tested against."""
        if self.interval is None:
            return Verdict.NO_SPREAD if self.alike else Verdict.ONE_SEED
        low, high = self.interval
        if low > self.against:
            return Verdict.HIGHER
        return Verdict.LOWER if high < self.against else Verdict.UNDECIDED

    @property
    def decidable(self) -> float | None:
        """The smallest effect that this spread could have decided, half the interval's width."""
        low, high = self.interval or (-math.inf, math.inf)
        return (high - low) / 2 if math.isfinite(high - low) else None


def summarize(values: Sequence[float]) -> Summary | None:
    """Summarise one number a seed; None for no numbers."""
    n = len(values)
    if n < 2:
        return Summary(1, values[0], None, None) if values else None
    deviation = math.sqrt(component(values).variance * n)
    return Summary(n, math.fsum(values) / n, deviation, of_numbers(values))


def alike_trials(n: int) -> Component:
    """The error of a difference of two shares of the same n trials, all hits or misses in each arm,
    with one hit and one miss more (Agresti and Caffo, 2000): none of n is not never."""
    share = 1 / (n + 2)
    return Component(2 * share * (1 - share) / (n + 2), n - 1)


def compare(
    variant: Sequence[float],
    baseline: Sequence[float],
    items: Callable[[float], Sequence[Component]] = lambda ratio: (),
    *,
    relative: bool = False,
    against: float = 0.0,
    compared: Any = None,
    given: bool = False,
) -> Difference | None:
    """Compare two arms by one number a seed; None where one of them has none.

    `items` are the errors of drawn questions in the variant less a ratio of the baseline, the only
    ones of `given` models. A `relative` difference is a ratio less 1, whose interval holds every
    `against` at which Welch's test of variant and (1 + `against`) baseline is not significant
    (Fieller, 1954)."""
    if not variant or not baseline or (relative and not math.fsum(baseline)):
        return None
    over, under = (math.fsum(side) / len(side) for side in (variant, baseline))
    mean = over / under - 1 if relative else over - under
    unknown = Difference(mean=mean, interval=None, p=None, against=against, compared=compared)
    given = given and not relative
    if min(len(variant), len(baseline)) < 2 and not (given and items(1.0)):
        return unknown
    seeds = [] if given else [component(variant), component(baseline)]

    def errors(ratio: float) -> list[Component]:
        """Of the seeds, and of seeds and items, where anything varies (Satterthwaite)."""
        own = [one.scaled(by) for one, by in zip(seeds, (1, ratio), strict=False)]
        sums = []
        for parts in (own, [*own, *items(ratio)]):
            if variance := math.fsum(one.variance for one in parts):
                weights = math.fsum(one.variance**2 / one.degrees for one in parts)
                sums.append(Component(variance, variance**2 / weights))
        return sums

    total = errors(mean + 1 if relative else 1.0)
    if not total:
        return replace(unknown, alike=True)
    if not relative:
        half = max(t_quantile(one.degrees) * math.sqrt(one.variance) for one in total)
        p = _tails(mean - against, total)
        return replace(unknown, interval=(mean - half, mean + half), p=p)

    def p_value(ratio: float) -> float:
        return _tails(over - ratio * under, errors(ratio))

    if seeds[1].variance and _tails(under, seeds[1:]) > LEVEL:
        return replace(unknown, interval=(-math.inf, math.inf), p=1.0)
    step = math.sqrt(total[-1].variance) / abs(under)
    low, high = (_edge(p_value, mean + 1, side) - 1 for side in (-step, step))
    return replace(unknown, interval=(low, high), p=p_value(1 + against))


def _tails(mean: float, errors: Sequence[Component]) -> float:
    """The largest p-value of a mean against zero, of those that its errors give (Student's t)."""
    from scipy.special import stdtr

    tails = (2 * stdtr(one.degrees, -abs(mean) / math.sqrt(one.variance)) for one in errors)
    return float(max(tails, default=mean == 0))


def _edge(p_value: Callable[[float], float], start: float, step: float) -> float:
    """The value beyond `start`, in the direction of `step`, where its p-value falls to `LEVEL`."""
    from scipy.optimize import brentq

    for _ in range(200):
        if p_value(start + step) <= LEVEL:
            ends = start, start + step
            return float(brentq(lambda x: p_value(x) - LEVEL, *ends, xtol=1e-300, rtol=1e-14))
        step *= 2
    return math.copysign(math.inf, step)


def threshold_of(differences: Iterable[Difference]) -> float:
    """Benjamini and Hochberg's threshold, the largest p that is at most rank / n of `LEVEL`:
    differences with p up to it hold together. Negative where none is."""
    ranked = sorted(family(differences).values())
    # A p that equals its limit counts, however the limit is rounded.
    limits = ((p, (LEVEL + 1e-12) * rank / len(ranked)) for rank, p in enumerate(ranked, 1))
    return max((p for p, limit in limits if p <= limit), default=-1.0)


def family(differences: Iterable[Difference]) -> dict[Hashable, float]:
    """The p-value of each comparison that has one: once, however many tables or claims show it."""
    return {(one.against, one.compared or one): one.p for one in differences if one.p is not None}


def holds(difference: Difference, threshold: float) -> bool:
    """True if a difference is decided, and survives among all comparisons of its page."""
    decided = difference.verdict in (Verdict.LOWER, Verdict.HIGHER)
    return decided and difference.p is not None and difference.p <= threshold


def verdict_in_words(difference: Difference, threshold: float) -> str:
    """`lower by 1.2`, with `, alone` where it does not hold among all comparisons; `undecided
    (±0.7)`, with the smallest effect that could have been decided; "" of one seed."""
    if difference.verdict is Verdict.NO_SPREAD:
        return "undecided (all seeds alike)"
    if difference.decidable is None:
        return ""
    if difference.verdict is Verdict.UNDECIDED:
        return f"{difference.verdict} (±{style.number(difference.decidable, 2)})"
    words = f"{difference.verdict} by {style.number(abs(difference.mean), 2)}"
    return words if holds(difference, threshold) else f"{words}, alone"
