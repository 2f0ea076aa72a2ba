"""The page of the book: short enough to read, and true of each record that it joins."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clearhead.records.loading import load
from clearhead.report.page import Tag, render
from clearhead.reproduce import book
from clearhead.reproduce.claims import claims, evidence
from clearhead.reproduce.contrasts import Contrast
from clearhead.reproduce.cost import Cost

from ..report.conftest import own
from .test_claims import _records
from .test_committed_book import RECORDS


def test_of_each_file_the_page_says_how_it_was_made(tmp_path):
    """Files may have one label, such as none: their seeds are not joined."""
    sources = {}
    for name, seeds in (("a.jsonl", 3), ("b.jsonl", 2)):
        folder: Path = tmp_path / name
        folder.mkdir()
        sources[name] = _records(folder, {"transformer": [2.5] * seeds}, label="6 layers")
    made = book.page(sources).sections[-1]
    tags = [(one.name, one.facts) for one in made.blocks if isinstance(one, Tag)]
    assert tags == [
        ("Record a.jsonl, 6 layers", "3 seeds"),
        ("Record b.jsonl, 6 layers", "2 seeds"),
    ]


class _Unfolded(HTMLParser):
    """The words that are seen before anything is opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.folds, self.words = 0, list[str]()
        self.feed(re.sub(r"<style.*?</style>", "", own(page), flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.folds += tag == "details"

    def handle_endtag(self, tag: str) -> None:
        self.folds -= tag == "details"

    def handle_data(self, data: str) -> None:
        if not self.folds:
            self.words += data.split()


def test_the_page_is_read_in_ten_minutes():
    """At 250 words a minute; without figures no library is sent."""
    page = render(book.page({path.name: load([path]) for path in RECORDS}))
    assert len(page) < 1_500_000
    assert 1_000 < len(_Unfolded(page).words) < 2_500


def test_what_is_undecided_has_the_command_for_small_and_its_cost(tmp_path):
    """The cost is that of --list; what is decided, and what is counted, has none."""
    losses = {"transformer": [2.5, 2.6, 2.4], "sas": [2.4, 2.62, 2.5]}
    lines = [*book.markdown({"r": _records(tmp_path, losses)})]
    (line,) = (line for line in lines if "--scale small" in line)
    assert "### sas/figure5: undecided" in line
    asked = "At `small`: `clearhead reproduce sas/figure5 --scale small`, 36 runs, 173 M tokens, "
    assert asked in line
    assert "of training on one GPU" in line


def test_the_tokens_of_a_long_experiment_are_written_out():
    said = Cost(runs=6, tokens=3_000_000_000, flops=1e18, beyond=0).in_words("small")
    assert said.startswith("6 runs, 3,000 M tokens, ")


@pytest.mark.parametrize("name", ["softmax1/kurtosis", "softmax1/table3", "softmax1/move"])
def test_a_comparison_says_which_rotation_its_records_have(name):
    (claim,) = (one for one in claims() if one.name == name)
    for contrast in claim.contrasts:
        assert _forms(contrast) <= {"for all axes of a size" in contrast.words}


def _forms(contrast: Contrast) -> set[bool]:
    """Whether OrthoAdam's rotations are shared by size in the records that decide a contrast.

    Those that lack the setting were made before it, when all were shared.
    """
    return {
        (run.header.get("train") or {}).get("rotation_share", "size") == "size"
        for records in map(load, zip(RECORDS))
        if any(contrast.outcomes(evidence({"": records})))
        for run in records.runs
        if run.arm in contrast.ours.arm
    }
