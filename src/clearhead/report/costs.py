"""Costs of schemes: the perplexity that they add to full precision, and when that is noise."""

from dataclasses import replace

from clearhead.records.cells import added
from clearhead.records.runs import Measure, Records, Run


def add_costs(run: Run) -> None:
    """The perplexity that each scheme adds, as `added_perplexity`, and as `cost` in shares of that
    in full precision."""
    full = run.measure("perplexity")
    for one in run.select("perplexity"):
        if full is None or one is full:
            continue
        cost = run.measure("added_perplexity", **one.dimensions) or added(one, full)
        if cost is None:
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


def all_noise(records: Records, arm: str, scheme: str) -> bool:
    """True if the text's own variation explains what a scheme adds in every seed: few bits help by
    chance only."""
    costs = [run.measure("added_perplexity", scheme=scheme) for run in records.of(arm)]
    known = [one for one in costs if one is not None]
    lowest = [(one.details.get("interval") or (one.value,))[0] for one in known]
    return all(low is not None and low < 0 for low in lowest)
