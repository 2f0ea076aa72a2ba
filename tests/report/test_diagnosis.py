"""Records, table and page of a diagnosis, from records made by hand."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead import ClearheadError
from clearhead.report import diagnosis_table
from clearhead.report.diagnosis import encode, load_diagnoses
from clearhead.report.diagnosis_page import render, write_diagnosis

HOSTILE = "</script><img src=x onerror=alert(1)><b>x</b>"


def records_of(name: str, *, maps: tuple[str, ...] = ("softmax",), layers: int = 4) -> list[Any]:
    """Everything that a diagnosis can hold, from arithmetic."""
    places: list[dict[str, Any]] = [{}, *({"layer": n} for n in range(layers))]
    lines: list[dict[str, Any]] = []
    for number, place in enumerate(places):
        for map in maps:
            for metric in ("first_token_argmax_share", "first_token_mass", "sink_rate_0.3"):
                lines.append({"metric": metric, "map": map, **place, "value": 0.1 + number / 20})
            lines.append({"metric": "entropy", "map": map, **place, "value": 2.0})
        for metric in (
            *("kurtosis_excess", "kurtosis_excess_relu", "kurtosis_pooled", "kurtosis_flattened"),
            *("kurtosis_neurons", "anomalous_before", "order_broken_before", "logit_top_1"),
        ):
            lines.append({"metric": metric, **place, "value": 0.5 + number})
        for tokens in ("first", "rest"):
            for metric in ("kurtosis", "largest_activation"):
                lines.append({"metric": metric, "tokens": tokens, **place, "value": 30.0})
    for layer in range(-1, layers):
        for metric in ("similarity", "effective_rank", "norm_first", "norm_rest"):
            lines.append({"metric": metric, "layer": layer, "value": 2.0 + layer})
    lines += [
        {"metric": "first_token_argmax_share", "map": map, "layer": n, "head": h, "value": h / 4}
        for map in maps
        for n in range(layers)
        for h in range(4)
    ]
    for kind in ("hidden", "logit"):
        lines += [{"metric": f"{kind}_top_{r}", "value": 900 / r} for r in (1, 2, 3, 10, 100)]
        lines.append({"metric": f"{kind}_median", "value": 0.7})
    lines += [
        {"metric": "chance_floor", "value": 0.02},
        {"metric": "null_mass", "map": maps[0], "value": math.nan},
        {"metric": "trained_length", "value": 128},
        {"metric": "near_weight_trained", "layer": 3, "value": 0.8},
        {"metric": "near_weight_beyond", "layer": 3, "value": 0.2},
    ]
    curves = [
        {
            "curve": "share_by_distance",
            "map": maps[0],
            "x": ["0", "1", "2–3"],
            "y": [0.5, 0.3, 0.2],
        },
        {"curve": "spectrum", "map": "matrix", "layer": 2, "x": [1, 2], "y": [1.0, 0.1]},
        {"curve": "spectrum", "map": "C", "x": [1, 2], "y": [1.0, 0.0]},
        {"curve": "decay", "map": "mean |score|", "x": [0, 1, 2], "y": [2.0, 1.0, 0.5]},
        {"curve": "decay", "map": "bound", "x": [0, 1, 2], "y": [20.0, 18.0, 15.0]},
        *(
            {"curve": curve, "layer": n, "x": [0, 100, 200], "y": [1.0, 2.0, 9.0]}
            for curve in ("largest_logit_by_position", "logit_by_position")
            for n in (0, 1, 3)
        ),
    ]
    channel = {"channel": 7, "first_layer": -1, "layer": 2, "largest": 88.0, "medians": 120.0}
    advice = {"finding": "a sink", "advice": "do this", "metric": "m", "value": 0.5}
    header = {"windows": 8, "length": 128, "command": "clearhead diagnose", "parameters": 10_000}
    return [
        {"kind": "diagnosis", "run": name, **header, "probes_hold_bytes": 2**25, "data": {"a": 1}},
        *({"kind": "measure", "run": name, **line} for line in lines),
        *({"kind": "curve", "run": name, **line} for line in curves),
        {"kind": "channel", "run": name, **channel, "tokens": "first", "of": 3},
        {"kind": "note", "run": name, "part": "order", "reason": "it has none"},
        {"kind": "advice", "run": name, **advice, "threshold": 0.3},
    ]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "diagnosis.jsonl"
    maps = ("map 1", "map 2", "difference")
    path.write_text(encode(records_of("plain") + records_of("doubled", maps=maps)), "utf-8")
    return path


def test_records_come_back(two):
    plain, doubled = load_diagnoses([two])
    assert (plain.name, doubled.name) == ("plain", "doubled")
    assert plain.value("first_token_mass", map="softmax") == 0.1
    assert plain.by_layer("first_token_mass", map="softmax") == pytest.approx(
        {0: 0.15, 1: 0.2, 2: 0.25, 3: 0.3}
    )
    assert list(plain.by_layer("norm_rest")) == [-1, 0, 1, 2, 3]
    assert doubled.maps() == ["map 1", "map 2", "difference"]
    assert plain.value("null_mass", map="softmax") is None
    (line,) = [
        x
        for x in map(json.loads, two.read_text().splitlines())
        if x.get("metric") == "null_mass" and x["run"] == "plain"
    ]
    assert (line["value"], line["reason"]) == (None, "value was nan")
    assert len(plain.found("decay")) == 2


def test_many_models_are_told_apart(tmp_path):
    """Once above the figures; where the lines are layers, and not models, the legend stays."""
    path = tmp_path / "many.jsonl"
    path.write_text(encode([r for n in range(6) for r in records_of(f"model {n}")]), "utf-8")
    page = render(load_diagnoses([path]), title="t")
    stream = page.split('id="stream"')[1].split("</section>")[0]
    key = stream.split('<ul class="key">')[1].split("</ul>")[0]
    assert [f"model {n}" in key for n in range(6)] == [True] * 6
    assert "Solid: first token; dotted: others." in stream
    assert '<ul class="key">' not in page.split('id="longer"')[1].split("</section>")[0]
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    own = [figure["ownLegend"] for figure in data["figures"].values()]
    assert data["key"]
    assert own.count(True) == 6 * 3, "a spectrum and two curves by position each"


def test_bad_records_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    for text, message in (
        ('{"kind": "mesure"}', "did you mean measure"),
        ('{"kind": "measure", "run": "x", "metric": "m", "value": 1}', "comes before it"),
        ("nonsense", "line 1: not a record"),
        ('{"run": "x"}', "lacks 'kind'"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(ClearheadError, match=message):
            load_diagnoses([path])
    path.write_text(encode(records_of("one")))
    with pytest.raises(ClearheadError, match="a second diagnosis named 'one'"):
        load_diagnoses([path, path])
    with pytest.raises(ClearheadError, match="cannot read"):
        load_diagnoses([tmp_path / "missing.jsonl"])
    with pytest.raises(ClearheadError, match="kind of record"):
        encode([{"kind": "step"}])


def test_the_table(two):
    from rich.console import Console

    models = load_diagnoses([two])
    rows = {
        row.title: tuple(cell.replace("\u00a0", " ") for cell in row.cells)
        for row in diagnosis_table.rows(models)
    }
    assert rows["weight on the first token"] == ("10.0 %", "–")
    assert rows["weight on the first token, difference"] == ("–", "10.0 %")
    assert rows["per token, first token"] == ("30.0", "30.0")
    assert rows["hidden states, top 100"] == ("9.00", "9.00")
    assert rows["norm of the others"] == ("5.00", "5.00")
    assert rows["weight on near keys, at the end"] == ("20.0 %", "20.0 %")
    assert rows["outlier channels"] == ("3", "3")
    assert "weight on no key" not in rows  # NaN in one, and absent in the other
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(diagnosis_table.to_console(models))
    text = console.export_text()
    assert "not measured: order: it has none" in text
    assert "a sink: do this [m 0.500: at least 0.3]" in text
    assert "32 MiB" in text
    assert "channel 7: up to 88.0 (120 × the median) after layer 2, in the first token" in text


def test_the_page_has_a_plot_for_each(two, tmp_path):
    models = load_diagnoses([two])
    text = render(models, title="Two models")
    for section in ("attention", "hidden", "order", "stream", "longer", "numbers", "made"):
        assert f'<section id="{section}">' in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert len(data["figures"]) == text.count('class="plot')
    # Four maps by head; for two models at once 4 of attention (no λ, no null mass), 8 of hidden
    # states, 3 of order and 3 of the stream; a spectrum and two curves by position for each model.
    assert len(data["figures"]) == 4 + 4 + 8 + 3 + 3 + 2 + 4
    write_diagnosis(models[:1], tmp_path / "one.html", title="One")
    one = re.sub(r"<script.*?</script>", "", (tmp_path / "one.html").read_text(), flags=re.DOTALL)
    assert "plain" in one
    assert "doubled" not in one


def test_text_of_the_records_stays_text(tmp_path):
    path = tmp_path / "hostile.jsonl"
    path.write_text(encode(records_of(HOSTILE)), "utf-8")
    text = render(load_diagnoses([path]), title=HOSTILE)
    assert HOSTILE not in text
    assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_a_page_that_cannot_be_written_leaves_nothing(two, tmp_path):
    folder = tmp_path / "taken"
    folder.write_text("a file")
    with pytest.raises(ClearheadError, match="cannot write"):
        write_diagnosis(load_diagnoses([two]), folder / "page.html", title="x")
    assert folder.read_text() == "a file"
