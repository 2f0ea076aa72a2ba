"""The comparison's tables, on a page and in a terminal, and its figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.loading import parse
from clearhead.records.runs import Records
from clearhead.report import charts, load, page_of, render, style
from clearhead.report.charts import some_of
from clearhead.report.comparison import comparison, internals
from clearhead.report.pivots import by_arm
from clearhead.report.statistics import Verdict

from .conftest import printed, shown

Fake = Callable[..., Path]


def lines_of(**arms: list[float]) -> list[dict[str, Any]]:
    """Perplexities by arm and seed."""
    lines: list[dict[str, Any]] = []
    for (preset, values), n in ((arm, n) for arm in arms.items() for n in range(len(arm[1]))):
        run = {"run": f"{preset}/seed{n}"}
        lines.append({"kind": "run", **run, "preset": preset, "seed": n, "parameters": 1_900_000})
        measure = {"metric": "perplexity", "value": values[n], "length": 8}
        lines.append({"kind": "measure", **run, **measure})
    return lines


@pytest.fixture
def three() -> Records:
    arms = {"transformer": [10.0, 12.0, 11.0], "differential": [7.0, 9.1, 7.9]}
    return parse(lines_of(**arms, softmax1=[9.0, 12.5, 10.2]))


def test_mean_spread_and_verdicts(three):
    table = by_arm(three, "", comparison(three))
    assert [column.title for column in table.columns] == ["all", "8"]  # without data: left out
    entries = {row.arm: cells[1][0] for row, cells in zip(table.rows, table.cells, strict=True)}
    assert entries["transformer"].text == "11.0 ± 1.0"
    assert entries["transformer"].difference is None
    difference = entries["differential"].difference
    assert difference.verdict is Verdict.LOWER
    assert "95 % interval" in entries["differential"].detail
    # Means 8 and 11, variances 1.11 and 1: error² 2.11/3; t(3.99) 2.778: half the interval 2.33.
    assert difference.decidable == pytest.approx(2.33, abs=0.01)
    # softmax1: variances 3.163 and 1, t(3.16) 3.09: half the interval 3.65.
    page = page_of(three)
    for text in (shown(page), printed(page)):
        assert "lower by 3.0" in text
        assert ", alone" not in text
        assert "undecided (±3.7)" in text
    assert "p = 0.02" in render(page)
    assert 'class="verdict decided"' in render(page)
    assert [row.note for row in table.rows] == ["reference, 3 seeds", "3 seeds", "3 seeds"]


def test_what_holds_alone_but_not_among_all_of_the_page_is_marked(three):
    page = page_of(three)
    page.threshold = 0.001  # as if there were very many comparisons
    assert "lower by 3.0, alone" in printed(page)
    assert "lower by 3.0, alone" in shown(page)
    assert 'class="verdict decided"' not in render(page)


def test_seeds_that_all_agree_could_not_have_decided_every_effect():
    lines = lines_of(transformer=[7.0, 7.0], differential=[7.0, 7.0], softmax1=[9.0, 9.0])
    measures = [one for one in lines if one["kind"] == "measure"]
    overall = [{key: x for key, x in one.items() if key != "length"} for one in measures]
    for text in (shown(page := page_of(parse([*lines, *overall]))), printed(page, 200)):
        assert text.count("undecided (all seeds alike)") == 6
        assert "higher by" not in text
    assert "differential 7.00 ± 0, undecided (all seeds alike)" in page.verdict[0]
    assert ", p = " not in render(page)
    assert "2 seeds, all alike" in render(page)


def test_an_arm_has_the_seeds_that_did_not_diverge():
    lost = {"kind": "run", "run": "softmax1/seed1", "preset": "softmax1", "seed": 1}
    lines = lines_of(transformer=[10.0, 12.0], softmax1=[9.0])
    records = parse([*lines, {**lost, "diverged": "the loss was nan"}])
    for text in (shown(page := page_of(records)), printed(page)):
        text = " ".join(text.replace("│", " ").split())
        assert "one seed: undecided" in text
        assert "1 of 2 runs diverged" in text


def test_each_map_of_differential_attention_is_named(fake):
    records = load(fake(steps=1))
    table = by_arm(records, "", internals(records))
    titles = [column.title for column in table.columns]
    index = titles.index("argmax share")
    names = [[entry.name for entry in cells[index]] for cells in table.cells]
    assert names == [[""], ["map 1", "map 2", "difference"], [""]]
    null = titles.index("mass on no token")
    assert [len(cells[null]) for cells in table.cells] == [0, 0, 1]
    assert "chance 2.4" in table.columns[index].note
    page = page_of(records)
    assert "map 1" in shown(page)
    assert "difference" in shown(page)


def test_a_value_that_cannot_be_is_explained(fake):
    page = page_of(load(fake(presets=("transformer", "gpt2"), steps=1)))
    assert "learned positions end at 256 tokens" in shown(page)
    assert "learned" in printed(page)


def test_a_classifier_shows_its_metrics_by_split():
    lines = []
    for seed, value in enumerate((0.5, 0.7)):
        run = {"run": f"r{seed}", "preset": "bert on wnli", "seed": seed, "task": "wnli"}
        measure = {"kind": "measure", "run": f"r{seed}", "metric": "accuracy", "value": value}
        lines += [{"kind": "run", **run}, {**measure, "split": "validation"}]
    text = printed(page_of(parse(lines)))
    assert "Classification" in text
    assert "0.60 ± 0.14" in text


def test_a_terminal_shows_one_table_and_counts_the_columns_that_do_not_fit(three):
    page = page_of(three)
    text = printed(page, 40)
    assert text.count("┏") == 1
    assert "left to the page: 1 columns" in text
    assert "left to the page" not in printed(page)


def test_numbers_read_well():
    numbers = [style.number(x) for x in (0, 41.234, 1234.5, 0.03124, -2.5)]
    assert numbers == ["0", "41.2", "1,234", "0.0312", "−2.50"]
    assert style.number(1.234e12) == "1.23e+12"
    assert style.with_spread(41.234, 0.123) == "41.23 ± 0.12"
    assert style.with_spread(1234.5, 31.0) == "1,234 ± 31"
    assert style.with_spread(41.234, None) == "41.2"
    assert style.with_spread(1.0000416, 0.0000018) == "1.00 ± 0"
    assert style.number(-1.2e-7) == "−1.20e-07"
    assert style.bounds(-0.98712, -0.95498) == "−0.987 to −0.955"
    assert style.bounds(-0.001, 41.0) == "0 to 41"
    assert style.bounds(-2.13, 20.5) == "−2 to 20"
    signed = [style.signed(9.2, 22.6), style.signed(-0.1234), style.signed(0.0)]
    assert signed == ["+9", "−0.123", "0"]
    assert style.count(299_008) == "299\u00a0k"
    assert style.percent(0.0239) == "2.4\u00a0%"
    assert style.percent(0.65) == "65.0\u00a0%"


DEVICE = "CPU, 2 cores, bf16 autocast"


def _changed(line: dict[str, Any], *, device: str = DEVICE, precision: str = "bf16") -> str:
    """A line of the records of another machine; only a run's own names it."""
    if line["kind"] == "run":
        line |= {"device": device, "train": line["train"] | {"precision": precision}}
    return json.dumps(line)


