"""results/comparisons.md: the book of the committed records."""

from pathlib import Path

from clearhead.records.loading import load
from clearhead.report.page import Fold, Statement
from clearhead.reproduce import book
from clearhead.reproduce.claims import judged
from clearhead.reproduce.contrasts import Judgement

from ..cli.conftest import call

ROOT = Path(__file__).parents[2]
# The records that hold runs; sweeps of rates decide nothing.
RECORDS = tuple(
    path
    for path in sorted((ROOT / "results").glob("*.jsonl"))
    if not any(word in path.stem for word in ("bench", "gpu", "rates", "sweeps"))
)


def test_the_committed_book_is_that_of_the_committed_records(tmp_path):
    made = tmp_path / "comparisons.md"
    assert call("reproduce", "--judge", *RECORDS, "--output", made) == 0
    assert made.read_text() == (ROOT / "results/comparisons.md").read_text(), "make book"


def test_the_page_shows_every_claim_with_its_verdict_and_opens_with_a_line_of_each():
    sources = {path.name: load([path]) for path in RECORDS}
    summary, *families = book.page(sources).sections
    marks = {
        one.name: one.mark
        for section in families
        for one in section.blocks
        if isinstance(one, Statement)
    }
    verdicts = {claim.name: verdict for claim, _, verdict in judged(sources)}
    assert marks == verdicts
    first = {one.name: one.mark for one in summary.blocks if isinstance(one, Statement)}
    assert first == verdicts
    assert [*first.values()] == sorted(first.values(), key=[*Judgement].index)
    (names,) = (one for one in summary.blocks if isinstance(one, Fold))
    assert any(line.startswith("kurtosis: ") for line in names.lines)
