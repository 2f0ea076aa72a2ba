"""Mean and spread over seeds, and when a difference between two arms may be called one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_Z_975 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What n seeds gave: `deviation` is the sample standard deviation, `interval` the 95 %
    t-interval of the mean; both are None for a single seed."""

    n: int
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None


class Verdict(StrEnum):
    """What the seeds say about a difference to the baseline."""

    LOWER = "lower"
    HIGHER = "higher"
    UNDECIDED = "undecided"
    ONE_SEED = "one seed: undecided"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The per-seed difference `variant - baseline`; `summary` is None where no seed is shared."""

    verdict: Verdict
    summary: Summary | None


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _Z_975  # Cornish-Fisher expansion about the normal; exact to 1e-4 from 30 degrees on
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def summarize(values: Sequence[float]) -> Summary | None:
    """Summarise one number a seed; None for no numbers."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(n=1, mean=mean, deviation=None, interval=None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(n - 1) * deviation / math.sqrt(n)
    return Summary(n=n, mean=mean, deviation=deviation, interval=(mean - half, mean + half))


def compare(variant: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Compare two {seed: value}, paired by seed (which fixes the order of the data for both).

    A difference counts only where the 95 % t-interval of the per-seed differences excludes zero.
    """
    seeds = sorted(variant.keys() & baseline.keys())
    summary = summarize([variant[seed] - baseline[seed] for seed in seeds])
    if summary is None or summary.interval is None:
        return Difference(verdict=Verdict.ONE_SEED, summary=summary)
    low, high = summary.interval
    if low > 0:
        return Difference(verdict=Verdict.HIGHER, summary=summary)
    if high < 0:
        return Difference(verdict=Verdict.LOWER, summary=summary)
    return Difference(verdict=Verdict.UNDECIDED, summary=summary)
