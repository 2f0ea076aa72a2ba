"""Every row and verdict of the committed book as numbers, frozen in net.json."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.reproduce.claims import judged, threshold_over
from clearhead.reproduce.contrasts import Judgement, Outcome

from .test_committed_book import RECORDS

NET = Path(__file__).with_name("net.json")


def rows_of(outcomes: list[Outcome], threshold: float) -> list[dict[str, Any]]:
    """The numbers of a claim's rows, in the order of the book."""
    return [
        {
            "row": one.contrast.words,
            "source": one.source,
            "arm": [one.arm.mean, one.arm.n],
            "than": [one.than.mean, one.than.n],
            "difference": one.difference.mean,
            "interval": one.difference.interval,
            "p": one.difference.p,
            "against": one.difference.against,
            "applies": one.applies,
            "at_edge": one.at_edge,
            "verdict": one.judgement(threshold),
        }
        for one in outcomes
    ]


def book() -> dict[str, Any]:
    """The book of the committed records."""
    found = judged({path.name: load([path]) for path in RECORDS})
    threshold = threshold_over(rows for _, rows, _ in found)
    claims = {
        claim.name: {
            "verdict": verdict,
            "pooled": [
                [one.difference and [one.difference.mean, one.difference.interval], one.agreement]
                for one in rows
            ],
            "rows": rows_of([outcome for one in rows for outcome in one.outcomes], threshold),
        }
        for claim, rows, verdict in found
    }
    return {"threshold": threshold, "claims": claims}


def _numbers(one: Any, place: str = "") -> dict[str, Any]:
    """Leaves by their place."""
    if isinstance(one, dict):
        parts = one.items()
    elif isinstance(one, list | tuple):
        parts = enumerate(one)
    else:
        return {place: one}
    return {k: v for name, part in parts for k, v in _numbers(part, f"{place}/{name}").items()}


def test_every_number_and_verdict_of_the_committed_book_is_frozen() -> None:
    frozen, now = _numbers(json.loads(NET.read_text())), _numbers(book())
    assert now.keys() == frozen.keys()
    for place, expected in frozen.items():
        found = now[place]
        if isinstance(expected, float) and math.isfinite(expected):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), place
        else:
            assert found == expected, place
    assert sum(isinstance(one, float) for one in frozen.values()) > 1_000
    assert {*Judgement} >= {found for place, found in now.items() if place.endswith("/verdict")}
