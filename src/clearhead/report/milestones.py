"""What was measured during training, against the loss that it came with.

An optimizer that learns faster grows its outliers sooner: at equal steps it looks worse than at
equal loss. So models are compared where they are equally good, pair by pair with the reference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from clearhead.report import style
from clearhead.report.figures import Looks, Panel, line, new, scale_axis
from clearhead.report.records import Records, Run, ordered_maps
from clearhead.report.statistics import Difference, compare, summarize
from clearhead.report.tables import Column, Entry, Row, Table, seeds_in_words, seeds_of
from clearhead.report.verdicts import interval_in_words

Curve = list[tuple[float, float]]  # (loss, value) in the order of steps


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured on the way."""

    metric: str
    title: str
    axis: str
    by_tokens: bool = True
    scale: float = 1.0


QUANTITIES = (
    Quantity(metric="kurtosis", title="Kurtosis", axis="kurtosis (3 = Gaussian)"),
    Quantity(
        metric="kurtosis_rotated",
        title="Kurtosis in OrthoAdam’s basis",
        axis="kurtosis, rotated (3 = Gaussian)",
    ),
    Quantity(metric="largest_activation", title="Largest activation", axis="largest |activation|"),
    Quantity(
        metric="first_token_argmax_share",
        title="First token’s argmax share",
        axis="% of query–head pairs",
        by_tokens=False,
        scale=100,
    ),
)


def against_loss(records: Records, looks: Looks, quantity: Quantity) -> Panel | None:
    """A quantity against validation loss, one line an arm, training going to the right."""
    figure = new("validation loss (nats per token; training goes to the right)", quantity.axis)
    figure.update_xaxes(autorange="reversed")
    shown: list[float] = []
    for arm in records.arms():
        for number, dimensions in enumerate(_dimensions(records, arm, quantity)):
            points = _mean_curve(records.of(arm), quantity, dimensions)
            shown.extend(value for _, value, _ in points)
            second = {} if not number else {"name": ", other tokens", "dash": "dot"}
            line(figure, arm, points, looks[arm], size=5, **second)
    if not shown:
        return None
    if quantity.by_tokens:
        scale_axis(figure, quantity.axis, shown)
    note = "Means over seeds at the same step."
    if quantity.by_tokens:
        note += " Solid: the first token; dotted: all other tokens."
    return Panel(title=f"{quantity.title} against loss", figure=figure, note=note)


def at_equal_loss(records: Records) -> Table | None:
    """Each arm beside the reference where both had the same validation loss.

    Seed by seed that is the higher of the two lowest losses; values between two measurements are
    interpolated. A seed counts only where both models were measured before and after.
    """
    reference, *others = records.arms() or [""]
    rows = []
    columns: dict[str, Column] = {}
    for arm in others:
        cells: dict[str, tuple[Entry, ...]] = {}
        for column, entry in _row(records, arm, reference):
            columns.setdefault(f"{column.group}/{column.title}", column)
            cells[f"{column.group}/{column.title}"] = (entry,)
        if cells:
            rows.append((arm, cells))
    if not rows:
        return None
    return Table(
        columns=tuple(columns.values()),
        rows=tuple(
            Row(
                arm=arm,
                seeds=seeds_of(arm, reference, len(records.of(arm))),
                cells=tuple(cells.get(key, ()) for key in columns),
            )
            for arm, cells in rows
        ),
        baseline=reference,
    )


def _row(records: Records, arm: str, reference: str) -> Iterator[tuple[Column, Entry]]:
    others = {run.seed: run for run in records.of(reference)}
    pairs = {run.seed: (run, others[run.seed]) for run in records.of(arm) if run.seed in others}
    losses = {}
    for seed, pair in pairs.items():
        lowest = [min((loss for _, loss in _steps(run, "loss", {})), default=None) for run in pair]
        if None not in lowest:
            losses[seed] = max(value for value in lowest if value is not None)
    if not losses:
        return
    yield _column("Loss", "compared at", "nats per token"), _entry(list(losses.values()), None)
    for quantity in QUANTITIES:
        for dimensions in _dimensions(records, reference, quantity):
            mine: dict[int, float] = {}
            theirs: dict[int, float] = {}
            for seed, loss in losses.items():
                found = [_at(_curve(run, quantity, dimensions), loss) for run in pairs[seed]]
                if found[0] is not None and found[1] is not None:
                    mine[seed], theirs[seed] = found[0], found[1]
            if not mine:
                continue
            tokens = {"first": ", first token", "rest": ", other tokens"}
            group = quantity.title + tokens.get(dimensions.get("tokens", ""), "")
            unit = "" if quantity.by_tokens else quantity.axis
            difference = compare(list(mine.values()), list(theirs.values()))
            yield _column(group, "this model", unit), _entry(list(mine.values()), difference)
            yield _column(group, reference, unit), _entry(list(theirs.values()), None)


def _column(group: str, title: str, unit: str) -> Column:
    return Column(group=group, title=title, unit=unit)


def _entry(values: Sequence[float], difference: Difference | None) -> Entry:
    summary = summarize(values)
    assert summary is not None
    detail = seeds_in_words(summary.n)
    if difference is not None:
        detail += interval_in_words(difference, "difference")
    return Entry(
        name="",
        text=style.with_spread(summary.mean, summary.deviation),
        detail=detail,
        difference=difference,
    )


def _dimensions(records: Records, arm: str, quantity: Quantity) -> list[dict[str, Any]]:
    """What a quantity is told apart by: the first token and the rest, or the first map."""
    if quantity.by_tokens:
        return [{"tokens": "first"}, {"tokens": "rest"}]
    return [{"map": name} for name in ordered_maps(records.dimension(quantity.metric, "map", arm))][
        :1
    ]


def _steps(run: Run, metric: str, dimensions: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, value) of what was measured on the way."""
    wanted = dimensions.items()
    found = [
        (int(line["step"]), float(line["value"]))
        for line in run.measures.values()
        if line["metric"] == metric
        and line.get("step") is not None
        and line["value"] is not None
        and all(line.get(name) == value for name, value in wanted)
    ]
    return sorted(found)


def _curve(run: Run, quantity: Quantity, dimensions: dict[str, Any]) -> Curve:
    losses = dict(_steps(run, "loss", {}))
    return [
        (losses[step], value * quantity.scale)
        for step, value in _steps(run, quantity.metric, dimensions)
        if step in losses
    ]


def _at(curve: Curve, loss: float) -> float | None:
    """The value where the curve first comes down to `loss`; None where it starts below."""
    for (before, old), (after, new_) in pairwise(curve):
        if after <= loss <= before:
            part = 0.0 if before == after else (before - loss) / (before - after)
            return old + part * (new_ - old)
    return None


def _mean_curve(
    runs: Sequence[Run], quantity: Quantity, dimensions: dict[str, Any]
) -> list[tuple[float, float, None]]:
    """(mean loss, mean value, nothing) at each step that every seed was measured at."""
    found = []
    for run in runs:
        losses = dict(_steps(run, "loss", {}))
        values = _steps(run, quantity.metric, dimensions)
        found.append({step: (losses[step], value) for step, value in values if step in losses})
    shared = set.intersection(*map(set, found)) if found else set[int]()
    points = []
    for step in sorted(shared):
        loss, value = (
            sum(column) / len(found) for column in zip(*(one[step] for one in found), strict=True)
        )
        points.append((loss, value * quantity.scale, None))
    return points
