"""Measures taken during training, at equal loss.

An optimizer that learns faster grows its outliers sooner: at equal steps it looks worse than at
equal loss. So models are compared where they are equally good, pair by pair with the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report.charts import where_reached
from clearhead.report.pivots import Entry, Found, Heading, Pivot, arm_headings, build, entry

_TOKENS = {"first": "first token", "rest": "other tokens"}


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """Something measured on the way."""

    metric: str
    title: str
    axis: str
    by_tokens: bool = True
    scale: float = 1.0

    def dimensions(self, records: Records, arm: str) -> list[dict[str, Any]]:
        """Dimensions that tell its lines apart: the first token and the rest, or the first map."""
        if self.by_tokens:
            return [{"tokens": name} for name in _TOKENS]
        return [{"map": name} for name in records.dimension(self.metric, "map", arm)][:1]

    def at(self, loss: float, run: Run, dimensions: dict[str, Any]) -> float | None:
        """The value where the run had this validation loss, interpolated; None where it was not
        measured before and after."""
        losses = dict(steps_of(run, "loss", {}))
        values = steps_of(run, self.metric, dimensions)
        curve = [(losses[step], value * self.scale) for step, value in values if step in losses]
        return where_reached(curve, loss)


MILESTONES = (
    Milestone(metric="kurtosis", title="Kurtosis", axis="kurtosis (3 = Gaussian)"),
    Milestone(
        metric="kurtosis_rotated",
        title="Kurtosis in OrthoAdam’s basis",
        axis="kurtosis, rotated (3 = Gaussian)",
    ),
    Milestone(metric="largest_activation", title="Largest activation", axis="largest |activation|"),
    Milestone(
        metric="first_token_argmax_share",
        title="First token’s argmax share",
        axis="% of query–head pairs",
        by_tokens=False,
        scale=100,
    ),
)


def at_equal_loss(records: Records) -> Pivot | None:
    """Each arm beside the reference where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    reference, *_ = records.arms() or [""]
    rows = arm_headings(records)[1:]
    entries = {arm: _row(records, arm, reference) for _, arm in rows}
    columns = dict.fromkeys(heading for row in entries.values() for heading in row)
    return build(
        f"at equal loss, beside {reference}",
        rows,
        [(heading, heading) for heading in columns],
        lambda arm, heading: (entries[arm][heading],) if heading in entries[arm] else (),
        corner="model",
    )


def _row(records: Records, arm: str, reference: str) -> dict[Heading, Entry]:
    others = {run.seed: run for run in records.of(reference)}
    pairs = {run.seed: (run, others[run.seed]) for run in records.of(arm) if run.seed in others}
    losses = {}
    for seed, pair in pairs.items():
        curves = [steps_of(run, "loss", {}) for run in pair]
        if all(curves):
            losses[seed] = max(min(loss for _, loss in curve) for curve in curves)
    if not losses:
        return {}
    at = Heading(group="Loss", title="compared at", note="nats per token")
    row = {at: entry(_found(losses), {}, reference=reference)}
    for milestone in MILESTONES:
        for dimensions in milestone.dimensions(records, reference):
            sides: tuple[Found, Found] = {}, {}
            for seed, loss in losses.items():
                values = [milestone.at(loss, run, dimensions) for run in pairs[seed]]
                for side, value in zip(sides, values, strict=True):
                    side |= {} if None in values else _found({seed: value})
            mine, theirs = sides
            if not mine:
                continue
            tokens = _TOKENS.get(dimensions.get("tokens", ""))
            group = milestone.title + (f", {tokens}" if tokens else "")
            note = "" if milestone.by_tokens else milestone.axis
            heading = Heading(group=group, title="this model", note=note)
            row[heading] = entry(mine, theirs, reference=reference)
            row[replace(heading, title=reference)] = entry(theirs, {}, reference=reference)
    return row


def _found(values: Mapping[int, float | None]) -> Found:
    return {seed: [Measure(metric="", value=value)] for seed, value in values.items()}


def steps_of(run: Run, metric: str, dimensions: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, value) of what was measured on the way."""
    return sorted(
        (int(one.dimensions["step"]), one.value)
        for one in run.select(metric, **dimensions)
        if "step" in one.dimensions and one.value is not None
    )
