"""The interface of a statistic: `observe`, then `measures`."""

from collections.abc import Iterable
from typing import Any, Protocol


class Statistic(Protocol):
    """Sums over everything observed. It may have `curves()` beside `measures()`."""

    def measures(self) -> list[dict[str, Any]]:
        """Payloads of "measure" records; none where nothing was observed."""


def measures_of(statistics: Iterable[Statistic]) -> list[dict[str, Any]]:
    """The measures of several statistics."""
    return [line for statistic in statistics for line in statistic.measures()]


def curves_of(statistics: Iterable[Statistic]) -> list[dict[str, Any]]:
    """Payloads of "curve" records of those statistics that have any."""
    return [
        line
        for statistic in statistics
        if (curves := getattr(statistic, "curves", None)) is not None
        for line in curves()
    ]
