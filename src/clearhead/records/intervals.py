"""95 % intervals of means: of drawn items, of shares, of seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.05  # of every test, and the false discovery rate of a page
FEWEST = 5  # texts whose losses tell the spread of a perplexity

Interval = tuple[float, float]


class Component(NamedTuple):
    """An independent source of a mean's error: its variance, and degrees of freedom."""

    variance: float
    degrees: float

    def scaled(self, by: float) -> "Component":
        """The error of the mean times a factor."""
        return self._replace(variance=by**2 * self.variance)


def wilson(successes: float, trials: int) -> Interval:
    """The 95 % interval of Wilson (1927) for a share of independent trials."""
    z = 1.959963984540054
    share, squared = successes / trials, z * z / trials
    centre = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / trials / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def of_numbers(numbers: Sequence[float], centre: float | None = None) -> Interval | None:
    """Student's interval of the mean of two or more numbers that differ; None of others. `centre`
    is the number of which they are parts, where it is not exactly their mean."""
    if len(numbers) < 2 or not (error := component(numbers)).variance:
        return None
    half = t_quantile(error.degrees) * math.sqrt(error.variance)
    middle = math.fsum(numbers) / len(numbers) if centre is None else centre
    return middle - half, middle + half


def component(values: Sequence[float]) -> Component:
    """The error of the mean of two or more independent numbers; 0 where they agree to rounding."""
    n = len(values)
    if max(values) - min(values) <= 1e-12 * max(map(abs, values)):
        return Component(0.0, n - 1)
    mean = math.fsum(values) / n
    return Component(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n, n - 1)


def of_metric(metric: str, items: Sequence[float], centre: float) -> Interval | None:
    """The interval of a metric by its items: of trials Wilson's, of others Student's; of a
    perplexity on the scale of the loss, from `FEWEST` items on; of a share within 0 and 1."""
    trials = items and all(one in (0, 1) for one in items) and not metric.startswith("added")
    interval = wilson(sum(items), len(items)) if trials else of_numbers(items, centre)
    if interval is None or metric.startswith("added"):
        return interval
    if metric == "perplexity":
        if len(items) < FEWEST:
            return None
        half = min(700.0, (interval[1] - interval[0]) / 2 / centre)
        return centre * math.exp(-half), centre * math.exp(half)
    if "loss" not in metric and all(0 <= one <= 1 for one in items):
        return max(0.0, interval[0]), min(1.0, interval[1])
    return interval


def t_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t, for 1 degree of freedom or more, whole or not."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - LEVEL / 2))
