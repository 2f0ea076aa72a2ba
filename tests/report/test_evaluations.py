"""Evaluations on a page and in a terminal: means over depths and seeds, text that stays text."""

import math

import pytest
import scipy.stats

from clearhead.records.cells import lines_of
from clearhead.records.loading import parse
from clearhead.report import Page, page_of, render
from clearhead.report.statistics import Verdict

from .conftest import own, payload, printed, shown

HOSTILE = "<script>alert(1)</script>"


def _cell(run: str, task: str, at: dict, result: dict, headline: str) -> list[dict]:
    dimensions = {"scaling": "none", **{name: x for name, x in at.items() if x is not None}}
    line = {"kind": "measure", "run": run, "task": task, **dimensions}
    return [line | one for one in lines_of([headline], **result) if "aside" not in one]


def _table(records):
    """{row: texts} of the table of one model."""
    (table,) = page_of(records).sections[0].blocks
    rows = zip(table.rows, table.cells, strict=True)
    return {row.title: [[one.text for one in cell] for cell in cells] for row, cells in rows}


@pytest.fixture
def lines() -> list[dict]:
    """Two seeds of one arm and one of another: passkey at two depths, and perplexity."""
    lines = []
    runs = (("a0", "coca", 0, 0.0), ("a1", "coca", 1, 0.2), ("b", HOSTILE, 0, 0))
    for run, preset, seed, shift in runs:
        lines.append({"kind": "run", "run": run, "preset": preset, "seed": seed, "size": ""})
        for length in (128, 256):
            for depth in (0.0, 1.0):
                result = {"accuracy": 0.2 + 0.4 * depth + shift, "low": 0.1, "high": 0.9}
                at = {"length": length, "depth": depth}
                lines.extend(_cell(run, "passkey", at, {**result, "trials": 5}, "accuracy"))
            result = {"perplexity": 30.0 + length}
            for scaling, factor in (("none", None), ("ntk", 2.0)):
                at = {"length": length, "longest": 256, "scaling": scaling, "factor": factor}
                lines.extend(_cell(run, "perplexity", at, result, "perplexity"))
    return lines


def _figures(page, kind):
    return [f for f in payload(render(page))["figures"].values() if f["data"][0]["type"] == kind]


def test_the_page_has_tables_and_curves_by_length(lines):
    page = page_of(parse(lines))
    text = shown(page)
    assert "ntk × 2 accuracy" not in text
    assert "none ntk × 2 128 256 128 256 coca" in text  # settings across, models down
    assert "coca reference, 2 seeds 0.50 ± 0.14 0.50 ± 0.14" in text  # depths: 0.4 and 0.6
    assert "158 ± 0" in text
    assert HOSTILE not in own(render(page))
    assert 'id="comparison"' not in render(page)  # nothing of it was measured
    accuracy, perplexity = _figures(page, "scatter")
    assert len(accuracy["data"]) == 2  # models
    assert accuracy["layout"]["yaxis"]["range"] == [0, 1]
    assert accuracy["data"][0]["x"] == [128, 256]
    assert accuracy["data"][0]["y"] == pytest.approx([0.5, 0.5])  # over depths and seeds
    scalings = [(x["name"], x["line"]["dash"]) for x in perplexity["data"]]
    assert [dash for _, dash in scalings] == ["solid", "dot"] * 2
    assert "Solid: none; dotted: ntk × 2." in text


def test_texts_chosen_by_another_longest_length_have_a_row_of_their_own():
    """At 128 tokens other documents are read where 512 is the longest than where 256 is."""
    lines = [{"kind": "run", "run": "a", "preset": "a", "seed": 0}]
    for longest, value in ((256, 10.0), (512, 20.0)):
        for length in (128, longest):
            at = {"length": length, "longest": longest}
            result = {"perplexity": value, "documents": []}
            lines.extend(_cell("a", "perplexity", at, result, "perplexity"))
    records = parse(lines)
    assert _table(records) == {
        "perplexity, none, longest 256": [["10.0"], ["10.0"], []],
        "perplexity, none, longest 512": [["20.0"], [], ["20.0"]],
    }
    (chart,) = _figures(page_of(records), "scatter")
    assert (chart["data"][0]["x"], chart["data"][0]["y"]) == ([128, 512], [20.0, 20.0])
    assert "longest" not in shown(page_of(parse(lines[:3])))


def test_the_numbers_at_the_longest_length_stand_first(lines):
    assert page_of(parse(lines)).verdict == [
        f"Accuracy of passkey at 256 tokens: coca 0.50 ± 0.14; {HOSTILE} 0.400.",
        f"Perplexity at 256 tokens: coca 286 ± 0; {HOSTILE} 286.",
    ]


def _retrieval(items: bool, rights: tuple[int, int]) -> Page:
    """Three seeds of two models: each names so many of ten keys, the same ones with every seed."""
    lines = []
    for preset, right in zip(("transformer", "coca"), rights, strict=True):
        for seed in range(3):
            run = f"{preset}{seed}"
            lines.append({"kind": "run", "run": run, "preset": preset, "seed": seed, "size": ""})
            result = {"accuracy": right / 10, "low": 0.1, "high": 0.9, "trials": 10}
            if items:
                result["accuracy_by_item"] = [1.0] * right + [0.0] * (10 - right)
            at = {"length": 128, "depth": 0.5}
            lines.extend(_cell(run, "passkey", at, result, "accuracy"))
    return page_of(parse(lines))


