"""clearhead quantize --save: a folder that servers load, and how it refuses."""

import json

import pytest

from clearhead.records import manifest

from .conftest import call, refusal, saved, saved_llama


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
    ways = [json.loads((one / "generation_config.json").read_text()) for one in (llama, out)]
    assert ways[0] == ways[1]
    assert figures["versions"]["compressed-tensors"]
    assert "model.safetensors" in manifest.verify(out, advice="")["files"]
    assert "exists" in refusal(capsys, *words, "--scheme", scheme)
    assert "already quantised" in refusal(capsys, "quantize", out, *windows)
    assert call("generate", out, "attention", "--tokens", "3") == 0
    assert call("diagnose", out, *windows[:2], "--windows", "2", "--output", tmp_path / "d") == 0


def test_a_model_that_brings_code_is_saved(windows, tmp_path, capsys, tokenizer):
    pytest.importorskip("compressed_tensors")
    own, served, out = (tmp_path / name for name in ("own", "served", "out"))
    saved(own, tokenizer, epilogue="gate-headwise")
    assert call("convert", own, served, "--for", "serving") == 0
    words = ("quantize", served, *windows, "--scheme", "w8a8-token", "--save", out)
    assert "--trust-remote-code" in refusal(capsys, *words)
    assert call(*words, "--trust-remote-code") == 0
    assert "20 of 20 prompts" in " ".join(capsys.readouterr().out.split())


def test_requests_that_cannot_be_met(llama, model, windows, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    out = ("--save", tmp_path / "served")
    for words, said in (
        ((llama, "--scheme", "w8a8-coarse"), "cannot say w8a8-coarse: choose w8a8-static"),
        ((llama,), "found 1 and none"),
        ((llama, "--scheme", "w8a8-token", "w8a8-static"), "found 1 and 2"),
        ((llama, model, "--scheme", "w8a8-token"), "found 2 and 1"),
        ((llama, "--scheme", "w8a8-token", "--page", "p.html"), "--page has no effect"),
        ((model, "--scheme", "w8a8-token"), "--for serving` makes"),
        ((llama, "--scheme", "w4a16-group"), "no whole groups of 128"),
    ):
        assert said in refusal(capsys, "quantize", *words, *windows, *out)
    short = ("--length", "100000", "--tokens", "100000", "--scheme", "w8a8-static")
    assert "enough for one window" in refusal(capsys, "quantize", llama, *windows[:2], *short, *out)
    assert not (tmp_path / "served").exists()


def test_a_model_is_converted_for_servers_and_saved(windows, tmp_path, capsys, tokenizer):
    """A preset and a turned Llama leave as a plain Llama, and that in few bits."""
    pytest.importorskip("compressed_tensors")
    source = saved_llama(tmp_path / "llama", tokenizer, intermediate_size=64)
    turned, plain, out = (tmp_path / name for name in ("turned", "plain", "served"))
    assert call("convert", source, turned, "--rotate", "residual", "values") == 0
    assert call("convert", turned, plain, "--for", "serving") == 0
    assert json.loads((plain / "config.json").read_text())["model_type"] == "llama"
    words = ("quantize", plain, *windows, "--scheme", "w8a8-static", "--save", out)
    assert call(*words) == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"]
