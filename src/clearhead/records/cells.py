"""Cells of a sweep as lines of records, draws of one cell pooled, and costs of schemes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from clearhead.errors import NOT_FINITE
from clearhead.records import intervals
from clearhead.records.runs import Line, Measure, Run

_PARTS = ("low", "high", "documents", "reason")
_ERRORS = ("interval", "stderr", "items")
OfItems = Callable[[Sequence[float], float | None], intervals.Interval | None]
FEWEST = 5  # texts whose losses tell the spread of a perplexity
_BY_ITEM, _STDERR = "_by_item", "_stderr"


def lines_of(headlines: Sequence[str], /, **result: Any) -> list[Line]:
    """The numbers of one cell as payloads of records.

    - A measure for each number: first the `headlines`, which tables show; then all others, marked
      as "aside". Values that are not numbers become details of the first.
    - `low` and `high` are accuracy's "interval", NAME_stderr the "stderr" of NAME and NAME_by_item
      its "items", from which an interval is made where none is given.
    - `documents` are measures of their perplexities.
    """
    numbers = {name: result[name] for name in headlines if name in result}
    rest: Line = {}
    for name, value in result.items():
        if name not in _PARTS and not name.endswith((_BY_ITEM, _STDERR)):
            is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
            (numbers if is_number else rest)[name] = value
    lines = []
    for name, value in numbers.items():
        aside = {} if name in headlines else {"aside": True}
        lines.append({"metric": name, **_value(value), **aside, **rest, **_errors(name, result)})
        rest = {}
    for one in result.get("documents", ()):
        details = {key: value for key, value in one.items() if key != "perplexity"}
        value = _value(one.get("perplexity"))
        lines.append({"metric": "document_perplexity", **details, **value})
    return lines


def unmeasured(metrics: Sequence[str], error: Exception) -> list[Line]:
    """The lines of a cell whose model gives no finite logits."""
    reason = f"{NOT_FINITE}: {error}"
    return [{"metric": name, "value": None, "reason": reason} for name in metrics]


def of_items(metric: str, value: float, items: Sequence[float], **details: Any) -> Line:
    """A measure whose error is that of drawing these items, which are not trials."""
    interval = _interval(metric, items, value, intervals.of_numbers)
    error = {} if interval is None else {"interval": interval}
    return {"metric": metric, "value": value, **error, "items": list(items), **details}


def pooled(
    new: Measure, draw: int, before: Measure | None, of_items: OfItems = intervals.of_items
) -> Measure:
    """One measure of several draws of the same cell: their mean, and its interval.

    The interval is over all items where every draw has its own, else over the draws.

    Args:
        before: the measure of earlier draws.
        of_items: the interval of items and their mean.
    """
    draws = {} if before is None else dict(before.draws)
    draws = dict(sorted({**draws, draw: new}.items()))
    measures = [one for one in draws.values() if one.value is not None]
    if lost := next((one for one in draws.values() if one.not_finite), None):
        return replace(lost, draws=draws)
    if len(measures) < 2:
        return replace(measures[0] if measures else new, draws=draws)
    values = [one.value for one in measures if one.value is not None]
    items = [one.details.get("items", ()) for one in measures]
    details = {name: value for name, value in new.details.items() if name not in _ERRORS}
    mean = fmean(values)
    interval = intervals.of_numbers(values)  # each of many items, not a trial
    if all(items):
        mean = fmean(values, list(map(len, items)))
        details["items"] = [one for some in items for one in some]
        interval = _interval(new.metric, details["items"], mean, of_items)
    details["interval"] = interval
    return replace(new, value=mean, details=details, draws=draws)


def added(one: Measure, full: Measure) -> Measure | None:
    """The difference of `one` to `full`, draw by draw, with the paired interval of their items.

    None where either has no value.
    """
    pairs = {0: (one, full)}
    if one.draws and full.draws:
        pairs = {n: (one.draws[n], full.draws[n]) for n in one.draws if n in full.draws}
    found: Measure | None = None
    for draw, (mine, whole) in pairs.items():
        if mine.value is None or whole.value is None:
            continue
        parts = [side.details.get("items") or () for side in (mine, whole)]
        alike = len(parts[0]) == len(parts[1])
        differences = [a - b for a, b in zip(*parts, strict=True)] if alike else []
        line = of_items(f"added_{one.metric}", mine.value - whole.value, differences)
        details = {name: line[name] for name in _ERRORS if line.get(name)}
        new = replace(one, metric=line["metric"], value=line["value"], details=details, draws={})
        found = pooled(new, draw, found, intervals.of_numbers)  # 0 is no miss
    return found


def add_costs(run: Run) -> None:
    """The perplexity that each scheme adds, as `added_perplexity`, and as `cost` in shares of that
    in full precision."""
    full = run.measure("perplexity")
    if full is None:
        return
    for one in run.select("perplexity"):
        cost = run.measure("added_perplexity", **one.dimensions) or added(one, full)
        if one is full or cost is None:
            continue
        run.measures.setdefault(cost.key, cost)
        if "scheme" in one.dimensions:
            share = _share(cost, full.value)
            run.measures[share.key] = share


def _share(cost: Measure, full: float | None) -> Measure:
    """An added perplexity as a share of the perplexity in full precision."""
    if cost.value is None or not full:
        return replace(cost, metric="cost", value=None)
    details = dict(cost.details)
    for name in ("interval", "items"):
        if details.get(name):
            details[name] = tuple(one / full for one in details[name])
    if details.get("stderr"):
        details["stderr"] /= full
    return replace(cost, metric="cost", value=cost.value / full, details=details, draws={})


def _interval(
    metric: str, items: Sequence[float], centre: float, of_items: OfItems
) -> intervals.Interval | None:
    """The interval of items; a perplexity's is made on the scale of the loss, of `FEWEST` items,
    and that of a share ends at 0 and 1."""
    interval = of_items(items, centre)
    if interval is None:
        return None
    if metric == "perplexity":
        return intervals.on_log_scale(interval, centre) if len(items) >= FEWEST else None
    shares = all(0 <= one <= 1 for one in items)
    if of_items is intervals.of_items and "loss" not in metric and shares:
        return max(0.0, interval[0]), min(1.0, interval[1])
    return interval


def _value(value: Any) -> Line:
    """A number that is finite, or the reason why there is none."""
    if value is None or math.isfinite(value):
        return {"value": value}
    return {"value": None, "reason": NOT_FINITE}


def _errors(name: str, result: Line) -> Line:
    """The interval, standard error, items and reason of a number, where they are known."""
    value = result.get(name)
    errors: Line = {}
    if value is None:
        return {"reason": result["reason"]} if result.get("reason") else {}
    if not math.isfinite(value):
        return {}
    if items := _items(name, result):
        errors["items"] = items
        if (interval := _interval(name, items, value, intervals.of_items)) is not None:
            errors["interval"] = interval
    if name == "accuracy" and result.get("low") is not None:
        errors["interval"] = (result["low"], result["high"])
    if (error := result.get(f"{name}{_STDERR}")) is not None:
        errors["stderr"] = error
    return errors


def _items(name: str, result: Line) -> list[float]:
    """A number for each key or document, their mean near the whole's; none if unknown.

    A document's perplexity is set beside the whole's on the scale of the loss.
    """
    if name != "perplexity":
        return [float(one) for one in result.get(f"{name}{_BY_ITEM}") or ()]
    losses = [one["loss"] for one in result.get("documents", ()) if "loss" in one]
    if not losses or None in losses:
        return []
    return on_perplexity(float(result[name]), float(result["loss"]), losses)


def on_perplexity(perplexity: float, loss: float, losses: Sequence[float]) -> list[float]:
    """Losses of parts of a text on the scale of the whole's perplexity, to first order."""
    return [perplexity * (1 + one - loss) for one in losses]
