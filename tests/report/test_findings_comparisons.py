"""docs/findings.md: its comparisons of arms, and how many survive, are those of the records."""

import re
from statistics import fmean, stdev
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.report import page_of
from clearhead.report.statistics import compare

from .findings import FIRST, LOSS, PAGE, REST, ROOT, by_seed, cells, near

# A table with a column an arm: its rows' records and numbers.
BACKCOPY: dict[str, tuple[str, dict[str, Any]]] = {
    "largest weight on the first token, chance 7.4 %": (
        "backcopy-diagnoses",
        {"metric": "first_token_argmax_share", "map": "softmax"},
    ),
    "the same in layer 1 of 2": (
        "backcopy-diagnoses",
        {"metric": "first_token_argmax_share", "map": "softmax", "layer": 1},
    ),
    "weight on the first token": (
        "backcopy-diagnoses",
        {"metric": "first_token_mass", "map": "softmax"},
    ),
    "weight on no key": ("backcopy-diagnoses", {"metric": "null_mass", "map": "softmax"}),
    "kurtosis of the hidden states, first token": (
        "backcopy-diagnoses",
        {"metric": "kurtosis", **FIRST},
    ),
    "the rest": ("backcopy-diagnoses", {"metric": "kurtosis", **REST}),
    "loss, nats": ("backcopy", LOSS),
}
NUMBER = r"[−+]?[\d.]*\d"


def test_the_sinks_table_and_its_differences_are_those_of_the_records() -> None:
    """Its rows are of two records; the differences are Welch's."""
    shown: dict[str, dict[str, str]] = {}
    for row, column, text in cells("| mean ± sd over seeds | `transformer` | `softmax1` |"):
        shown.setdefault(row, {})[column.strip("`")] = text
    faults = []
    for row, (name, asked) in BACKCOPY.items():
        records = load(ROOT / "results" / f"{name}.jsonl")
        scale = 100 if "%" in shown[row]["softmax1"] else 1
        arms = {
            arm: [scale * one for one in by_seed(records, arm, asked)]
            for arm in ("transformer", "softmax1")
        }
        expected = [
            (arm, one(values)) for arm, values in arms.items() if values for one in (fmean, stdev)
        ]
        found = compare(arms["softmax1"], arms["transformer"])
        if found is not None and found.interval is not None:
            expected += [("difference, 95 %", one) for one in (found.mean, *found.interval)]
        for column in shown[row]:
            numbers = re.findall(NUMBER, re.sub(r"95 %", "", shown[row][column]))
            values = [value for where, value in expected if where == column]
            all_near = (near(n, v) for n, v in zip(numbers, values, strict=True))
            if not all(all_near):
                faults.append(f"{row}, {column}: {numbers}, not {values}")
    assert not faults


SURVIVING = re.findall(r"\b(\d+)\s+of\s+(\d+)\s+in\s+`([\w-]+).jsonl`", PAGE)


@pytest.mark.parametrize("found", SURVIVING, ids=lambda found: found[2])
def test_so_many_comparisons_survive_as_the_page_says(found: tuple[str, str, str]) -> None:
    survive, made, name = found
    account = page_of(load(ROOT / "results" / f"{name}.jsonl")).account
    assert account.startswith(f"Comparisons on this page: {made}. ")
    assert account.endswith(f": {survive}.")
