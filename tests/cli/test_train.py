"""Training from the command line: presets, and runs that go on."""

import json
import shlex
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from tests_architectures import takes_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer

from clearhead.cli import options, train
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.records.files import hold_folder
from clearhead.records.identity import canonical, restored
from clearhead.report import load

from .conftest import call, changed, lines_of, refusal, rewritten, saved, weights_of

SHAPE = ("hidden_size=24", "num_hidden_layers=2", "num_attention_heads=2")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "sas-p --size small --set norm=layernorm mlp_gain=0.5 --output a/b --train.tokens 9999",
        "bert --train.document-masks --train.betas 0.8 0.9 --data.data a 'b c@0.5' --data.limit 7",
        "sink --from my/model --set 'layer_overrides=[{}]' --train.only '*attn*' --train.lora 4",
        "--from x --train.optimizer muon --train.adamw-patterns a b --track tensorboard",
    ],
)
def test_settings_come_back_from_their_json(words):
    read = shlex.split(words)
    command = options.parse(train, read, default=train.default(read))
    assert restored(train.Command, canonical(command)) == command


def test_resume_needs_no_other_option(going_on, tmp_path, stopping, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["train", "gated", "--set", *SHAPE, *going_on, "--data.vocabulary", "300"]
    assert call(*words, "--output", whole) == 0
    stopping(3)
    assert call(*words, "--output", cut) == 128 + signal.SIGTERM
    assert f"go on by --resume {cut}" in capsys.readouterr().err
    assert f"go on with it by --resume {cut}" in refusal(capsys, *words, "--output", cut)
    resume = ("train", "--resume", str(cut))
    for other in (
        ("--train.learning-rate", "0.5"),
        ("--set", "hidden_size=48"),
        ("--output", str(tmp_path / "other")),
        ("--data.vocabulary", "400"),
    ):
        assert f"leave out {other[0]}, or start another" in refusal(capsys, *resume, *other)
    assert "leave out preset" in refusal(capsys, "train", "sink", *resume[1:])
    with hold_folder(cut):
        assert call(*resume) == 2
    (line,) = capsys.readouterr().err.splitlines()  # without one on the text
    assert f"{cut} is in use by process" in line
    assert call(*resume, "--train.save-every", "1", "--train.keep", "9") == 0
    assert weights_of(cut) == weights_of(whole)
    assert len(list((cut / "checkpoints").iterdir())) == 2
    final = (cut / "final/model.safetensors").stat()
    assert call(*resume) == 0  # as after a kill between its end and ours
    assert "is finished" in capsys.readouterr().err
    assert (cut / "final/model.safetensors").stat() == final
    assert "holds no run to resume" in refusal(capsys, "train", "--resume", tmp_path / "no")


@pytest.mark.parametrize("kind", ["text", "tokenizer", "from"])
def test_a_run_goes_on_where_what_it_began_with_lies_elsewhere(
    kind, source, going_on, tokenizer, tmp_path, stopping, monkeypatch, capsys
):
    """The content decides: other content is refused, by both names."""
    place = going_on.index("--data.data") + 1
    first, moved, whole, cut = (tmp_path / name for name in ("first", "moved", "whole", "cut"))
    words, option = ["train", *going_on], "--data.data"
    if kind == "text":
        shutil.copytree(going_on[place], first)
        words += ["gated", "--set", *SHAPE, "--data.vocabulary", "300"]
        monkeypatch.chdir(tmp_path)
        words[place + 1] = "first"  # relative to a folder that is another on resumption
    elif kind == "tokenizer":
        option = "--data.tokenizer"
        tokenizer.save_pretrained(first)
        words += ["gated", "--set", *SHAPE, option, str(first)]
    else:
        option = "--from"
        shutil.copytree(source, first)
        words += [option, str(first)]
    assert call(*words, "--output", whole) == 0
    stopping(3)
    assert call(*words, "--output", cut) == 128 + signal.SIGTERM
    first.rename(moved)
    monkeypatch.chdir("/")
    resume = ("train", "--resume", str(cut), option)
    other = tmp_path / "other"
    shutil.copytree(moved, other)
    if kind == "text":
        (other / "more.txt").write_text("another text", "utf-8")
    elif kind == "tokenizer":
        changed = AutoTokenizer.from_pretrained(other)
        changed.add_tokens(["another"])
        changed.save_pretrained(other)
    else:
        rewritten(other, lambda weights: weights["model.norm.weight"].mul_(2))
    capsys.readouterr()
    said = refusal(capsys, *resume, other)
    named = {"text": (str(other),), "from": (str(other), str(first))}
    assert all(name in said for name in named.get(kind, ("the tokenizer changed since",)))
    assert call(*resume, moved) == 0
    assert weights_of(cut) == weights_of(whole)


def test_a_run_of_another_verb_or_version_is_resumed_by_its_own_command(settings, tmp_path, capsys):
    words = ["transformer", "--set", *SHAPE, *settings, "--output"]
    assert call("compare", *words, tmp_path / "out", "--lengths", "1") == 0
    assert call("train", *words, tmp_path / "run") == 0
    path = tmp_path / "run/run.json"
    record = json.loads(path.read_text())
    del record["description"]["job"]
    path.write_text(json.dumps(record))
    said = refusal(capsys, "train", *words, tmp_path / "out")
    assert "out holds the runs of another verb" in said
    for run in (tmp_path / "out/transformer-seed0", path.parent):
        told = refusal(capsys, "train", "--resume", run)
        command = json.loads((run / "run.json").read_text())["command"]
        assert "is not of this version's clearhead train" in told
        assert f"give its own command again, {command!r}" in told


def test_a_vocabulary_without_room_is_refused_before_its_run_begins(settings, tmp_path, capsys):
    words = [*settings, "--set", "vocab_size=100", "--output", str(tmp_path / "run")]
    said = refusal(capsys, "train", "gpt2", *words)
    assert "vocab_size is 100, and the tokenizer has 300 ids" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--train.only", "*attn*", "--train.optimizer", "muon"),
        ("softmax1", "--train.lora", "2", "--set", "annealed_start=true"),
    ],
    ids=lambda more: " ".join(more[:2]),
)
def test_any_model_goes_on_and_a_stopped_run_ends_in_the_same_bits(
    source, going_on, more, tmp_path, stopping, capsys
):
    if "--train.lora" in more and not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    words = ["train", *more, "--from", str(source), *going_on]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert call(*words, "--output", whole) == 0
    stopping(3)
    assert call(*words, "--output", cut) == 128 + signal.SIGTERM
    assert call("train", "--resume", cut) == 0
    assert "Writing model shards" not in capsys.readouterr().err
    assert weights_of(cut) == weights_of(whole)
    record = json.loads((whole / "run.json").read_text("utf-8"))
    assert record["description"]["from"]["name"] == str(source)
    assert record["config"]["learning_rate"] == 3e-5
    model = AutoModelForCausalLM.from_pretrained(whole / "final")
    kind = "LlamaForCausalLM" if "--train.only" in more else "ClearheadForCausalLM"
    assert type(model).__name__ == kind
    started = load_file(source / "model.safetensors")
    found = load_file(whole / "final/model.safetensors")
    frozen = {key for key in started if key in found and torch.equal(found[key], started[key])}
    if "--train.only" in more:
        assert frozen == {key for key in started if "attn" not in key}
    if "--train.lora" in more:
        for alone in (next((whole / "checkpoints").iterdir()), whole / "final/adapter"):
            said = refusal(capsys, "generate", alone, "key")
            assert "open RUN/final, where they are merged" in said
    assert call("generate", whole, "key", "--tokens", "2") == 0


