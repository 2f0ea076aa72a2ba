"""Learning rates of a sweep: as they are written, the best of them, and the next beyond an edge."""

import math
from collections.abc import Mapping
from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.records.loading import load

BEYOND = 3
"""Rates that a sweep tries beyond those it was given, at most."""

Losses = Mapping[float, float | None]
"""{rate: held-out loss}: inf where the run diverged, None where the loss is not known yet."""


def best(losses: Losses) -> float | None:
    """The rate of the lowest loss; None until all losses are known, and where all diverged."""
    known = {rate: value for rate, value in losses.items() if value is not None}
    if not known or len(known) < len(losses) or math.isinf(min(known.values())):
        return None
    return min(known, key=lambda rate: known[rate])


def beyond(losses: Losses) -> float | None:
    """The next rate to try, in two digits, where the best of several is the lowest or the highest.

    That edge is the geometric mean of it and of the edge's neighbour.
    """
    ordered, chosen = sorted(losses), best(losses)
    for edge, inner in (ordered[:2], ordered[:-3:-1]):
        if edge == chosen:
            return float(f"{edge * edge / inner:.1e}")
    return None


def written(rate: float) -> str:
    """A rate as folders and rates.json have it: 1.6e-2."""
    digits, exponent = f"{rate:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def loss(records: Path) -> float | None:
    """The held-out loss of a file's only run, at its training length, of the next token or of
    hidden ones; inf where the run diverged; None where there is no such file.

    Raises:
        ClearheadError: where the run has no such loss.
    """
    if not records.exists():
        return None
    (run,) = load(records).runs
    if run.header.get("diverged"):
        return math.inf
    for metric in ("loss", "masked loss"):
        line = run.measure(metric, length=run.sequence_length)
        if line is not None:
            return math.inf if line.value is None else line.value
    raise ClearheadError(f"{records} holds no loss at the training length: delete its folder")
