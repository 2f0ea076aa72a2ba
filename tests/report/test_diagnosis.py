"""Records, table and page of a diagnosis, from records made by hand."""

import json
import math
from typing import Any

import pytest

from clearhead.models.families import FAMILIES
from clearhead.records import jsonl
from clearhead.records.loading import parse
from clearhead.report import Page, load, page_of, render
from clearhead.report.diagnosis import MASSIVE, REPAIRED, SINK, numbers
from clearhead.report.pivots import Quantity, models, pivot

from .conftest import printed, shown


def records_of(name: str, *, maps: tuple[str, ...] = ("softmax",), layers: int = 4) -> list[Any]:
    """Everything that a diagnosis can hold, from arithmetic."""
    share = "first_token_argmax_share"
    places: list[dict[str, Any]] = [{}, *({"layer": n} for n in range(layers))]
    lines: list[dict[str, Any]] = []

    def add(metrics: str, value: float, **at: Any) -> None:
        lines.extend({"metric": one, **at, "value": value} for one in metrics.split())

    for number, place in enumerate(places):
        for map in maps:
            shares = f"{share} first_token_mass sink_rate_0.3"
            add(shares, 0.1 + number / 20, map=map, **place)
            add("entropy", 2.0, map=map, **place)
        order = "anomalous_before order_broken_content"
        add(f"kurtosis_excess {order} logit_top_1", 0.5 + number, **place)
        for tokens in ("first", "rest"):
            add("kurtosis largest_activation", 30.0, tokens=tokens, **place)
    for layer in range(-1, layers):
        add("similarity effective_rank norm_first norm_rest", 2.0 + layer, layer=layer)
        for map, head in ((map, head) for map in maps for head in range(4) if layer >= 0):
            add(share, head / 4, map=map, layer=layer, head=head)
    for kind in ("hidden", "logit"):
        for rank in (1, 2, 3, 10, 100):
            add(f"{kind}_top_{rank}", 900 / rank)
        add(f"{kind}_median", 0.7)
    add("chance_floor", 0.02)
    add("null_mass", math.nan, map=maps[0])
    for low in (0, 1, 2, 4):
        add("null_mass", 1 / (low + 2), map=maps[0], position=low)
        add("gate_closed", 1 / (low + 2), map="gate", position=low)
    channel = {"channel": 7, "first_layer": -1, "layer": 2, "largest": 88.0, "medians": 120.0}
    advice = {"finding": "a sink", "advice": "do this", "metric": MASSIVE, "value": 0.5}
    header = {"windows": 8, "length": 128, "command": "clearhead diagnose", "parameters": 10_000}
    return [
        {"kind": "run", "study": "diagnosis", "run": name, **header, "data": {"a": 1}},
        *({"kind": "measure", "run": name, **line} for line in lines),
        {"kind": "channel", "run": name, **channel, "tokens": "first", "of": 3},
        {"kind": "note", "run": name, "part": "order", "reason": "it has none"},
        {"kind": "advice", "run": name, **advice, "threshold": 0.3},
    ]


def encode(lines: list[Any]) -> str:
    return "".join(map(jsonl.encode, lines))


def page_from(lines: list[Any]) -> Page:
    """The page of these lines, as they are read from a file."""
    return page_of(parse(map(json.loads, encode(lines).splitlines())))


@pytest.fixture
def two() -> Page:
    maps = ("map 1", "map 2", "difference")
    return page_from(records_of("plain") + records_of("doubled", maps=maps))


def test_many_models_are_told_apart_and_a_terminal_shows_as_many_as_fit():
    page = page_from([r for n in range(9) for r in records_of(f"model {n}")])
    stream = render(page).split('id="first"')[1].split("</section>")[0]
    key = stream.split('<ul class="key">')[1].split("</ul>")[0]
    assert all(f"model {n}" in key for n in range(9))
    assert "Solid: first token; dotted: others." in stream
    text = printed(page, 100)
    assert text.count("three numbers") == 1
    assert "model 5" in text
    assert "left to the page: 3 columns" in text


def test_the_table(two):
    table = pivot("", numbers(), models(two.records), Quantity.entries)
    masses = next(
        cells
        for row, cells in zip(table.rows, table.cells, strict=True)
        if row.title == "first token mass"
    )
    maps = [[entry.name for entry in cell] for cell in masses]
    assert maps == [[""], ["map 1", "map 2", "difference"]]
    text = shown(two)
    assert "Not measured: order: it has none" in text
    assert "A sink. Do this. [hidden_top_1 / hidden_median 0.500: at least 0.3]" in text
    assert "channel 7: up to 88.0 (120 × the median) after layer 2, in the first token" in text


def test_three_numbers_come_first_and_the_rest_is_folded(two):
    assert two.verdict == [
        "Queries that look most at the first token: plain 10.0\u00a0%; doubled 10.0\u00a0%; "
        "chance 2.0\u00a0%."
    ]
    opened = [section.name for section in two.sections if not section.folded]
    assert opened == ["comparison", "first"]
    first = two.sections[0].blocks[0]
    notes = [row.note for row in first.rows]
    assert notes == ["sink", "outliers", "mean cosine; 1 is rank collapse"]


def test_one_model_has_its_three_numbers_in_a_sentence_and_nothing_in_a_terminal_beside():
    page = page_from(records_of("plain"))
    (said,) = page.verdict
    assert said == (
        "10.0\u00a0% of queries look most at the first token; chance 2.0\u00a0%. Largest hidden "
        "number: 1,286 × the median. Mean cosine of tokens after the last layer: 5.00."
    )
    assert printed(page).split() == said.split()
    heads, norms = page.sections[0].blocks
    assert (heads.figure.data[0].type, norms.figure.data[0].type) == ("heatmap", "scatter")


def test_the_next_command_is_for_families_that_can_be_converted():
    assert {*REPAIRED} <= {name.removesuffix("ForCausalLM") for name in FAMILIES} | {"Clearhead"}


CONVERT = "clearhead convert 'my model' repaired --prefix '\\n'"


@pytest.mark.parametrize(
    ("found", "family", "command"),
    [
        ((SINK, MASSIVE), "Llama", f"{CONVERT} --rotate residual values down"),
        ((SINK,), "Llama", CONVERT),
        ((SINK,), "Gemma3", ""),  # which convert does not read
        (("kurtosis",), "Llama", ""),
    ],
)
def test_the_next_command_is_the_one_that_repairs(tmp_path, found, family, command):
    header = {"kind": "run", "study": "diagnosis", "run": "my model"}
    header["architecture"] = f"{family}ForCausalLM"
    of = {"run": "my model", "value": 0.5}
    words = {"kind": "advice", "finding": "a", "advice": "b", "threshold": 0.3}
    lines = [{"kind": "measure", "metric": SINK, "map": "softmax", **of}]
    lines += [{**words, "metric": metric, **of} for metric in found]
    page = page_from([header, *lines])
    assert list(page.next) == ([command] if command else [])
    assert ("No sink, no massive activations." in page.verdict[0]) == (SINK not in found)
    assert (f"next: {command}" in printed(page)) == bool(command)
    assert ("Next: " in shown(page)) == bool(command)
    trained = {**header, "study": "comparison", "preset": "my model", "seed": 0}
    for name, some in (("trained", [trained]), ("diagnosed", [header, *lines])):
        (tmp_path / name).write_text(encode(some))
    assert page_of(load([tmp_path / "trained", tmp_path / "diagnosed"])).next == page.next