def test_adapters_of_other_weights_are_not_gone_on_with(
    source, going_on, tmp_path, stopping, capsys
):
    if not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    words = ["train", "--from", source, *going_on, "--train.lora", "2"]
    stopping(3)
    assert call(*words, "--output", tmp_path / "run") == 128 + signal.SIGTERM
    rewritten(source, lambda weights: weights["model.norm.weight"].mul_(2))
    said = refusal(capsys, "train", "--resume", tmp_path / "run")
    assert "has other weights than the run in" in said


def test_text_that_changed_since_a_run_began_is_refused_before_it_is_tokenised(
    source, going_on, text, tmp_path, stopping, monkeypatch, capsys
):
    own, cache = tmp_path / "own", tmp_path / "cache"
    shutil.copytree(text, own)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    base = ["--from", str(source), *changed(going_on, "--data.data", str(own))]
    train = ["train", *base, "--output", str(tmp_path / "run")]
    compare = ["compare", "transformer", *base, "--output", str(tmp_path / "out")]
    compare += ["--lengths", "1", "--evaluation-tokens", "64"]
    done = [*changed(compare, "--output", str(tmp_path / "done"))]
    assert call(*done) == 0
    for words in (train, compare):
        stopping(3)
        assert call(*words) == 128 + signal.SIGTERM
    (own / "00.txt").write_text("attention noise sink " * 300)
    for words in (["train", "--resume", str(tmp_path / "run")], compare, done):
        said = refusal(capsys, *words)
        assert f"data {own}: the text or the tokenizer changed since the run began" in said
    assert len(list((cache / "corpora").iterdir())) == 1


