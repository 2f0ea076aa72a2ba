"""The numbers of one cell of a sweep as lines of records, each with its error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.errors import NOT_FINITE
from clearhead.records import intervals
from clearhead.records.runs import Line

_PARTS = ("low", "high", "documents", "reason")


def lines_of(headlines: Sequence[str], /, **result: Any) -> list[Line]:
    """The numbers of one cell as payloads: the `headlines`, which tables show, then others, marked
    "aside", and perplexities of `documents`. What is no number becomes a detail of the first. `low`
    and `high` are accuracy's "interval", NAME_stderr is a "stderr", NAME_by_item its "items"."""
    numbers: Line = {name: result[name] for name in headlines if name in result}
    rest: Line = {}
    for name, value in result.items():
        if name not in _PARTS and not name.endswith(("_by_item", "_stderr")):
            is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
            (numbers if is_number else rest)[name] = value
    lines = []
    for name in numbers:
        aside = {} if name in headlines else {"aside": True}
        lines.append({"metric": name, **_number(name, result), **aside, **rest})
        rest = {}
    for one in result.get("documents", ()):
        details = {key: value for key, value in one.items() if key != "perplexity"}
        lines.append({"metric": "document_perplexity", **details, **_number("perplexity", one)})
    return lines


def unmeasured(metrics: Sequence[str], error: Exception) -> list[Line]:
    """The lines of a cell whose model gives no finite logits."""
    reason = f"{NOT_FINITE}: {error}"
    return [{"metric": name, "value": None, "reason": reason} for name in metrics]


def on_perplexity(perplexity: float, loss: float, losses: Sequence[float]) -> list[float]:
    """Losses of parts of a text on the scale of the whole's perplexity, to first order."""
    return [perplexity * (1 + one - loss) for one in losses]


def errors(metric: str, value: float, items: Sequence[float]) -> Line:
    """The "items" of a number, one for each text or question, and its "interval"."""
    interval = intervals.of_metric(metric, items, value)
    lines = {"items": list(items)} if items else {}
    return lines | ({} if interval is None else {"interval": interval})


def _number(name: str, result: Mapping[str, Any]) -> Line:
    """A number with its interval, standard error and items, or the reason why there is none."""
    value = result.get(name)
    if value is None:
        return {"value": None, **({"reason": result["reason"]} if result.get("reason") else {})}
    if not math.isfinite(value):
        return {"value": None, "reason": NOT_FINITE}
    items = [float(one) for one in result.get(f"{name}_by_item") or ()]
    losses = [one["loss"] for one in result.get("documents", ()) if "loss" in one]
    if name == "perplexity" and losses and None not in losses:
        items = on_perplexity(value, result["loss"], losses)
    line = {"value": value, **errors(name, value, items)}
    if name == "accuracy" and result.get("low") is not None:
        line["interval"] = result["low"], result["high"]
    if (error := result.get(f"{name}_stderr")) is not None:
        line["stderr"] = error
    return line
