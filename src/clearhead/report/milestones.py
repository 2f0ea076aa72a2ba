"""Measures taken during training, against the loss at that time.

An optimizer that learns faster grows its outliers sooner: at equal steps it looks worse than at
equal loss. So models are compared where they are equally good, pair by pair with the reference.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report.charts import Curves, Looks, chart, where_reached
from clearhead.report.page import Panel
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

    def curve(self, run: Run, dimensions: dict[str, Any]) -> dict[int, tuple[float, float]]:
        """{step: (validation loss, value)}, in the order of steps."""
        losses = dict(steps_of(run, "loss", {}))
        values = steps_of(run, self.metric, dimensions)
        return {
            step: (losses[step], value * self.scale) for step, value in values if step in losses
        }


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


def against_loss(records: Records, looks: Looks, milestone: Milestone) -> Panel | None:
    """A milestone against validation loss, one line an arm, training going to the right."""
    curves: Curves = {}
    for arm in records.arms():
        for dimensions in milestone.dimensions(records, arm):
            ones = [milestone.curve(run, dimensions) for run in records.of(arm)]
            shared = set.intersection(*map(set, ones)) if ones else set[int]()
            curves[arm, _TOKENS.get(dimensions.get("tokens", ""), "")] = [
                (fmean(one[step][0] for one in ones), fmean(one[step][1] for one in ones), None)
                for step in sorted(shared)
            ]
    return chart(
        f"{milestone.title} against loss",
        curves,
        looks,
        "validation loss (nats per token; training goes to the right)",
        milestone.axis,
        across="reversed",
        up="auto" if milestone.by_tokens else "",
        size=5,
        note="Means over seeds at the same step.",
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
    curves = {seed: [steps_of(run, "loss", {}) for run in pair] for seed, pair in pairs.items()}
    losses = {
        seed: max(min(loss for _, loss in curve) for curve in both)
        for seed, both in curves.items()
        if all(both)
    }
    if not losses:
        return {}
    at = Heading(group="Loss", title="compared at", note="nats per token")
    row = {at: entry(_found(losses), {}, reference=reference)}
    for milestone in MILESTONES:
        for dimensions in milestone.dimensions(records, reference):
            reached = {
                seed: [
                    where_reached([*milestone.curve(run, dimensions).values()], loss)
                    for run in pairs[seed]
                ]
                for seed, loss in losses.items()
            }
            both = {seed: pair for seed, pair in reached.items() if None not in pair}
            here, there = (
                _found({seed: pair[side] or 0.0 for seed, pair in both.items()}) for side in (0, 1)
            )
            if not both:
                continue
            tokens = _TOKENS.get(dimensions.get("tokens", ""))
            group = milestone.title + (f", {tokens}" if tokens else "")
            note = "" if milestone.by_tokens else milestone.axis
            for title, mine, theirs in (("this model", here, there), (reference, there, {})):
                heading = Heading(group=group, title=title, note=note)
                row[heading] = entry(mine, theirs, reference=reference)
    return row


def _found(values: dict[int, float]) -> Found:
    return {seed: [Measure(metric="", value=value)] for seed, value in values.items()}


def steps_of(run: Run, metric: str, dimensions: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, value) of what was measured on the way."""
    return sorted(
        (int(one.dimensions["step"]), one.value)
        for one in run.select(metric, **dimensions)
        if "step" in one.dimensions and one.value is not None
    )
