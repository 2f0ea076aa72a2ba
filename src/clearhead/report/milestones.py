"""Measures taken during training, against the loss at that time.

An optimizer that learns faster grows its outliers sooner: at equal steps it looks worse than at
equal loss. So models are compared where they are equally good, pair by pair with the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from clearhead.records.runs import Measure, Records, Run
from clearhead.report.charts import Looks, Point, line, new, scale_axis, where_reached
from clearhead.report.page import Panel
from clearhead.report.pivots import Entry, Found, Heading, Pivot, arm_headings, build, entry


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
            return [{"tokens": "first"}, {"tokens": "rest"}]
        return [{"map": name} for name in records.dimension(self.metric, "map", arm)][:1]


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
    figure = new("validation loss (nats per token; training goes to the right)", milestone.axis)
    figure.update_xaxes(autorange="reversed")
    shown: list[float] = []
    for arm in records.arms():
        for number, dimensions in enumerate(milestone.dimensions(records, arm)):
            points = _mean_curve(records.of(arm), milestone, dimensions)
            shown.extend(value for _, value, _ in points)
            name, dash = (f"{arm}, other tokens", "dot") if number else (arm, "solid")
            line(figure, name, points, looks[arm], size=5, dash=dash, legend=not number, group=arm)
    if not shown:
        return None
    if milestone.by_tokens:
        scale_axis(figure, milestone.axis, shown)
    note = "Means over seeds at the same step."
    if milestone.by_tokens:
        note += " Solid: the first token; dotted: all other tokens."
    return Panel(title=f"{milestone.title} against loss", figure=figure, note=note)


def at_equal_loss(records: Records) -> Pivot | None:
    """Each arm beside the reference where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    reference, *_ = records.arms() or [""]
    columns: dict[Heading, Heading] = {}
    cells: dict[tuple[str, Heading], Entry] = {}
    for _, arm in arm_headings(records)[1:]:
        for heading, one in _row(records, arm, reference).items():
            columns[heading] = heading
            cells[arm, heading] = one
    return build(
        f"at equal loss, beside {reference}",
        arm_headings(records)[1:],
        [(heading, heading) for heading in columns],
        lambda arm, heading: (cells[arm, heading],) if (arm, heading) in cells else (),
        corner="model",
    )


def _row(records: Records, arm: str, reference: str) -> dict[Heading, Entry]:
    others = {run.seed: run for run in records.of(reference)}
    pairs = {run.seed: (run, others[run.seed]) for run in records.of(arm) if run.seed in others}
    losses = {}
    for seed, pair in pairs.items():
        lowest = [
            min((loss for _, loss in steps_of(run, "loss", {})), default=None) for run in pair
        ]
        if None not in lowest:
            losses[seed] = max(value for value in lowest if value is not None)
    if not losses:
        return {}
    row = {
        Heading(group="Loss", title="compared at", note="nats per token"): entry(
            _found(losses), {}, reference=reference
        )
    }
    tokens = {"first": ", first token", "rest": ", other tokens"}
    for milestone in MILESTONES:
        for dimensions in milestone.dimensions(records, reference):
            mine: dict[int, float] = {}
            theirs: dict[int, float] = {}
            for seed, loss in losses.items():
                ours, other = (
                    where_reached([*_by_step(run, milestone, dimensions).values()], loss)
                    for run in pairs[seed]
                )
                if ours is not None and other is not None:
                    mine[seed], theirs[seed] = ours, other
            if not mine:
                continue
            group = milestone.title + tokens.get(dimensions.get("tokens", ""), "")
            note = "" if milestone.by_tokens else milestone.axis
            here, there = _found(mine), _found(theirs)
            row[Heading(group=group, title="this model", note=note)] = entry(
                here, there, reference=reference
            )
            row[Heading(group=group, title=reference, note=note)] = entry(
                there, {}, reference=reference
            )
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


def _by_step(
    run: Run, milestone: Milestone, dimensions: dict[str, Any]
) -> dict[int, tuple[float, float]]:
    """{step: (loss, value)}, in the order of steps."""
    losses = dict(steps_of(run, "loss", {}))
    return {
        step: (losses[step], value * milestone.scale)
        for step, value in steps_of(run, milestone.metric, dimensions)
        if step in losses
    }


def _mean_curve(
    runs: Sequence[Run], milestone: Milestone, dimensions: dict[str, Any]
) -> list[Point]:
    """Mean loss and value at each step that every seed was measured at."""
    curves = [_by_step(run, milestone, dimensions) for run in runs]
    shared = set.intersection(*map(set, curves)) if curves else set[int]()
    points: list[Point] = []
    for step in sorted(shared):
        loss, value = (fmean(one) for one in zip(*(curve[step] for curve in curves), strict=True))
        points.append((loss, value, None))
    return points
