"""The command line as a person uses it: what it answers, and how it refuses."""

import re
import sys
from pathlib import Path

import pytest

from clearhead.models import plan, preset

from .conftest import call, changed, refusal


def test_version_and_empty_call(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("clearhead 0.")
    assert call() == 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("tensorboard", "train --data.data none --track tensorboard"),
        ("wandb", "compare transformer --data.data none --track wandb"),
        ("peft", "train --from none --data.data none --train.lora 2"),
        ("peft", "compare --from none --data.data none --vary train.lora=0,4"),
        ("torchao", "quantize none --data.data none --deploy int8-dynamic-tensor --output new"),
        ("compressed-tensors", "quantize none --data.data none --scheme w8a8-token --save new"),
        ("lm-eval", "eval none --data.data none --tasks perplexity,lm_eval"),
    ],
)
def test_an_extra_that_is_not_there_is_named_before_any_model_or_text_is_opened(
    extra, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    modules = ("torch.utils.tensorboard", "wandb", "peft", "torchao", "lm_eval")
    for module in (*modules, "compressed_tensors"):
        monkeypatch.setitem(sys.modules, module, None)
    assert refusal(capsys, *words.split()).endswith(f"pip install 'clearhead[{extra}]'")
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_is_refused_before_any_model_or_text_is_opened(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    for words, said in (
        (("train", "--data.data", "none"), "already holds a run: go on with it by --resume"),
        (("train", "--from", "none", "--data.data", "none"), "already holds a run"),
        (("compare", "gpt2", "--data.data", "none"), "already holds a run"),
        (("quantize", "none", "--deploy", "int8-dynamic-tensor"), "exists: give a folder that"),
    ):
        assert said in refusal(capsys, *words, "--output", tmp_path)
    assert "exists: give a folder that does not" in refusal(capsys, "convert", "none", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean train?"),
        (["convert", "model", "new", "--to"], "--to is given without a value"),
        (["convert", "model", "new", "--rotate", "--to", "sink"], "--rotate is given without a v"),
        (["train", "--from", "m", "--train.only", "--output", "run"], "--train.only is given with"),
        (
            ["compare", "--train.tokens=9000", "--train.tokens", "8000"],
            "--train.tokens is given tw",
        ),
        (
            ["compare", "--train.document-masks", "--train.no-document_masks"],
            "--train.no-document-masks is given twice",
        ),
        (["generate", "no/model", "--tokens", "3", "--", "--tokens.a"], "from 'no/model'"),
        (["train", "transformer", "--size", "tinny"], "did you mean tiny?"),
        (["train", "--set", "maps=diferential"], "did you mean differential or differential-v2?"),
        (["train", "--set", "rope_parameters=" + "[" * 5000], "rope_parameters"),
        (["compare", "transformer", "--vary", "norm_eps=" + "[" * 5000], "norm_eps"),
        (["train", "--data.data", "missing.txt"], "missing.txt"),
        (["compare", "gpt2", "gpt2"], "each once"),
        (["compare", "--beside", "missing.jsonl"], "missing.jsonl"),
        (["eval", "nowhere/model", "--lengths", "1"], "lengths is (1,): give a whole number of at"),
        (["generate", "x", "--temprature", "1"], "--temprature, 1: did you mean --temperature?"),
        (["generate", "x", "--tokens", "a"], "Error parsing --tokens: invalid literal for int()"),
        (["generate"], "Missing from clearhead generate"),
        (["report"], "report needs one or more records: none is given"),
        (["eval", "nowhere/model", "--records", ""], "'' is no path"),
        (["train", "--output", ""], "'' is no path"),
        (["train", "--train.tokens", "9" * 23], "99: give a whole number of at most 18"),
        (["generate", "nowhere/model", "--temperature", "1e-320"], "0 or at least 0.0001"),
        (["eval", "nowhere/model", "--passkey.trials", "9" * 23], "passkey.trials is 99999"),
        (["plan", "transfomer"], "did you mean transformer?"),
        (["plan", "smollm2"], "unknown preset or folder 'smollm2'"),
        (["check", "./no-such-folder"], "no such folder"),
        (["check", "init:sink", "--attention", "sdpaa"], "none of sdpaa loads here"),
        (["reproduce"], "give a claim, a family, an experiment or all"),
        (["reproduce", "blocks", "--only", "sass"], "'sass' names none of the arms, which are tr"),
        (["reproduce", "encoders", "--questions", "rta"], "which are rte, banking77"),
        (["reproduce", "blocks", "--from", "m"], "no effect on transformer, which begins anew"),
        (["reproduce", "retrofit", "--scale", "paper"], "unknown scale of retrofit 'paper'"),
        (["reproduce", "diff/table22"], "did you mean diff/table2"),
        (["reproduce", "coca/bidirectional", "--scale", "paper"], "al has no arms at paper"),
    ],
)
def test_refusals_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *words)
    assert list(tmp_path.iterdir()) == [], "a refused request leaves nothing behind"


