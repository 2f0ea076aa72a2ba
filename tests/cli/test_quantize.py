"""clearhead quantize as a person uses it: what it measures, saves, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.quantize import measure
from clearhead.report import load

from .conftest import call, changed, refusal, saved


def test_a_model_under_every_scheme(model, windows, tmp_path, capsys, tokenizer):
    records, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    kept = ("--records", str(records), "--page", str(page))
    assert call("quantize", str(model), *windows, "--scheme", "all", *kept) == 0
    shown = capsys.readouterr()
    assert "w8a8-coarse" in shown.out
    assert "logits4-row" in shown.out
    assert "so they are channels" in " ".join(shown.out.split())  # w4-group: no layer is so wide
    (found,) = load(records).runs
    assert found.id == "mine"
    assert found.header["tokens"] == 48
    assert found.value("perplexity", scheme="w8a8-fine") != found.value("perplexity")
    assert found.header["calibration"] == "16 windows of the training split"
    assert page.read_text().count('<div class="plot') == 3  # the kinds that had results

    # A second model joins the first, in the file and on the page.
    other = saved(tmp_path / "other", tokenizer, hidden_size=48)
    some = ("--scheme", "w4-channel", "logits6-head")
    assert call("quantize", str(other), *windows, *some, *kept) == 0
    assert [each.id for each in load(records).runs] == ["mine", "other"]
    assert "other" in page.read_text()


def test_requests_that_cannot_be_met(model, windows, tmp_path, capsys, tokenizer, text):
    folder, other = str(model), text / "00.txt"
    long = changed(windows, "--length", "100000", "--tokens", "100000")
    longer = changed(windows, "--length", "128", "--tokens", "128", "--scheme", "w4-channel")
    learned = saved(tmp_path / "learned", tokenizer, position="learned")
    small = saved(tmp_path / "small", tokenizer, vocab_size=20)
    for words, said in (
        ((folder, "--scheme", "w1-channel"), "choose 2 to 16"),
        ((folder, "--scheme", "w8a8-corse"), "did you mean"),
        ((folder, *long), "enough for one window of 100000"),
        ((learned, *longer), "64 learned positions"),
        ((small, *windows, "--scheme", "w4-channel"), "use the tokenizer"),
        ((folder, *windows, "--records", other), "not a record"),
    ):
        assert said in refusal(capsys, "quantize", *words)


@pytest.mark.parametrize("deploy", [False, True])
def test_of_several_models_one_in_few_bits_is_refused_before_any_is_measured(
    deploy, model, windows, tmp_path, capsys, tokenizer
):
    few, out = saved(tmp_path / "few", tokenizer), tmp_path / "out"
    settings = json.loads((few / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "torchao"}
    (few / "config.json").write_text(json.dumps(settings))
    words = ("--deploy", "int8-dynamic-tensor", "--output", str(out)) if deploy else ()
    said = refusal(capsys, "quantize", str(model), str(few), *windows, *words)
    assert f"{few} is already quantised (torchao): give the one in full precision" in said
    assert not out.exists()


def test_out_of_memory_keeps_what_is_done_and_the_same_command_goes_on(
    model, windows, tmp_path, capsys, monkeypatch
):
    records, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    runs = []
    real = measure.perplexity

    def failing(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you")
        return real(*arguments, **options)

    monkeypatch.setattr(measure, "perplexity", failing)
    kept = ("--records", str(records), "--page", str(page))
    message = refusal(capsys, "quantize", str(model), *windows, *kept)
    assert "out of memory: give a smaller --length than 16" in message
    assert message.endswith(f"what is done is in {records}, and the same command goes on")
    assert not page.exists()
    assert _schemes(records) == [None, "w8a8-coarse"]
    assert call("quantize", str(model), *windows, *kept) == 0
    assert len(runs) == 3 + 2  # no layer is as wide as a group: nothing is run
    assert _schemes(records) == [None, "w8a8-coarse", "w8a8-token", "w4-channel", "w4-group"]
    assert page.exists()


def _schemes(records: Path) -> list[str | None]:
    """The schemes of a file of one model, as they were measured."""
    (run,) = load(records).runs
    return [cell["at"].get("scheme") for cell in run.cells]


def test_seeds_of_the_windows_are_pooled(model, windows, tmp_path):
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    some = [*windows, "--scheme", "w4-channel"]
    assert call("quantize", str(model), *some, "--records", str(one)) == 0
    assert call("quantize", str(model), *some, "--records", str(one), "--seeds", "0", "1") == 0
    assert call("quantize", str(model), *some, "--records", str(two), "--seeds", "1") == 0
    ((both,), (alone,)) = load(one).runs, load(two).runs
    pooled, second = (run.measure("perplexity", scheme="w4-channel") for run in (both, alone))
    assert len(pooled.details["items"]) == 2 * 3  # windows
    assert pooled.draws[1].value == second.value != pooled.draws[0].value
