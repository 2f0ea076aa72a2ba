"""docs/repair.md, models repaired without training: its numbers are those of the records."""

import re
from pathlib import Path

from clearhead.records.loading import load

from .second_reader import agree

ROOT = Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/repair.md").read_text("utf-8")
RUNS = {
    (file, run.id): run
    for file in ("repair", "learned", "learned-64")
    for run in load(ROOT / f"results/{file}.jsonl").runs
}
# The run of each row, in the order of the rows, and its record of 8 windows.
CHOICES = {
    "SmolLM2-135M": "repair",
    "learned": "learned",
    "learned-down": "learned",
    "turned-learned": "learned",
    "searched-learned": "learned",
    "prefix": "repair",
    "key-value": "repair",
}


def _check(shown: str, file: str, name: str, scheme: str) -> None:
    """Compare the "+30.7 %" that few bits add with the record."""
    run = RUNS[file, name]
    share = run.value("perplexity", scheme=scheme) / run.value("perplexity")
    agree(*re.findall(r"\+([\d.]+) %", shown), 100 * (share - 1))


def test_the_table_of_what_to_choose():
    head, _, *rows = PAGE[PAGE.index("| you want |") :].partition("\n\n")[0].split("\n")
    assert "| options of `convert` | 8 bits | 6 bits |" in head
    for row, (name, file) in zip(rows, CHOICES.items(), strict=True):
        eight, _, sixty_four = row.split("|")[3].partition(" (")  # of 64 windows
        _check(eight, file, name, "w8a8-coarse")
        _check(row.split("|")[4], file, name, "w8a6-token")
        if sixty_four:
            _check(sixty_four, "learned-64", name, "w8a8-coarse")
