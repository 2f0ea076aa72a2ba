"""docs/log.md: its numbers, which log.txt lists, are those of the committed records."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from clearhead.records.loading import load
from clearhead.records.runs import Records
from clearhead.report.statistics import compare

from ..papers.second_reader import agree

ROOT = Path(__file__).parents[2]
PAGE = " ".join(ROOT.joinpath("docs/log.md").read_text("utf-8").split())
SECTIONS = PAGE.split(" ### ")
TABLE = Path(__file__).with_name("log.txt").read_text("utf-8")


@cache
def read(name: str) -> Records:
    return load(ROOT / "results" / f"{name}.jsonl")


def table() -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """A record and label, the number asked (the page shows 100 times it under "%"), and what the
    page shows of arms: "mean ± deviation" over seeds, or of "arm − arm" Welch's "mean (low to
    high)"."""
    for block in re.split(r"\n(?!  )", TABLE.strip()):
        head, *lines = block.splitlines()
        name, label, asked = head.split(" | ")
        yield name, label, json.loads(asked), dict(line[2:].split(" | ") for line in lines)


def by_seed(records: Records, arm: str, asked: dict[str, Any]) -> Iterator[float]:
    """A number a seed: the final one, and its mean where it has several."""
    asked = dict(asked)
    scheme, scale = asked.pop("added", None), 100 if asked.pop("%", False) else 1
    for run in records.of(arm):
        if scheme:
            few, full = run.value("perplexity", scheme=scheme), run.value("perplexity")
            yield 100 * (few / full - 1)
            continue
        overall: dict[str, Any] = {"step": None, "layer": None, "head": None, **asked}
        values = [one.value for one in run.select(**overall) if one.value is not None]
        if values:
            yield scale * fmean(values)


@pytest.mark.parametrize(("name", "label", "asked", "arms"), [*table()])
def test_a_paragraph_has_the_numbers_of_its_record(name, label, asked, arms):
    records = read(name).labelled(label)
    sections = [text for text in SECTIONS if f"{name}.jsonl`" in text]
    for arm, shown in arms.items():
        assert any(shown in text for text in sections), shown
        values = [list(by_seed(records, one, asked)) for one in arm.split(" − ")]
        expected = [fmean(values[0]), stdev(values[0])]
        if len(values) == 2:
            difference = compare(values[0], values[1])
            expected = [difference.mean, *difference.interval]
        agree(shown, *expected)


def test_64_windows_are_those_of_the_record():
    runs = {run.header["run"]: run for run in read("trained-64").runs}
    names = ("trained-0", "trained-1", "trained-2", "trained-lower-0", "dense-0")
    added = []
    for run in map(runs.get, names):
        few, full = run.value("perplexity", scheme="w8a8-coarse"), run.value("perplexity")
        added.append(f"+{100 * (few / full - 1):.2f}")
    three = f"{added[0]}, {added[1]} and {added[2]} %, the model at the lower rate {added[3]} %"
    assert f"8 bits cost the three seeds {three}, dense continuation {added[4]} %" in PAGE


def test_the_prefixes_are_those_of_the_searches():
    searches = json.loads(ROOT.joinpath("results/prefix-search.json").read_text("utf-8"))
    train, validation = (
        {one["text"]: one["fails"] for one in search["prefix"]["tried"]} for search in searches
    )
    counts = f'a newline fails on {train[chr(10)]}, " the" on {train[" the"]}, "." on {train["."]},'
    assert f"on books-train {counts}" in PAGE
    assert (train[" a,"], validation["\n in"]) == (0, 0)
    for search in searches:
        plain, *tried = search["prefix"]["tried"]
        assert plain["fails"] == plain["pieces"] == 64
        assert all(one["fails"] for one in tried if len(one["tokens"]) == 1)
