"""clearhead quantize as a person uses it: what it measures, saves, deploys, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.quantize import measure
from clearhead.records import manifest
from clearhead.report import load

from .conftest import call, changed, refusal, saved, saved_llama


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


FORM = ("--deploy", "int8-dynamic-tensor")


@pytest.mark.parametrize("scheme", ["w8a8-static", "w4a16-channel"])
def test_saved_and_opened_again(llama, windows, tmp_path, capsys, scheme):
    pytest.importorskip("compressed_tensors")
    out = tmp_path / "served"
    words = ("quantize", llama, *windows, "--save", out, "--format", "compressed-tensors")
    assert call(*words, "--scheme", scheme) == 0
    shown = capsys.readouterr()
    figures = json.loads((out / "quantization.json").read_text("utf-8"))
    assert f"{scheme}: {figures['bytes']:,} bytes; perplexity" in shown.out
    assert "20 of 20 prompts continued as simulated" in " ".join(shown.out.split())
    assert "it/s" not in shown.err
    assert figures["saved_perplexity"] == pytest.approx(figures["simulated_perplexity"], rel=1e-3)
    assert figures["versions"]["compressed-tensors"]
    assert "model.safetensors" in manifest.verify(out, advice="")["files"]
    assert "exists" in refusal(capsys, *words, "--scheme", scheme)
    assert "already quantised" in refusal(capsys, "quantize", out, *windows)
    assert call("generate", out, "attention", "--tokens", "3") == 0


@pytest.mark.parametrize("own", [True, False], ids=["with code", "a turned Llama"])
def test_a_model_is_converted_for_servers_and_saved(own, windows, tmp_path, capsys, tokenizer):
    """A preset leaves with its code, a preset and a turned Llama as a plain Llama."""
    pytest.importorskip("compressed_tensors")
    source, served, out = (tmp_path / name for name in ("source", "served", "out"))
    scheme = ("--scheme", "w8a8-token" if own else "w8a8-static")
    words = ("quantize", served, *windows, *scheme, "--save", out)
    if own:
        saved(source, tokenizer, epilogue="gate-headwise")
        assert call("convert", source, served, "--for", "serving") == 0
        assert "--trust-remote-code" in refusal(capsys, *words)
        words += ("--trust-remote-code",)
    else:
        saved_llama(source, tokenizer, intermediate_size=64)
        turned = tmp_path / "turned"
        assert call("convert", source, turned, "--rotate", "residual", "values") == 0
        assert call("convert", turned, served, "--for", "serving") == 0
        assert json.loads((served / "config.json").read_text())["model_type"] == "llama"
    capsys.readouterr()
    assert call(*words) == 0
    assert "20 of 20 prompts" in " ".join(capsys.readouterr().out.split())
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"]


def test_what_cannot_be_saved(llama, model, windows, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    served, out = ("--save", tmp_path / "few"), ("--output", tmp_path / "few")
    short = ("--length", "100000", "--tokens", "100000", "--scheme", "w8a8-static")
    for words, said in (
        ((*served, llama, "--scheme", "w8a8-coarse"), "cannot say w8a8-coarse: choose w8a8-static"),
        ((*served, llama, "--scheme", "w8a8-token", "w8a8-static"), "found 1 and 2"),
        ((*served, llama, "--scheme", "w8a8-token", "--page", "p"), "--page has no effect"),
        ((*served, model, "--scheme", "w8a8-token"), "--for serving` makes"),
        ((*served, llama, "--scheme", "w4a16-group"), "no whole groups of 128"),
        ((*served, llama, *short), "enough for one window"),
        ((*out, model), "--deploy and --output"),
    ):
        given = windows[:2] if short[0] in words else windows
        assert said in refusal(capsys, "quantize", *words, *given)
    assert not (tmp_path / "few").exists()


def _header(path: Path) -> str:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def test_a_repaired_model_is_deployed_reloaded_and_generates(tokenizer, windows, tmp_path, capsys):
    pytest.importorskip("torchao")
    # Wide enough for int8 to save more than the file's longer header takes.
    shape = {"hidden_size": 96, "intermediate_size": 160}
    repair = {"normalizer": "key-value", "mlp_rotation": "hadamard"}
    model = saved(tmp_path / "repaired", tokenizer, **shape, **repair)
    few = tmp_path / "few"
    options = (*windows, *FORM, "--output", few)
    capsys.readouterr()
    assert call("quantize", model, *options) == 0
    shown, said = capsys.readouterr()
    assert "Writing model shards" not in said
    assert "saved, loaded again and run: " in shown
    figures = json.loads((few / "quantization.json").read_text("utf-8"))
    assert figures["form"] == FORM[1]
    assert figures["bytes"] == (few / "model.safetensors").stat().st_size
    assert figures["bytes"] < figures["bfloat16_bytes"]
    assert figures["perplexity"] == pytest.approx(figures["bfloat16_perplexity"], rel=0.05)
    suffixes = {path.suffix for path in few.iterdir()}
    assert suffixes <= {".json", ".safetensors", ".py", ".jinja"}  # nothing pickled
    assert "Int8Tensor" in _header(few / "model.safetensors")
    sealed = manifest.verify(few, advice="")["files"]
    assert {"model.safetensors", "quantization.json"} <= sealed.keys()
    # It generates, and is not quantised again.
    assert call("generate", few, "attention", "--tokens", "3") == 0
    again = (*FORM, "--output", tmp_path / "again")
    assert "already quantised (torchao)" in refusal(capsys, "quantize", few, *windows, *again)


def test_what_is_not_deployed(model, windows, tmp_path, capsys, tokenizer):
    pytest.importorskip("torchao")
    few = (*windows, *FORM, "--output", tmp_path / "few")
    assert "--scheme has no effect" in refusal(
        capsys, "quantize", model, *few, "--scheme", "w4-channel"
    )
    folder = saved(tmp_path / "gpt2", tokenizer, "GPT-2")
    assert "torchao quantises nothing" in refusal(capsys, "quantize", folder, *few)
    assert not (tmp_path / "few").exists()
