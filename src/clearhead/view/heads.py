"""The choice of heads whose maps a page has room for."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Head(NamedTuple):
    """One head of one layer, both from 0."""

    layer: int
    head: int


def by_extremes(statistics: Iterable[Mapping[Head, float]]) -> list[Head]:
    """Every head once, the most telling first: by each statistic in turn the head with the largest
    value, then the one with the smallest, then the next."""
    queues = []
    for values in statistics:
        ordered = sorted(values, key=lambda head: (-values[head], head))
        queues += [ordered, ordered[::-1]]
    longest = max(map(len, queues), default=0)
    return list(
        dict.fromkeys(queue[i] for i in range(longest) for queue in queues if i < len(queue))
    )
