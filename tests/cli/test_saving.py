"""clearhead quantize --save and --deploy: what is saved, that it runs, and how they refuse."""

import json
import sys
from pathlib import Path

import pytest

from clearhead.records import manifest

from .conftest import call, refusal, saved, saved_llama

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


def test_requests_that_cannot_be_met(llama, model, windows, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    served, out = ("--save", tmp_path / "few"), ("--output", tmp_path / "few")
    short = ("--length", "100000", "--tokens", "100000", "--scheme", "w8a8-static")
    for words, said in (
        ((*served, llama, "--scheme", "w8a8-coarse"), "cannot say w8a8-coarse: choose w8a8-static"),
        ((*served, llama, "--scheme", "kv8"), "cannot say kv8: choose w8a8-token"),
        ((*served, llama), "found 1 and none"),
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
    """Two at once: tests/cli/test_repair_tutorial.py."""
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
    assert "loaded and run by a new process" in shown
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


def test_what_is_not_deployed(model, windows, tmp_path, capsys, tokenizer, monkeypatch):
    pytest.importorskip("torchao")
    few = (*windows, *FORM, "--output", tmp_path / "few")
    assert "--scheme has no effect" in refusal(
        capsys, "quantize", model, *few, "--scheme", "w4-channel"
    )
    folder = saved(tmp_path / "gpt2", tokenizer, "GPT-2")
    assert "torchao quantises nothing" in refusal(capsys, "quantize", folder, *few)
    assert not (tmp_path / "few").exists()
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert "clearhead[torchao]" in refusal(capsys, "quantize", model, *few)
