"""What the figures hold, and that they survive missing pieces."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.records.runs import Records
from clearhead.report import charts, load, style
from clearhead.report.charts import some_of
from clearhead.report.comparison import comparison
from clearhead.report.pivots import by_arm

Fake = Callable[..., Path]
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
