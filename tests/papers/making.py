"""Records for tests of claims, and verdicts on them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clearhead.papers.claims import CLAIMS
from clearhead.papers.contrasts import Judgement, Outcome, judge
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


def of_losses(losses: Mapping[str, Sequence[float]], label: str = "6 layers") -> Records:
    """Losses by arm and seed, and a milestone, which says something else."""
    one = {"metric": "loss", "length": 8}
    arms = {
        arm: [{**one, "value": [*values]}, {**one, "value": [9.0] * len(values), "step": 5}]
        for arm, values in losses.items()
    }
    return recorded(arms, label=label, train={"sequence_length": 8})


def outcomes(name: str, records: Records) -> list[Outcome]:
    """What records say on each comparison of a claim."""
    (claim,) = (one for one in CLAIMS if one.name == name)
    return [outcome for one in claim.contrasts for outcome in one.outcomes({"r": records})]


def verdict(one: Outcome, threshold: float = 0.05) -> Judgement:
    """The verdict of a record by itself."""
    return judge(one.contrast, None if one.missing else one.difference, threshold)