def test_arms_start_from_one_model(source, going_on, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", "transformer", "gated", "--from", str(source), *going_on]
    words += ["--lengths", "1", "--evaluation-tokens", "64", "--output", str(out)]
    still = [*words, "--train.learning-rate", "1e-12", "--vary", 'train.only=[],["*attn*"]']
    assert call(*still) == 0
    lines = lines_of(out)
    headers = [line for line in lines if line["kind"] == "run"]
    assert [line["model"]["model_type"] for line in headers] == ["llama"] * 2 + ["clearhead"] * 2
    assert headers[0]["non_embedding_parameters"] == headers[0]["parameters"] - 300 * 32
    assert headers[2]["parameters"] == headers[0]["parameters"] + 2 * 32 * 32  # gates
    assert {line["from"]["name"] for line in headers} == {str(source)}
    # Hardly trained, and put on exactly: all are the model that they started from.
    measured = [x["value"] for x in lines if x.get("metric") == "perplexity"]
    assert measured == [pytest.approx(measured[0], rel=1e-4)] * 4
    assert call(*still) == 0
    assert "already done" in capsys.readouterr().err
    rewritten(source, lambda weights: weights["model.norm.weight"].mul_(2))
    assert "from.parameters was" in refusal(capsys, *still)
    other = tmp_path / "other"
    for more, said in (
        (["--set", "num_hidden_layers=1"], "num_hidden_layers is a size of the model's weights"),
        (["--set", "direction=bidirectional"], "transformer: "),
        (["--vary", "normalizer=sink,sinks"], "did you mean sink"),
    ):
        assert said in refusal(capsys, *words[:-1], other, *more)
        assert not (other / "records.jsonl").exists()


def test_sinks_too_low_to_be_trained_are_said(source, going_on, tmp_path, capsys):
    out = ["--from", str(source), *going_on, "--output"]
    measured = ["--lengths", "1", "--evaluation-tokens", "64"]
    annealed = ["--set", "annealed_start=true"]
    for number, (words, said) in enumerate(
        (
            (["train", "sink", *out], True),
            (["train", "sink", *annealed, *out], False),
            (["compare", "gated", "sink", *measured, *out], True),
        )
    ):
        assert call(*words, tmp_path / str(number)) == 0
        told = " ".join("".join(capsys.readouterr()).split())
        wanted = "the sinks rest at -40, where training hardly moves them: give --set annealed_st"
        assert (wanted in told) == said, words
    weights = load_file(tmp_path / "0/final/model.safetensors")
    logit = weights["model.layers.0.self_attn.normalizer.logit"]
    assert torch.equal(logit, torch.full_like(logit, -40.0))


def test_what_cannot_go_on_is_refused_in_a_line(
    source, going_on, tmp_path, tokenizer, text, capsys
):
    short, full = (
        saved(tmp_path / f"{positions}", tokenizer, "GPT-2", max_position_embeddings=positions)
        for positions in (8, 16)
    )
    larger = shutil.copytree(source, tmp_path / "larger")
    many = train_tokenizer([path.read_text("utf-8") for path in text.iterdir()] * 9, 340)
    many.save_pretrained(larger)
    out = ["--output", str(tmp_path / "run")]
    for words, said in (
        (["--from", str(source), "--data.vocabulary", "400"], "data.vocabulary has no effect"),
        (["--from", str(short)], "has 8 learned positions, too few for 16 tokens"),
        (["key-value", "--from", str(full)], "has 15 learned positions"),
        (["gated", "--from", str(source), "--train.only", "x"], "the pattern 'x' decides no"),
        (["--from", source, "--train.document-masks"], "LlamaForCausalLM takes no document_ids"),
        (["--from", str(larger)], "restore its own"),
    ):
        assert said in refusal(capsys, "train", *words, *going_on, *out), words
    assert not (tmp_path / "run").exists()


def test_only_a_lone_run_has_the_dropout_of_its_class(going_on, tokenizer, tmp_path, capsys):
    own = {"attn_pdrop": 0.5, "initializer_range": 0.02}
    words = ["--from", saved(tmp_path / "source", tokenizer, "GPT-2", **own), *going_on]
    small = ["--lengths", "1", "--evaluation-tokens", "64", "--output", tmp_path / "arms"]
    assert call("compare", "transformer", "differential-v2", *words, *small) == 0
    said = capsys.readouterr().err
    assert "attn_pdrop=0.5, embd_pdrop=0.1, resid_pdrop=0.1: left out of every arm" in said
    one, other = (run.steps[0]["loss"] for run in load(tmp_path / "arms/records.jsonl").runs)
    assert abs(one - other) < 1e-5  # the same function still

    assert call("train", *words, "--output", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run/final/config.json").read_text("utf-8"))
    assert config["attn_pdrop"] == 0.5
