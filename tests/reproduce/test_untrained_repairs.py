"""Tables of models repaired without training: their numbers are those of the records."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Run

ROOT = Path(__file__).parents[2]
EIGHT, SIXTY_FOUR = 8 * 511, 64 * 511  # predicted tokens of the windows
# The run of each row, in the order of the rows.
REPAIR = "SmolLM2-135M prefix rotated prefix-rotated key-value prefix-searched searched-rotated"
TURNED = "SmolLM2-135M turned turned-down turned-prefix"
LEARNED = "learned learned-down turned-prefix turned-equal turned-learned searched-learned"
CHOICES = "SmolLM2-135M learned learned-down turned-learned searched-learned prefix key-value"
FILES = ("repair", "turned", "learned", "learned-64")
RUNS = [run for name in FILES for run in load(ROOT / f"results/{name}.jsonl").runs]


def _rows(page: str, heading: str) -> Iterator[dict[str, str]]:
    """The rows of the page's first table under such a header."""
    text = ROOT.joinpath("docs", page).read_text("utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    ]
    yield from (dict(zip(head, row, strict=True)) for row in rows)


def _run(name: str, tokens: int, scheme: str) -> Run:
    aliases = {"turned-prefix": "turned"} if tokens == SIXTY_FOUR else {}
    for run in RUNS:
        measured = run.measure("perplexity", scheme=scheme)
        predicted = measured and measured.details["predicted_tokens"]
        if run.id == aliases.get(name, name) and predicted == tokens:
            return run
    raise AssertionError(f"no run of {name} in {scheme} with {tokens} predicted tokens")


def _check(shown: str, name: str, scheme: str, tokens: int = EIGHT) -> None:
    """Compare "30.05 → 39.26 (+30.7 %)", or a part of it, with the record."""
    run = _run(name, tokens, scheme)
    value, full = run.value("perplexity", scheme=scheme), run.value("perplexity")
    assert value is not None
    assert full is not None
    before, _, after = shown.rpartition(" → ")
    assert re.search(r"\d", after)
    if before:
        assert before == f"{full:.2f}", name
    for number in re.findall(r"^[\d,.]+", after):
        assert number == f"{value:,.{len(number.partition('.')[2])}f}", (name, scheme)
    for number in re.findall(r"\+([\d.]+) %", after):
        added = 100 * (value / full - 1)
        assert number == f"{added:.{len(number.partition('.')[2])}f}", (name, scheme)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("| model | full precision | `w8a8-coarse` | `w8a6-token` |\n", REPAIR),
        (
            "| model | full precision | `w8a8-coarse` | `w8a8-moderate` | `w8a6-token` | "
            "`w8a4-token` |\n",
            TURNED,
        ),
        (
            "| model | full precision | `w8a8-coarse` | `w8a8-moderate` | `w8a6-token` | "
            "`w8a4-token` | `w8a8-coarse`, 64 windows |\n",
            LEARNED,
        ),
    ],
)
def test_the_tables_of_the_evidence(heading: str, names: str) -> None:
    for row, name in zip(_rows("repair-evidence.md", heading), names.split(), strict=True):
        _, full, *few = row
        value = _run(name, EIGHT, "w8a8-coarse").value("perplexity")
        assert row[full] == f"{value:.2f}", name
        for column in few:
            scheme, _, windows = column.partition(", ")
            if windows and row[column]:
                _check(row[column], name, scheme.strip("`"), SIXTY_FOUR)
            elif not windows:
                _check(row[column], name, scheme.strip("`"))


def test_the_table_of_what_to_choose() -> None:
    rows = _rows("repair.md", "| you want | options of `convert` | 8 bits | 6 bits |")
    for row, name in zip(rows, CHOICES.split(), strict=True):
        eight, _, sixty_four = row["8 bits"].partition(" (")
        _check(eight, name, "w8a8-coarse")
        _check(row["6 bits"], name, "w8a6-token")
        if sixty_four:
            _check(sixty_four, name, "w8a8-coarse", SIXTY_FOUR)
