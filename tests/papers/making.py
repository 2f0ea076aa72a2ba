"""Records for tests of claims."""

from collections.abc import Iterable, Mapping
from typing import Any

from clearhead.papers.claims import CLAIMS
from clearhead.papers.contrasts import Outcome
from clearhead.records.loading import parse
from clearhead.records.runs import Records


def near(value: float, by: float = 0.001, n: int = 3) -> list[float]:
    """A number of n seeds, each `by` above the one before."""
    return [value + by * seed for seed in range(n)]


def recorded(
    arms: Mapping[str, Iterable[Mapping[str, Any]]], *, label: str = "", **header: Any
) -> Records:
    """Records of {arm: measures}, the "value" of each a list by seed.

    Args:
        header: of every run.
    """
    lines: list[dict[str, Any]] = []
    for arm, given in arms.items():
        measures = [*given]
        for seed in range(max(len(one["value"]) for one in measures)):
            run = {"run": f"{label}/{arm}/seed{seed}"}
            named = {"arm": arm, "preset": arm, "seed": seed, "label": label}
            lines.append({"kind": "run", **run, **named, **header})
            lines += [
                {"kind": "measure", **run, **one, "value": one["value"][seed]} for one in measures
            ]
    return parse(lines)


def outcomes(name: str, records: Records) -> list[Outcome]:
    """What records say on each comparison of a claim."""
    (claim,) = (one for one in CLAIMS if one.name == name)
    return [outcome for one in claim.contrasts for outcome in one.outcomes({"r": records})]