@pytest.mark.parametrize(("right", "verdict"), [(10, Verdict.HIGHER), (0, Verdict.UNDECIDED)])
def test_keys_that_every_seed_finds_or_misses_decide_by_their_number(right, verdict):
    """Without a number by key three equal accuracies decide nothing, however far apart."""
    (unknown,) = _retrieval(False, (0, right)).differences
    assert unknown.verdict is Verdict.NO_SPREAD
    (known,) = _retrieval(True, (0, right)).differences
    assert known.mean == right / 10
    assert known.verdict is verdict
    # One hit and one miss more in each arm: 11/12 of 1/12, over 12, twice.
    half = scipy.stats.t.ppf(0.975, 9) * (2 * 11 / 12**3) ** 0.5
    assert known.decidable == pytest.approx(half)


def test_tables_of_one_model_keep_depths_apart_and_show_intervals_and_what_is_missing(lines):
    one = [line for line in lines if line["run"] == "a0"]
    table = _table(parse(one))
    depths = ["accuracy, none, depth 0", "accuracy, none, depth 1"]
    assert [*table] == [*depths, "perplexity, none", "perplexity, ntk × 2"]
    assert table[depths[1]][0] == ["0.600 [0.10, 0.90]"]
    dashes = _table(parse([one[0], *one[2:]]))  # one was not asked for
    assert [len(cell) for name in depths for cell in dashes[name]].count(0) == 1
    one[1]["value"] = None
    assert _table(parse(one))[depths[0]] == [["none"], ["0.200 [0.10, 0.90]"]]


def test_the_accuracy_of_a_guess_stands_beside_the_row_and_has_no_table():
    line = {"kind": "measure", "run": "a", "task": "shots", "scaling": "none", "shots": 4}
    line["length"] = 128
    lines = [{"kind": "run", "run": "a", "preset": "coca", "seed": 0}]
    lines.append({**line, "metric": "accuracy", "value": 0.5})
    lines.append({**line, "metric": "chance", "value": 0.125, "aside": True})
    page = page_of(parse(lines))
    assert "shots 4 (chance 12.5\u00a0%)" in printed(page, width=200)
    assert not any("chance" in block.title for block in page.blocks() if hasattr(block, "title"))


def _given(losses: dict[str, list[float]], **header: object) -> list[dict]:
    """Two evaluated models, with a loss for each document; trained by nobody that records know."""
    lines = []
    header = {"kind": "run", "seed": 0, "evaluation": {}, **header}
    for name, ones in losses.items():
        loss = sum(ones) / len(ones)
        named = ((f"d{n}", one) for n, one in enumerate(ones))
        documents = [{"document": d, "loss": x, "perplexity": math.exp(x)} for d, x in named]
        result = {"perplexity": math.exp(loss), "loss": loss, "documents": documents}
        lines.append({**header, "run": name, "preset": name})
        at = {"length": 64, "longest": 64}
        lines.extend(_cell(name, "perplexity", at, result, "perplexity"))
    return lines


LOSSES = {"a": [3.0, 3.5, 2.5, 4.0, 2.0, 3.2], "b": [3.1, 3.61, 2.6, 4.12, 2.09, 3.3]}


def test_an_interval_of_a_perplexity_is_one_of_its_loss():
    runs = parse(_given(LOSSES)).runs
    losses = LOSSES["a"]
    interval = scipy.stats.t.interval(0.95, 5, loc=sum(losses) / 6, scale=scipy.stats.sem(losses))
    (one,) = runs[0].select("perplexity", task="perplexity")
    assert one.details["interval"] == pytest.approx([math.exp(end) for end in interval])
    few = parse(_given({name: ones[:4] for name, ones in LOSSES.items()})).runs[0]
    (one,) = few.select("perplexity", task="perplexity")
    assert "interval" not in one.details


def test_models_without_seeds_differ_by_their_documents_and_no_seed_is_spoken_of():
    page = page_of(parse(_given(LOSSES)))
    (difference,) = page.differences
    assert difference.verdict is Verdict.HIGHER
    items = [[math.exp(sum(o) / 6) * (1 + x - sum(o) / 6) for x in o] for o in LOSSES.values()]
    expected = scipy.stats.ttest_rel(items[1], items[0])
    assert difference.p == pytest.approx(expected.pvalue)
    assert difference.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert "seed" not in own(render(page)).partition('id="made"')[0].lower()
    trained = page_of(parse(_given(LOSSES, train={"tokens": 9})))
    assert trained.differences[0].interval is None
    assert "one seed: undecided" in own(render(trained))


def test_a_headline_names_its_text():
    data = {"sources": [{"spec": "books.jsonl", "weight": None}]}
    records = parse(_given(LOSSES, data=data))
    (said,) = page_of(records).verdict
    assert " on books.jsonl (held-out part): a 20.8 [10, 44]; b 23.0 [" in said
    alone = parse(_given({"a": LOSSES["a"]}, data=data))
    assert "perplexity on books.jsonl (held-out part)" in printed(page_of(alone))


def test_an_interval_of_shares_ends_at_0_and_1():
    for metric, items, ends in (
        ("forced_tokens", [0.0, 0.0, 0.0, 0.2], (0.0, 0.21)),
        ("forced_tokens", [1.0, 1.0, 1.0, 0.8], (0.79, 1.0)),
        ("loss", [0.0, 0.0, 0.0, 0.2], (-0.11, 0.21)),
    ):
        result = {metric: sum(items) / 4, f"{metric}_by_item": items}
        (line,) = lines_of([metric], **result)
        assert line["interval"] == pytest.approx(ends, abs=0.005)
