"""Measures taken during training, at equal loss.

An optimizer that learns faster grows its outliers sooner: at equal steps it looks worse than at
equal loss. So models are compared where they are equally good, pair by pair with the reference.
"""

from itertools import pairwise
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report.pivots import Entry, Heading, Pivot, build, entry
from clearhead.report.quantities import SHARE, arm_headings

OUTLIERS = {
    "kurtosis": "Kurtosis",
    "kurtosis_rotated": "Kurtosis in OrthoAdam’s basis",
    "largest_activation": "Largest activation",
}
TOKENS = {"first": "first token", "rest": "other tokens"}
Column = tuple[str, dict[str, Any], float]  # metric, dimensions and scale


def at_equal_loss(records: Records) -> Pivot | None:
    """Each arm beside the reference where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    reference, *_ = records.arms() or [""]
    others = {run.seed: run for run in records.of(reference)}
    columns: list[tuple[Heading, tuple[Column, bool]]] = [
        (Heading("compared at", "Loss", "nats per token"), (("loss", {}, 1.0), False))
    ]
    outliers = [
        (f"{title}, {words}", "", (metric, {"tokens": tokens}, 1.0))
        for metric, title in OUTLIERS.items()
        for tokens, words in TOKENS.items()
    ]
    for name in records.dimension(SHARE, "map", reference)[:1]:
        note = "% of query–head pairs"
        outliers.append(("First token’s argmax share", note, (SHARE, {"map": name}, 100.0)))
    for group, note, column in outliers:
        columns.append((Heading("this model", group, note), (column, True)))
        columns.append((Heading(reference, group, note), (column, False)))

    def fill(arm: str, what: tuple[Column, bool]) -> tuple[Entry, ...]:
        column, own = what
        pairs = [(run, others[run.seed]) for run in records.of(arm) if run.seed in others]
        values = {run.seed: _at_equal_loss(run, other, column) for run, other in pairs}
        mine, theirs = (
            {seed: [Measure(metric="", value=ones[side])] for seed, ones in values.items() if ones}
            for side in (0, 1)
        )
        sides = (mine, theirs) if own else (theirs, {})
        return (entry(*sides, reference=reference),) if mine else ()

    title = f"at equal loss, beside {reference}"
    return build(title, arm_headings(records)[1:], columns, fill, corner="model")


def _at_equal_loss(run: Run, other: Run, column: Column) -> tuple[float, ...]:
    """The numbers of both runs where they had the same loss; none where one was not measured
    before and after."""
    metric, dimensions, scale = column
    losses = [dict(_steps(one, "loss", {})) for one in (run, other)]
    if not all(losses):
        return ()
    equal = max(min(one.values()) for one in losses)
    if metric == "loss":
        return equal, equal
    found = []
    for one, known in zip((run, other), losses, strict=True):
        values = _steps(one, metric, dimensions)
        curve = [(known[step], value * scale) for step, value in values if step in known]
        found.append(_where_reached(curve, equal))
    mine, theirs = found
    return () if mine is None or theirs is None else (mine, theirs)


def _steps(run: Run, metric: str, dimensions: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, value) of what was measured on the way."""
    return sorted(
        (int(one.dimensions["step"]), one.value)
        for one in run.select(metric, **dimensions)
        if "step" in one.dimensions and one.value is not None
    )


def _where_reached(curve: list[tuple[float, float]], x: float) -> float | None:
    """The y at which a curve first comes down to `x`; None where it starts below."""
    for (before, old), (after, new) in pairwise(curve):
        if after <= x <= before:
            part = 0.0 if before == after else (before - x) / (before - after)
            return old + part * (new - old)
    return None
