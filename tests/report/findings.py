"""Cells of the tables of docs/findings.md, and the numbers of records to compare them with."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from clearhead.records.runs import Records
from clearhead.report.costs import add_costs

ROOT = Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/findings.md").read_text("utf-8")
FIRST, REST = {"tokens": "first"}, {"tokens": "rest"}
LOSS = {"metric": "loss", "length": 128, "task": None}


def cells(start: str) -> Iterator[tuple[str, str, str]]:
    """Row, column and text of every cell of the table that begins so."""
    found = re.findall(rf"^{re.escape(start)}.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    assert len(found) == 1, start
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in found[0].splitlines()
    )
    for row in rows:
        yield from ((row[0], name, text) for name, text in zip(head[1:], row[1:], strict=True))


def by_seed(records: Records, arm: str, asked: dict[str, Any]) -> list[float]:
    """A number a seed: the final one, and its mean where it has several."""
    numbers = []
    for run in records.of(arm):
        add_costs(run)
        values = [
            one.value
            for one in run.select(**{"step": None, "layer": None, "head": None, **asked})
            if one.value is not None
        ]
        if values:
            numbers.append(fmean(values))
    return numbers


def near(shown: str, value: float) -> bool:
    """Rounded to the digits shown, either way at a half."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "").replace("−", "-")) - value) <= 0.5 * 10**-digits + 1e-9
