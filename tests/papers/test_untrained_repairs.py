"""docs/repair.md, models repaired without training: its numbers are those of the records."""

import re
from collections.abc import Iterator
from pathlib import Path

from clearhead.records.loading import load
from clearhead.records.runs import Run

ROOT = Path(__file__).parents[2]
EIGHT, SIXTY_FOUR = 8 * 511, 64 * 511  # predicted tokens of the windows
# The run of each row, in the order of the rows.
CHOICES = "SmolLM2-135M learned learned-down turned-learned searched-learned prefix key-value"
FILES = ("repair", "learned", "learned-64")
RUNS = [run for name in FILES for run in load(ROOT / f"results/{name}.jsonl").runs]


def _rows(heading: str) -> Iterator[dict[str, str]]:
    """The rows of the page's first table under such a header."""
    text = ROOT.joinpath("docs/repair.md").read_text("utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    ]
    yield from (dict(zip(head, row, strict=True)) for row in rows)


def _run(name: str, tokens: int, scheme: str) -> Run:
    for run in RUNS:
        measured = run.measure("perplexity", scheme=scheme)
        predicted = measured and measured.details["predicted_tokens"]
        if run.id == name and predicted == tokens:
            return run
    raise AssertionError(f"no run of {name} in {scheme} with {tokens} predicted tokens")


def _check(shown: str, name: str, scheme: str, tokens: int = EIGHT) -> None:
    """Compare the "+30.7 %" that few bits add with the record."""
    run = _run(name, tokens, scheme)
    value, full = run.value("perplexity", scheme=scheme), run.value("perplexity")
    (number,) = re.findall(r"\+([\d.]+) %", shown)
    assert number == f"{100 * (value / full - 1):.{len(number.partition('.')[2])}f}", (name, scheme)


def test_the_table_of_what_to_choose():
    rows = _rows("| you want | options of `convert` | 8 bits | 6 bits |")
    for row, name in zip(rows, CHOICES.split(), strict=True):
        eight, _, sixty_four = row["8 bits"].partition(" (")
        _check(eight, name, "w8a8-coarse")
        _check(row["6 bits"], name, "w8a6-token")
        if sixty_four:
            _check(sixty_four, name, "w8a8-coarse", SIXTY_FOUR)
