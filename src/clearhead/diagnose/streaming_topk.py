"""The largest magnitudes of a stream of numbers, and the median, in constant memory."""

import torch
from torch import Tensor

RANKS = (1, 2, 3, 10, 100)  # of the Differential Transformer's Table 5
KEPT = RANKS[-1]
_SHIFT = 14  # a bin is the first 18 bits of a float32: 2^-9 of the value wide


class RunningTopK:
    """The `KEPT` largest |x| of all rows added.

    The caller gives a bound of each row: a row that cannot hold any of them costs one comparison.
    """

    def __init__(self) -> None:
        self.values = torch.zeros(0)

    def add(self, rows: Tensor, bound: Tensor, visible: Tensor | None = None) -> None:
        """rows [..., N], bound [...] at least each row's largest |x|; hidden numbers do not count.

        Rows whose bound is not finite are left out.
        """
        floor = self.values[-1] if len(self.values) == KEPT else -1.0
        candidates = (bound > floor) & bound.isfinite()
        if not bool(candidates.any()):
            return
        largest = rows[candidates].abs()
        if visible is not None:
            largest = largest.masked_fill(~visible.expand(rows.shape)[candidates], -1.0)
        largest = torch.cat([self.values.to(largest), largest.flatten()])
        largest = largest[largest >= 0]
        self.values = largest.topk(min(KEPT, len(largest))).values

    def ranks(self) -> dict[int, float]:
        """{rank: value} for the `RANKS` that exist."""
        return ranks_of(self.values)


def ranks_of(values: Tensor) -> dict[int, float]:
    """{rank: value} of values in falling order."""
    return {rank: float(values[rank - 1]) for rank in RANKS if rank <= len(values)}


def merge(parts: list[RunningTopK]) -> Tensor:
    """The `KEPT` largest of several, in falling order."""
    values = torch.cat([part.values.float() for part in parts]) if parts else torch.zeros(0)
    return values.topk(min(KEPT, len(values))).values


class Histogram:
    """The median of many magnitudes, to 0.2 %: counts of float32's first 18 bits."""

    def __init__(self) -> None:
        self.counts = torch.zeros(1 << (32 - _SHIFT - 1), dtype=torch.int64)

    def add(self, x: Tensor) -> None:
        """Count the finite |x|."""
        x = x.detach().abs().float().flatten()
        bins = x[x.isfinite()].view(torch.int32) >> _SHIFT
        self.counts += torch.bincount(bins, minlength=len(self.counts)).to(self.counts.device)

    def median(self) -> float:
        """The middle of the bin that holds the median; NaN where nothing was counted."""
        return median_of(self.counts)


def median_of(counts: Tensor) -> float:
    """`Histogram.median` of given counts, which may be sums of several histograms."""
    total = counts.cumsum(0)
    if not int(total[-1]):
        return float("nan")
    half = (total[-1] + 1) // 2
    index = int(torch.searchsorted(total, half))
    if index == 0:
        return 0.0
    edges = (torch.tensor([index, index + 1], dtype=torch.int32) << _SHIFT).view(torch.float32)
    return float(edges.mean())
