"""results/comparisons.md: the book of the committed records."""

from pathlib import Path

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