def test_loss_is_smoothed_by_blocks(fake):
    records = load(fake(steps=160, presets=("transformer",)))
    panel = charts.loss(records, style.looks(["transformer"]))
    assert panel.note == "Each point is the mean over 2 steps. The first 5 % are left out."
    (trace,) = panel.figure.data
    one, other = records.runs[0].steps[8:10]
    assert len(trace.y) == 76
    assert trace.y[0] == pytest.approx((one["loss"] + other["loss"]) / 2)
    assert trace.x[0] == pytest.approx((one["tokens"] + other["tokens"]) / 2 / 1000)


def test_several_seeds_get_a_band(fake):
    records = load(fake(steps=20, seeds=2, presets=("transformer",)))
    panel = charts.loss(records, style.looks(["transformer"]))
    assert [trace.fill for trace in panel.figure.data] == ["toself", None]


@pytest.mark.parametrize("changed", [{"device": "another"}, {"precision": "fp32"}], ids=list)
def test_times_of_other_machines_are_left_out(fake, changed):
    path = fake(steps=20, seeds=3, presets=("transformer",))
    lines = path.read_text("utf-8").splitlines()
    far = [_changed(json.loads(line), **changed) for line in lines if "seed2" in line]
    path.write_text("\n".join([*(x for x in lines if "seed2" not in x), *far, ""]), "utf-8")
    records = load(path)
    here = records.on_one_device()
    assert [run.seed for run in here.runs] == [0, 1]
    table = by_arm(records, "", comparison(records))
    details = {
        column.title: cell[0].detail
        for column, cell in zip(table.columns, table.cells[0], strict=True)
    }
    assert details["training speed"].startswith("2 seeds")
    assert details["1 ×"].startswith("3 seeds")


def test_perplexity_marks_the_training_length(fake):
    records = load(fake(steps=1, presets=("transformer", "gpt2")))
    panel = charts.perplexity_by_length(records, style.looks(records.arms()))
    assert list(panel.figure.data[0].x) == [256, 512, 1024, 2048]
    assert list(panel.figure.data[1].x) == [256]
    assert panel.figure.layout.shapes[0].x0 == 256
    assert "dotted line is the length in training" in panel.note
    alone = Records(runs=records.runs[1:])  # of one length
    assert charts.perplexity_by_length(alone, style.looks(["gpt2"])) is None


def test_layers_tell_first_token_and_rest_apart(fake):
    records = load(fake(steps=1, presets=("transformer",)))
    looks = style.looks(["transformer"])
    lines = {f"{one} tokens": ("kurtosis", {"tokens": one}) for one in ("first", "rest")}
    panel = charts.by_layer(records, looks, "title", "axis", lines)
    assert [trace.line.dash for trace in panel.figure.data] == ["solid", "dot"]
    assert "Solid: first tokens; dotted: rest tokens." in panel.note
    names = [trace.name for trace in panel.figure.data]
    assert names == ["transformer · first tokens", "transformer · rest tokens"]


def test_shares_use_one_colour_scale(fake):
    panels = charts.first_token_share(load(fake(steps=1)))
    maps = [f"differential · {name}" for name in ("map 1", "map 2", "difference")]
    assert [panel.title for panel in panels] == ["transformer", *maps, "softmax1"]
    shown = [panel.figure.data[0] for panel in panels]
    largest = max(max(row) for one in shown for row in one.z)
    assert {one.zmax for one in shown} == {max(10, largest)}


def test_of_thirty_layers_every_third_is_named(fake):
    assert some_of(range(12)) == list(range(12))
    assert some_of(range(30)) == list(range(0, 30, 3))
    records = load(fake(steps=1, presets=("transformer",), layers=30, heads=9))
    (panel,) = charts.first_token_share(records)
    assert list(panel.figure.layout.yaxis.tickvals) == list(range(0, 30, 3))
    assert list(panel.figure.layout.xaxis.tickvals) == list(range(9))
