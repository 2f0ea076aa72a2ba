"""docs/repair-evidence.md: the rows of its arms are those of the records."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/repair-evidence.md").read_text("utf-8")
SEEDS = ROOT / "results" / "retrofit-seeds.jsonl"
FILES = [path for path in ROOT.glob("results/retrofit*.jsonl") if path != SEEDS]
RUNS = [run for path in FILES for run in load(path).runs]
RUNS_OF_SEEDS = load(SEEDS).runs
SHORT = 16_384  # of which the seeds have a file of their own
PREDICTED = 8 * 511  # tokens of the windows
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


ARMS = {row["arm"] for head, rows in _tables(PAGE) if head == ["arm", "made by"] for row in rows}


def _rows(*start: str, text: str = PAGE) -> list[dict[str, str]]:
    """Rows of the tables whose header begins so."""
    return [row for head, rows in _tables(text) if (*head[:2],) == start for row in rows]


ROWS = _rows("arm", "tokens")
# (row, tokens, seeds) of the sections on several seeds.
OF_SEEDS = [
    (row, int(tokens.replace(",", "")), range(["Two", "Three"].index(number) + 2))
    for number, tokens, text in re.findall(
        r"^### (\w+) seeds, ([\d,]+) tokens\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL
    )
    for row in _rows("arm", "rate", text=text)
]


def _named(shown: str) -> tuple[str, float | None]:
    """The arm of "dense (3e-5)", and the rate, which tells its runs apart."""
    name, _, rate = shown.partition(" (")
    return name, float(rate.removesuffix(")")) if rate else None


def _run(shown: str, tokens: int) -> Run:
    """The run of an arm, of the first file that has it."""
    arm, rate = _named(shown)
    for run in RUNS:
        measured = run.measure("perplexity")
        predicted = measured and measured.details["predicted_tokens"]
        found = run.header["arm"], run.header["train"]["tokens"], predicted
        tuned = rate in (None, run.header["train"].get("learning_rate"))
        if found == (arm, tokens, PREDICTED) and tuned:
            return run
    raise AssertionError(f"no run of {shown} with {tokens} tokens")


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


def test_the_page_has_the_arms() -> None:
    assert len(ROWS) >= 22
    assert len(OF_SEEDS) >= 21
    assert len(_rows("arm", "rate")) == len(OF_SEEDS)
    shown = {_named(row["arm"])[0] for row in (*ROWS, *(row for row, _, _ in OF_SEEDS))}
    elsewhere = {"turned", "key-value", "searched turned learned"}  # in tables of their own
    assert shown | elsewhere == ARMS


def _runs(row: dict[str, str], tokens: int) -> list[Run]:
    """The runs of a row: of a long training those at its rate, from any file."""
    arm = _named(row["arm"])[0]
    if tokens == SHORT:
        return [run for run in RUNS_OF_SEEDS if run.header["arm"] == arm]
    asked = arm, tokens, float(row["rate"])
    return [
        run
        for run in RUNS
        if asked == (run.header["arm"], *map(run.header["train"].get, ("tokens", "learning_rate")))
    ]


@pytest.mark.parametrize(("row", "tokens", "seeds"), OF_SEEDS, ids=str)
def test_a_row_of_seeds_is_what_the_record_says(
    row: dict[str, str], tokens: int, seeds: range
) -> None:
    """Means ± standard deviations; few bits by what they add to each seed's own perplexity."""
    runs = _runs(row, tokens)
    assert sorted(run.header["seed"] for run in runs) == list(seeds)
    for column in list(row)[1:]:
        values = [_value(run, column) for run in runs]
        if column == "rate":
            assert {*values} == {float(row[column]) if row[column] else None}
            continue
        assert None not in values, column
        numbers = [value for value in values if value is not None]
        if column.startswith("`"):
            fulls = [run.value("perplexity") for run in runs]
            numbers = [100 * (n / f - 1) for n, f in zip(numbers, fulls, strict=True) if f]
        if column.startswith("first token the largest key"):
            numbers = [100 * n for n in numbers]
        mean, _, spread = row[column].replace(",", "").removesuffix(" %").partition(" ± ")
        digits = len(mean.partition(".")[2])
        said = [f"{one:.{digits}f}" for one in (fmean(numbers), stdev(numbers))]
        assert [mean.lstrip("+"), spread] == said, column


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row.values()))
def test_a_row_is_what_the_records_say(row: dict[str, str]) -> None:
    arm, tokens, *columns = row
    run = _run(row[arm], int(row[tokens].replace(",", "")))
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


def test_the_prefixes_are_those_of_the_searches() -> None:
    searches = json.loads((ROOT / "results" / "prefix-search.json").read_text("utf-8"))
    names = {
        "none": "",
        "a newline": "\n",
        '" a" and a comma': " a,",
        'a newline and " in"': "\n in",
        "the special token `im_start`": "<|im_start|>",
        "the special token `im_end`": "<|im_end|>",
    }
    rows = _rows("tokens before the text", "fails, books-train")
    assert len(rows) >= 15
    for row in rows:
        name, *shown = row.values()
        text = names.get(name, name.strip('"'))
        for value, search in zip(shown, searches, strict=True):
            fails = {one["text"]: one["fails"] for one in search["prefix"]["tried"]}
            assert value == str(fails.get(text, "")), name
    for search in searches:
        plain, *tried = search["prefix"]["tried"]
        assert plain["fails"] == plain["pieces"] == 64
        assert all(one["fails"] for one in tried if len(one["tokens"]) == 1)
        assert {"command", "commit"} <= search.keys()


def test_the_rows_of_64_windows_are_those_of_the_record() -> None:
    runs = {run.header["run"]: run for run in load(ROOT / "results" / "trained-64.jsonl").runs}
    rows = _rows("run", "arm")
    assert [row["run"].strip("`") for row in rows] == list(runs)
    for row, run in zip(rows, runs.values(), strict=True):
        full, coarse = run.value("perplexity"), run.value("perplexity", scheme="w8a8-coarse")
        assert full is not None
        assert coarse is not None
        assert row["full precision"] == f"{full:.2f}"
        assert row["`w8a8-coarse`"] == f"{coarse:.2f} ({100 * (coarse / full - 1):+.2f} %)"
