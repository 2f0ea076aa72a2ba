"""docs/repair-evidence.md: the rows of its arms are those of the records."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/repair-evidence.md").read_text("utf-8")
RUNS = [run for path in ROOT.glob("results/retrofit*.jsonl") for run in load(path).runs]
WINDOW = 511  # predictions
INSIDE: dict[str, dict[str, Any]] = {
    "largest hidden state": {"metric": "hidden_top_1"},
    "first token the largest key (chance 1.3 %)": {
        "metric": "first_token_argmax_share",
        "map": "softmax",
    },
    "kurtosis, first token": {"metric": "kurtosis", "tokens": "first"},
    "kurtosis, others": {"metric": "kurtosis", "tokens": "rest"},
}


def _tables(text: str) -> Iterator[tuple[list[str], list[dict[str, str]]]]:
    """The header of every table, and its rows."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        head, _, *rows = lines
        yield head, [dict(zip(head, row, strict=True)) for row in rows]


ARMS = {
    row["in the tables"]: row["arm in the records"].strip("`")
    for head, rows in _tables(PAGE)
    if head[0] == "in the tables"
    for row in rows
}


def _rows() -> Iterator[tuple[dict[str, str], int]]:
    """Rows of tables by arm and tokens, and the windows on which they were measured."""
    results, earlier = PAGE.split("### Earlier arms")
    for text, windows in ((results, 8), (earlier, 2)):
        for head, rows in _tables(text):
            if head[:2] == ["arm", "tokens"]:
                yield from ((row, windows) for row in rows)


def _named(shown: str) -> tuple[str, float | None]:
    """The arm of "dense continuation (3e-5)", and the rate, which tells its runs apart."""
    name, _, rate = shown.partition(" (")
    return ARMS[name], float(rate.removesuffix(")")) if rate else None


def _run(shown: str, tokens: int, windows: int) -> Run:
    """The run of an arm, of the first file that has it."""
    arm, rate = _named(shown)
    for run in RUNS:
        measured = run.measure("perplexity")
        predicted = measured and measured.details["predicted_tokens"]
        found = run.header["arm"], run.header["train"]["tokens"], predicted
        tuned = rate in (None, run.header["train"].get("learning_rate"))
        if found == (arm, tokens, windows * WINDOW) and tuned:
            return run
    raise AssertionError(f"no run of {shown} with {tokens} tokens and {windows} windows")


def _value(run: Run, column: str) -> float | None:
    if column == "rate":
        return run.header["train"].get("learning_rate")
    if column in INSIDE:
        asked = INSIDE[column]
        return run.value(**asked) or run.value(**asked | {"map": "difference"})
    if column == "code":
        (found,) = run.select("perplexity", task="perplexity")
        return found.value
    return run.value("perplexity", scheme=None if column == "books" else column.strip("`"))


ROWS = list(_rows())


def test_the_page_has_the_arms() -> None:
    assert len(ROWS) >= 65
    assert {_named(row["arm"])[0] for row, _ in ROWS} == set(ARMS.values())


@pytest.mark.parametrize(
    ("row", "windows"), ROWS, ids=[f"{windows} {' '.join(row.values())}" for row, windows in ROWS]
)
def test_a_row_is_what_the_records_say(row: dict[str, str], windows: int) -> None:
    arm, tokens, *columns = row
    run = _run(row[arm], int(row[tokens].replace(",", "")), windows)
    for column in columns:
        value = _value(run, column)
        if not row[column]:
            assert value is None, column
            continue
        assert value is not None, column
        shown, _, more = row[column].removesuffix(" %").partition(" (")
        if column.startswith("first token the largest key"):
            value *= 100
        rounded = f"{value:,.0e}" if "e-" in shown else f"{value:,.{len(shown.partition('.')[2])}f}"
        assert float(shown.replace(",", "")) == float(rounded.replace(",", "")), column
        if more:
            full = run.value("perplexity")
            assert full is not None
            assert more == f"{value / full - 1:+.1%}".replace("%", " %)"), column