def test_a_corpus_smaller_than_a_batch_is_refused(capsys, tmp_path, settings):
    words = changed(settings, "--train.batch-size", "100000", "--train.tokens", "10000000")
    assert "batch" in refusal(capsys, "train", *words, "--output", tmp_path / "run")


def test_plan_names_the_shape(capsys):
    assert "choose one of" in refusal(capsys, "plan", "transformer", "--size", "0.35b")
    shape = ["hidden_size=256", "num_hidden_layers=4", "num_attention_heads=8"]
    assert call("plan", "transformer", "--set", *shape, "--gpus", "1", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"transformer, {', '.join(shape)}\n")
    assert re.search(r"^ *gradients +0 bytes +0 bytes$", out, re.MULTILINE)
    assert re.search(r"1 x cpu +[\d.,]+ +[\d.,]+ \w+ +(yes|no)\n", out)


def test_plan_counts_the_positions_that_training_gives_a_preset(capsys):
    assert call("plan", "gpt2", "--train.sequence-length", "320", "--gpu", "h200") == 0
    found = int(capsys.readouterr().out.split(" parameters")[0].split()[-1].replace(",", ""))
    assert found == plan(preset("gpt2", max_position_embeddings=320)).parameters
    words = ("--set", "max_position_embeddings=64", "--train.sequence-length", "65")
    assert "64 learned positions" in refusal(capsys, "plan", "gpt2", *words)


def test_plan_tells_the_bill_of_a_run_and_of_a_checkpoint_in_80_columns(
    capsys, trained, monkeypatch
):
    monkeypatch.chdir(trained.parent)
    run = Path(trained.name)  # a longer name would be a longer line
    words = ("--train.tokens", "512000", "--gpu", "h200")
    assert call("plan", run, run / "final", *words) == 0
    out = capsys.readouterr().out
    assert out.count(" parameters, ") == out.count("1 x h200") == 2
    assert "512,000 tokens in " in out
    assert call("plan", "--size", "diff-13.1b") == 0
    out += capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "13,103,354,880" in out
    assert "leave --size and --set out" in refusal(capsys, "plan", run, "--size", "small")


def test_texts_beyond_learned_positions_are_refused_beforehand(capsys, tmp_path, settings):
    run = tmp_path / "run"
    shape = ["--set", "position=learned", "hidden_size=24", "num_hidden_layers=2"]
    words = [*settings, "--output", str(run), *shape]
    for verb in ("train", "compare"):
        refused = refusal(capsys, verb, "sas", *words, "max_position_embeddings=8")
        assert "has 8 learned positions, too few for 16 tokens" in refused
        assert not run.exists()
    assert call("train", "sas", *words, "max_position_embeddings=16") == 0
    refused = refusal(capsys, "generate", run, "attention", "--tokens", "50")
    limit, read = re.findall(r"(\d+) learned positions, too few for (\d+)", refused)[0]
    room = 50 - (int(read) - int(limit))
    assert call("generate", run, "attention", "--tokens", room) == 0
    refused = refusal(capsys, "generate", run, "attention", "--tokens", f"{room + 1}")
    assert "shorten the prompt" in refused
