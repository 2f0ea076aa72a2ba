"""Costs of schemes: the perplexity that they add to full precision, and when that is noise."""

from collections.abc import Sequence
from typing import Any

from clearhead.records.cells import added
from clearhead.records.runs import Line, Measure, Records, Run
from clearhead.report import style


def add_costs(run: Run) -> None:
    """The perplexity that each scheme adds, where the records have only the perplexities."""
    full = run.measure("perplexity")
    for one in run.select("perplexity"):
        if full is None or one is full or run.measure("added_perplexity", **one.dimensions):
            continue
        if (cost := added(one, full)) is not None:
            run.measures[cost.key] = cost


def is_noise(cost: Measure) -> bool:
    """True of a cost that the text's own variation explains: few bits help by chance only."""
    interval = cost.details.get("interval")
    return cost.value is not None and (cost.value < 0 or (interval is not None and interval[0] < 0))


def all_noise(records: Records, arm: str, scheme: str) -> bool:
    """True if what the scheme adds is noise in every seed."""
    costs = [run.measure("added_perplexity", scheme=scheme) for run in records.of(arm)]
    return all(cost is None or is_noise(cost) for cost in costs)


class Outcomes:
    """A line for each scheme as it is done, with what it adds to full precision."""

    def __init__(self) -> None:
        self._full: dict[Any, Measure] = {}

    def __call__(self, lines: Sequence[Line]) -> str:
        first, place = lines[0], (lines[0]["run"], lines[0].get("draw"))
        details = {name: first.get(name) for name in ("items", "interval")}
        one = Measure(metric="perplexity", value=first["value"], details=details)
        name = f"{first['run']}: {first.get('scheme', 'full precision')}"
        if one.value is None:
            return f"{name}, none: {first.get('reason')}"
        said = f"{name}, perplexity {four_digits(one.value)}"
        if "scheme" not in first:
            self._full[place] = one
        cost = added(one, self._full[place])
        if "scheme" not in first or cost is None or cost.value is None:
            return said
        interval = cost.details.get("interval")
        error = "" if interval is None else f" {style.interval(*interval)}"
        return f"{said}, {signed(cost.value)}{error}{', noise' * is_noise(cost)}"


def four_digits(value: float) -> str:
    return style.number(value, 4)


def signed(delta: float) -> str:
    """A difference with its sign; below 100 to three places, so that a column compares."""
    size = f"{abs(delta):.3f}" if abs(delta) < 100 else style.number(abs(delta))
    return ("−" if delta < 0 else "+") + size
