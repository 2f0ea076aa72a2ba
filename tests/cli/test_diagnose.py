"""clearhead diagnose, on models that transformers saved, and clearhead check."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from clearhead.lab.sweep_configs import short_names
from tests.diagnose.test_attention_check import broken

from .conftest import call, data_of, lines_of, refusal, rewritten, save, saved


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder of tiny checkpoints, each with the tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind, size in (
        ("ours", "differential", len(tokenizer)),
        ("gpt2", "GPT-2", len(tokenizer)),
        ("small", "GPT-2", 50),
        ("bert", "BERT", len(tokenizer)),
    ):
        saved(folder / name, tokenizer, kind, vocab_size=size, max_position_embeddings=32)
    t5 = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    save(folder / "t5", T5ForConditionalGeneration(t5), tokenizer)
    return folder


@pytest.fixture
def words(text: Path, cache: Path, tmp_path: Path) -> list[str]:
    return [*data_of(text, cache), "--windows", "3", "--output", str(tmp_path / "out")]


def test_two_models_side_by_side(models, words, tmp_path, capsys):
    assert call("diagnose", models / "ours", models / "gpt2", *words) == 0
    out = capsys.readouterr().out
    assert "ours" in out
    assert "largest hidden number, in medians" in out
    lines = lines_of(tmp_path / "out", "diagnosis.jsonl")
    headers = [line for line in lines if line["kind"] == "run"]
    assert [line["run"] for line in headers] == ["ours", "gpt2"]
    assert headers[0]["length"] == 32  # what the model was made for
    assert headers[0]["windows"] == 3
    notes = {(line["run"], line["part"]) for line in lines if line["kind"] == "note"}
    assert notes == {("gpt2", "order of rotary positions")}
    page = (tmp_path / "out/diagnosis.html").read_text("utf-8")
    again = ("report", tmp_path / "out/diagnosis.jsonl", "--output", tmp_path / "again.html")
    assert call(*again) == 0
    assert (tmp_path / "again.html").read_text("utf-8") == page


def test_a_model_without_numbers_is_not_called_sound(models, words, tokenizer, tmp_path, capsys):
    folder = shutil.copytree(models / "gpt2", tmp_path / "nan")
    rewritten(folder, lambda w: w["transformer.h.1.mlp.c_fc.weight"][0, :1].fill_(torch.nan))
    assert call("diagnose", models / "gpt2", tmp_path / "nan", *words) == 1
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert "Not finite: hidden states or logits in nan." in shown
    assert "No sink, no massive activations in gpt2." in shown
    assert "some numbers are not finite" in err


def test_a_model_whose_tokenizer_has_no_end_token(models, words, tmp_path):
    folder = shutil.copytree(models / "gpt2", tmp_path / "open")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token": None}))
    assert call("diagnose", folder, *words, "--length", "16") == 0
    header, *_ = lines_of(tmp_path / "out", "diagnosis.jsonl")
    assert header["data"]["tokenizer"]["end"] is None


def test_a_preset_at_initialisation_at_any_depth(models, words, tmp_path, capsys):
    """Beside a trained model, which has its own tokenizer."""
    shape = ["hidden_size=24", "num_attention_heads=2", "num_hidden_layers=5"]
    options = ["--set", *shape, "--data.vocabulary", "300"]
    both = ("init:transformer", models / "gpt2")
    assert call("diagnose", *both, *words, *options, "--length", "16") == 0
    refused = refusal(capsys, "diagnose", models / "gpt2", *words, "--data.vocabulary", "300")
    assert "data.vocabulary has no effect" in refused
    lines = lines_of(tmp_path / "out", "diagnosis.jsonl")
    own = [x for x in lines if x["run"] == "init:transformer"]
    layers = [x["layer"] for x in own if x.get("metric") == "similarity"]
    assert layers == [-1, 0, 1, 2, 3, 4]
    assert not [x for x in own if x["kind"] == "note"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["t5"], [], "is an encoder-decoder (t5)"),
        (["small"], [], "use the tokenizer that the model was trained with"),
        (["gpt2"], ["--length", "9999"], "enough for one window of 9999"),
        (["gpt2"], ["--length", "40"], "the model has 32 learned positions"),
        (["gpt2", "bert", "ours"], [], "one model or two side by side"),
        (["gpt2", "init:transformr"], [], "did you mean transformer?"),
        (["gpt2"], ["--set", "n_layer=3"], "--set has no effect"),
    ],
)
def test_refusals_in_one_line_and_nothing_written(
    names, options, message, models, words, tmp_path, capsys
):
    folders = (name if ":" in name else models / name for name in names)
    assert message in refusal(capsys, "diagnose", *folders, *words, *options)
    assert not (tmp_path / "out").exists()


def test_names_are_short_and_different(tmp_path, monkeypatch):
    (tmp_path / "run" / "final").mkdir(parents=True)
    for folder, names in (("run/final", ["run"]), ("run", ["run"])):
        monkeypatch.chdir(tmp_path / folder)
        assert short_names((".",)) == names
    assert short_names(("final/..",)) == ["run"]
    assert short_names(("runs/a/final",)) == ["a"]
    assert short_names(("x/a", "init:x/a")) == ["a", "init:a"]
    assert short_names(("x/a", "y/a")) == ["x/a", "y/a"]


# clearhead check


def test_a_model_of_transformers_and_a_broken_implementation(llama, capsys):
    broken("no-padding", "padding")
    words = ("--attention", "sdpa", "no-padding", "--timed", "0")
    assert call("check", llama, *words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM in float32, beside eager attention in float64"
    assert lines[1] == "sdpa: right: plain, padded, packed, cached, chunks"
    assert lines[2].startswith("no-padding: right: plain, cached, chunks; WRONG: padded (")


def test_a_preset_with_changes(capsys):
    shape = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=90")
    assert call("check", "init:sink", "--set", *shape, "sliding_window=9", "--timed", 0) == 0
    out = capsys.readouterr().out
    assert "sdpa: right: plain, sinks of 20, padded, packed, cached, chunks, windowed" in out
    assert "clearhead: does not load here (left out: a model of ours has the same" in out
