"""results/comparisons.md, the book of the committed records: its text, its numbers and verdicts
frozen in net.json, and what it says of its records. The book is judged once."""

import json
import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clearhead.papers import book
from clearhead.papers.claims import Judged, judged, threshold_over
from clearhead.papers.contrasts import Judgement, Outcome
from clearhead.records.runs import Records

from ..cli.conftest import call
from .making import verdict

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "tools/front_page.py"))
NET = Path(__file__).with_name("net.json")
# The records that hold runs; sweeps of rates decide nothing.
RECORDS = tuple(
    path
    for path in sorted((ROOT / "results").glob("*.jsonl"))
    if not any(word in path.stem for word in ("bench", "gpu", "rates", "sweeps"))
)


@dataclass
class Book:
    """The page that the command writes, the records it read and the claims as it judged them."""

    page: str
    sources: Mapping[str, Records]
    claims: Sequence[Judged]


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Book:
    """The book of the committed records."""
    calls: list[tuple[Mapping[str, Records], list[Judged]]] = []

    def noted(sources: Mapping[str, Records]) -> list[Judged]:
        calls.append((sources, judged(sources)))
        return calls[-1][1]

    page = tmp_path_factory.mktemp("book") / "comparisons.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book, "judged", noted)
        assert call("reproduce", "--judge", *RECORDS, "--output", page) == 0
    ((sources, claims),) = calls
    return Book(page.read_text("utf-8"), sources, claims)


def test_the_committed_book_is_that_of_the_committed_records(committed):
    assert committed.page == (ROOT / "results/comparisons.md").read_text(), "make book"


@pytest.mark.parametrize("name", ["softmax1/kurtosis", "softmax1/table3", "softmax1/move"])
def test_a_comparison_says_which_rotation_its_records_have(name, committed):
    """Whether OrthoAdam's rotations are shared by size in the records that decide a contrast; those
    that lack the setting were made before it, when all were shared."""
    (comparisons,) = (ones for claim, ones, _ in committed.claims if claim.name == name)
    for one in comparisons:
        shared = {
            (run.header.get("train") or {}).get("rotation_share", "size") == "size"
            for outcome in one.outcomes
            for run in committed.sources[outcome.source.partition(", ")[0]].runs
            if run.arm in one.contrast.ours.arm
        }
        assert shared <= {"for all axes of a size" in one.contrast.words}


def rows_of(outcomes: list[Outcome], threshold: float) -> list[dict[str, Any]]:
    """The numbers of a claim's rows, in the order of the book."""
    return [
        {
            "row": one.contrast.words,
            "source": one.source,
            "arm": [one.ours.mean, one.ours.n],
            "than": [one.theirs.mean, one.theirs.n],
            "difference": one.difference.mean,
            "interval": one.difference.interval,
            "p": one.difference.p,
            "against": one.difference.against,
            "applies": not one.missing,
            "at_edge": one.at_edge,
            "verdict": verdict(one, threshold),
        }
        for one in outcomes
    ]


def frozen_form(found: Sequence[Judged]) -> dict[str, Any]:
    """The numbers of judged claims, as net.json has them."""
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


def test_every_number_and_verdict_of_the_committed_book_is_frozen(committed):
    frozen, now = _numbers(json.loads(NET.read_text())), _numbers(frozen_form(committed.claims))
    assert now.keys() == frozen.keys()
    for place, expected in frozen.items():
        found = now[place]
        if isinstance(expected, float) and math.isfinite(expected):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), place
        else:
            assert found == expected, place
    assert sum(isinstance(one, float) for one in frozen.values()) > 1_000
    assert {*Judgement} >= {found for place, found in now.items() if place.endswith("/verdict")}


@pytest.mark.parametrize(("page", "part"), [("README.md", "table"), ("docs/claims.md", "summary")])
def test_a_page_has_what_the_book_says(page, part):
    (block,) = MADE["BLOCK"].findall(ROOT.joinpath(page).read_text("utf-8"))
    assert block == MADE[part]()
    assert block in ROOT.joinpath("results/comparisons.md").read_text("utf-8")


def test_the_figure_of_the_front_page_is_that_of_the_records():
    assert MADE["FIGURE"].read_text("utf-8") == MADE["drawing"]()
