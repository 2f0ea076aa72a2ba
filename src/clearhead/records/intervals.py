"""95 % intervals of means: of drawn items, of shares, of seeds."""

import math
from collections.abc import Sequence

LEVEL = 0.05  # of every test, and the false discovery rate of a page

Interval = tuple[float, float]


def wilson(successes: float, trials: int) -> Interval:
    """The 95 % interval of Wilson (1927) for a share of independent trials."""
    z = 1.959963984540054
    share, squared = successes / trials, z * z / trials
    centre = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / trials / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def of_items(items: Sequence[float], centre: float | None = None) -> Interval | None:
    """The interval of the mean of independently drawn items; None where there is none.

    Items that are all 0 or 1 are trials (Wilson), two or more others that differ have Student's t.

    Args:
        centre: the number of which the items are parts, where it is not exactly their mean.
    """
    n = len(items)
    if n and all(one in (0, 1) for one in items):
        return wilson(sum(items), n)
    return of_numbers(items, centre)


def of_numbers(numbers: Sequence[float], centre: float | None = None) -> Interval | None:
    """Student's interval of the mean of two or more numbers that differ; None of others.

    Args:
        centre: as in `of_items`.
    """
    n = len(numbers)
    if n < 2 or min(numbers) == max(numbers):
        return None
    mean = math.fsum(numbers) / n
    variance = math.fsum((one - mean) ** 2 for one in numbers) / (n - 1) / n
    half = t_quantile(n - 1) * math.sqrt(variance)
    middle = mean if centre is None else centre
    return middle - half, middle + half


def on_log_scale(interval: Interval, centre: float) -> Interval:
    """An interval around a number above 0, recomputed on a logarithmic scale."""
    half = min(700.0, (interval[1] - interval[0]) / 2 / centre)
    return centre * math.exp(-half), centre * math.exp(half)


def t_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t, for 1 degree of freedom or more, whole or not."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - LEVEL / 2))
