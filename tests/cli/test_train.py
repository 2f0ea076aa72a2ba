"""Training from the command line: a preset, a trained model, and runs that go on."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_architectures import takes_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from clearhead.cli.options import given
from clearhead.cli.train import Command, _parse, _usual
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.experiments.jobs import words_of
from clearhead.records.identity import canonical, restored
from clearhead.records.lock import hold_folder
from clearhead.train import MetricsFile, StepMetrics

from .conftest import call, changed, refusal, saved_llama

SHAPE = ("hidden_size=24", "num_hidden_layers=2", "num_attention_heads=2")
VOLATILE = ("date", "threads", "device")


def _weights(run: Path) -> bytes:
    return (run / "final/model.safetensors").read_bytes()


def _record(run: Path) -> dict[str, Any]:
    record = json.loads((run / "run.json").read_text("utf-8"))
    return {key: value for key, value in record.items() if key not in VOLATILE}


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """stopping(n) sends SIGTERM, once, as soon as n steps are done."""

    def at(step: int) -> None:
        sent: list[int] = []
        real = MetricsFile.step

        def told(self: Any, metrics: StepMetrics) -> None:
            real(self, metrics)
            if metrics.step == step and not sent:
                sent.append(step)
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(MetricsFile, "step", told)

    return at


@pytest.fixture
def tokenizer(text: Path) -> Any:
    return train_tokenizer([path.read_text("utf-8") for path in text.iterdir()], 300)


@pytest.fixture
def llama(tmp_path: Path, tokenizer: Any) -> Path:
    """A folder of another library's model: 4 query heads, 2 key heads."""
    return saved_llama(tmp_path / "llama", tokenizer, tie_word_embeddings=True)


@pytest.fixture
def going_on(settings: list[str], text: Path) -> list[str]:
    """Options of a run of four steps, without those of a tokenizer."""
    return [
        *("--data.data", str(text), "--data.validation", "0.1", "--train.tokens", "128"),
        *("--train.sequence-length", "16", "--train.batch-size", "2", "--train.precision", "fp32"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "sas-p --size small --set norm=layernorm mlp_gain=0.5 --output a/b --train.tokens 9999",
        "--train.document-masks --train.betas 0.8 0.9 --data.data a 'b c@0.5' --data.limit 7",
        "bert --train.schedule linear --train.momentum None",
        "sink --from my/model --set 'layer_overrides=[{}]' --train.only '*attn*' --train.lora 4",
        "--from x --train.optimizer muon --train.adamw-patterns a b --track wandb tensorboard",
    ],
)
def test_a_command_is_written_as_it_is_read(words, monkeypatch):
    monkeypatch.setattr("clearhead.cli.options.require_extras", lambda *_: None)
    read = shlex.split(words)
    usual = _usual(given(read, "--from"))
    command = _parse(read, usual)
    written = words_of(command, usual)
    assert _parse(written, usual) == command
    assert len(written) <= len(read)
    assert restored(Command, canonical(command)) == command


def test_values_that_look_like_others_are_written_so_that_they_come_back():
    odd = Command(set={"a": "true", "b": "x,y", "c": [1, "2"], "d": None, "e": "plain"})
    written = words_of(odd, Command())
    assert _parse(written, Command()).set == odd.set
    assert words_of(odd, odd) == []


def test_the_command_of_a_run_makes_it_again(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["softmax1", "--set", *SHAPE, "annealed_start=true", *settings, "--train.clip", "0.5"]
    assert call("train", *words, "--output", "run") == 0
    first = _record(tmp_path / "run")
    weights = _weights(tmp_path / "run")
    shutil.rmtree("run")
    program, *pasted = shlex.split(first["command"])
    assert program == "clearhead"
    assert call(*pasted) == 0
    assert _record(tmp_path / "run") == first
    assert _weights(tmp_path / "run") == weights


def test_resume_needs_no_other_option(going_on, tmp_path, stopping, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["train", "gated", "--set", *SHAPE, *going_on, "--data.vocabulary", "300"]
    assert call(*words, "--output", str(whole)) == 0
    stopping(3)
    assert call(*words, "--output", str(cut)) == 128 + signal.SIGTERM
    assert f"go on by --resume {cut}" in capsys.readouterr().err
    assert f"go on with it by --resume {cut}" in refusal(capsys, *words, "--output", str(cut))
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
    assert _weights(cut) == _weights(whole)
    assert len(list((cut / "checkpoints").iterdir())) == 2
    final = (cut / "final/model.safetensors").stat()
    assert call(*resume) == 0  # as after a kill between its end and ours
    assert "is finished" in capsys.readouterr().err
    assert (cut / "final/model.safetensors").stat() == final
    assert "holds no run to resume" in refusal(capsys, "train", "--resume", str(tmp_path / "no"))


@pytest.mark.parametrize("kind", ["text", "tokenizer", "from"])
def test_a_run_goes_on_where_what_it_began_with_lies_elsewhere(
    kind, llama, going_on, tokenizer, tmp_path, stopping, monkeypatch, capsys
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
        shutil.copytree(llama, first)
        words += [option, str(first)]
    assert call(*words, "--output", str(whole)) == 0
    stopping(3)
    assert call(*words, "--output", str(cut)) == 128 + signal.SIGTERM
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
        weights = load_file(other / "model.safetensors")
        weights = {key: 2 * weight for key, weight in weights.items()}
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    said = refusal(capsys, *resume, str(other))
    named = {"text": (str(other),), "from": (str(other), str(first))}
    assert all(name in said for name in named.get(kind, ("the tokenizer changed since",)))
    assert call(*resume, str(moved)) == 0
    assert _weights(cut) == _weights(whole)
    assert str(moved) in _record(cut)["command"]


def test_a_finished_run_is_extended_and_its_command_says_so(settings, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "--set", *SHAPE, *settings, "--output", str(run)]
    assert call(*words) == 0
    before = _weights(run)
    assert call("train", "--resume", str(run), "--train.tokens", "160") == 0
    said = capsys.readouterr().err
    assert "after the 64 of its schedule the learning rate stays at 0.0001 " in said
    assert (run / "final-00000002/model.safetensors").read_bytes() == before
    assert call("train", "--resume", str(run), "--train.tokens", "192") == 0
    extended, weights = _record(run), _weights(run)
    assert (extended["config"]["tokens"], extended["config"]["schedule_tokens"]) == (192, 64)
    assert [resumed["step"] for resumed in extended["resumed"]] == [2, 5]
    shutil.rmtree(run)
    assert call(*shlex.split(extended["command"])[1:]) == 0
    assert _weights(run) == weights
    assert _record(run)["config"] == extended["config"]


def test_a_run_of_another_verb_or_version_is_resumed_by_its_own_command(settings, tmp_path, capsys):
    words = ["transformer", "--set", *SHAPE, *settings, "--output"]
    assert call("compare", *words, str(tmp_path / "out"), "--lengths", "1") == 0
    assert call("train", *words, str(tmp_path / "run")) == 0
    path = tmp_path / "run/run.json"
    record = json.loads(path.read_text())
    del record["description"]["job"]
    path.write_text(json.dumps(record))
    said = refusal(capsys, "train", *words, str(tmp_path / "out"))
    assert "out holds the runs of a comparison or a fine-tuning: choose another" in said
    for run in (tmp_path / "out/transformer-seed0", path.parent):
        told = refusal(capsys, "train", "--resume", str(run))
        command = json.loads((run / "run.json").read_text())["command"]
        assert "was not begun by clearhead train, or by an earlier version" in told
        assert f"give its own command again, {command!r}" in told


def test_of_several_processes_the_first_of_a_machine_refuses_a_request(
    settings, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    assert call("train", "--set", *SHAPE, *settings, "--output", str(run)) == 0
    wrong = (
        ("train", "--resume", str(run), "--train.learning-rate", "0.5"),
        ("train", "--train.tokens", "many"),
        ("compare", "--beside", str(tmp_path / "none.jsonl")),
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        capsys.readouterr()
        assert [call(*words) for words in wrong] == [2, 2, 2]
        assert len(capsys.readouterr().err.splitlines()) == (3 if rank == "0" else 0)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--train.only", "*attn*", "--train.optimizer", "muon"),
        ("gated", "--set", "normalizer=sink", "annealed_start=true"),
        ("--train.lora", "2"),
        ("softmax1", "--train.lora", "2", "--set", "annealed_start=true"),
    ],
    ids=lambda more: " ".join(more[:2]),
)
def test_any_model_goes_on_and_a_stopped_run_ends_in_the_same_bits(
    llama, going_on, more, tmp_path, stopping, capsys
):
    if "--train.lora" in more and not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    words = ["train", *more, "--from", str(llama), *going_on]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert call(*words, "--output", str(whole)) == 0
    stopping(3)
    assert call(*words, "--output", str(cut)) == 128 + signal.SIGTERM
    assert call("train", "--resume", str(cut)) == 0
    assert "Writing model shards" not in capsys.readouterr().err
    assert _weights(cut) == _weights(whole)
    record = _record(whole)
    assert record["description"]["from"]["name"] == str(llama)
    assert record["config"]["learning_rate"] == 3e-5
    model = AutoModelForCausalLM.from_pretrained(whole / "final")
    kind = "LlamaForCausalLM" if more == () or more[0][0] == "-" else "ClearheadForCausalLM"
    assert type(model).__name__ == kind
    started = load_file(llama / "model.safetensors")
    found = load_file(whole / "final/model.safetensors")
    frozen = {key for key in started if key in found and torch.equal(found[key], started[key])}
    if "--train.only" in more:
        assert frozen == {key for key in started if "attn" not in key}
    if "--train.lora" in more:
        for alone in (next((whole / "checkpoints").iterdir()), whole / "final/adapter"):
            said = refusal(capsys, "generate", str(alone), "key")
            assert "open RUN/final, where they are merged" in said
    # The model of the run is one for every verb, and for another run.
    assert call("generate", str(whole), "key", "--tokens", "2") == 0
    again = ["train", "--from", str(whole), *going_on, "--output", str(tmp_path / "again")]
    assert call(*again) == 0


def test_a_preset_is_put_on_before_the_first_step(llama, going_on, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "coca", "--from", str(llama), *going_on, "--output", str(run)]
    assert call(*words, "--train.learning-rate", "1e-12") == 0
    assert _record(run)["model"]["scores"] == "coca"
    found = load_file(run / "final/model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    theirs = load_file(llama / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    assert found.shape[0] == theirs.shape[0] // 2
    halves = theirs.unflatten(0, (2, 2, 4)).mean(1).flatten(0, 1)
    assert torch.allclose(found, halves, atol=1e-6)


def test_adapters_of_other_weights_are_not_gone_on_with(
    llama, going_on, tmp_path, stopping, capsys
):
    if not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    run = tmp_path / "run"
    stopping(3)
    words = ["train", "--from", str(llama), *going_on, "--train.lora", "2", "--output", str(run)]
    assert call(*words) == 128 + signal.SIGTERM
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    said = refusal(capsys, "generate", str(checkpoint), "key")
    assert "holds adapters alone, no model: open RUN/final" in said
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(llama)
    assert "has other weights than the run in" in refusal(capsys, "train", "--resume", str(run))


def test_text_that_changed_since_a_run_began_is_refused_before_it_is_tokenised(
    llama, going_on, text, tmp_path, stopping, monkeypatch, capsys
):
    own, cache = tmp_path / "own", tmp_path / "cache"
    shutil.copytree(text, own)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    base = ["--from", str(llama), *changed(going_on, "--data.data", str(own))]
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


def test_arms_start_from_one_model(llama, going_on, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", "transformer", "gated", "--from", str(llama), *going_on]
    words += ["--lengths", "1", "--evaluation-tokens", "64", "--output", str(out)]
    still = [*words, "--train.learning-rate", "1e-12", "--vary", 'train.only=[],["*attn*"]']
    assert call(*still) == 0
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    headers = [line for line in lines if line["kind"] == "run"]
    assert [line["model"]["model_type"] for line in headers] == ["llama"] * 2 + ["clearhead"] * 2
    assert headers[0]["non_embedding_parameters"] == headers[0]["parameters"] - 300 * 32
    assert headers[2]["parameters"] == headers[0]["parameters"] + 2 * 32 * 32  # gates
    assert {line["from"]["name"] for line in headers} == {str(llama)}
    # Hardly trained, and put on exactly: all are the model that they started from.
    measured = [x["value"] for x in lines if x.get("metric") == "perplexity"]
    assert measured == [pytest.approx(measured[0], rel=1e-4)] * 4
    assert call(*still) == 0
    assert "already done" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(llama)
    assert "from.parameters was" in refusal(capsys, *still)
    other = tmp_path / "other"
    for more, said in (
        (["--set", "num_hidden_layers=1"], "num_hidden_layers is a size of the model's weights"),
        (["--set", "direction=bidirectional"], "transformer: "),
        (["--vary", "normalizer=sink,sinks"], "did you mean sink"),
    ):
        assert said in refusal(capsys, *words[:-1], str(other), *more)
        assert not (other / "records.jsonl").exists()


def test_sinks_too_low_to_be_trained_are_said(llama, going_on, tmp_path, capsys):
    out = ["--from", str(llama), *going_on, "--output"]
    measured = ["--lengths", "1", "--evaluation-tokens", "64"]
    annealed = ["--set", "annealed_start=true"]
    for number, (words, said) in enumerate(
        (
            (["train", "sink", *out], True),
            (["train", "sink", *annealed, *out], False),
            (["train", "sink", "--train.freeze", "*.normalizer.*", *out], False),
            (["compare", "gated", "sink", *measured, *out], True),
        )
    ):
        assert call(*words, str(tmp_path / str(number))) == 0
        told = " ".join("".join(capsys.readouterr()).split())
        wanted = "the sinks rest at -40, where training hardly moves them: give --set annealed_st"
        assert (wanted in told) == said, words
    weights = load_file(tmp_path / "0/final/model.safetensors")
    logit = weights["model.layers.0.self_attn.normalizer.logit"]
    assert torch.equal(logit, torch.full_like(logit, -40.0))


def test_what_cannot_go_on_is_refused_in_a_line(llama, going_on, tmp_path, tokenizer, text, capsys):
    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, n_positions=8)
    short, full = tmp_path / "short", tmp_path / "full"
    for folder, positions in ((short, 8), (full, 16)):
        gpt2.n_positions = positions
        GPT2LMHeadModel(gpt2).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    many = train_tokenizer([path.read_text("utf-8") for path in text.iterdir()] * 9, 340)
    larger = tmp_path / "larger"
    shutil.copytree(llama, larger)
    many.save_pretrained(larger)
    out = ["--output", str(tmp_path / "run")]
    for words, said in (
        (["--from", str(llama), "--data.vocabulary", "400"], "data.vocabulary has no effect"),
        (["--from", str(llama), "--set", "hidden_size=8"], "hidden_size is a size of the model's"),
        (["--from", str(tmp_path / "none")], "cannot load a model from"),
        (["--from", str(short)], "windows of 16 tokens are more than the 8 positions of"),
        (["key-value", "--from", str(full)], "the 15 positions of"),
        (["gated", "--from", str(llama), "--train.only", "x"], "the pattern 'x' decides no"),
        (
            ["--from", str(llama), "--train.document-masks"],
            "LlamaForCausalLM takes no document_ids",
        ),
        (["--from", str(larger)], "restore the one it was trained with, or give the model rows"),
    ):
        assert said in refusal(capsys, "train", *words, *going_on, *out), words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["normalizer=key-value", "max_position_embeddings=16"],
            "more than the 15 positions of position='learned' beside 1 of learned keys",
        ),
        (["vocab_size=100"], "vocab_size is 100, and the tokenizer has 300 ids"),
    ],
)
def test_a_preset_without_room_is_refused_before_its_run_begins(
    changes, said, settings, tmp_path, capsys
):
    run = tmp_path / "run"
    words = [*settings, "--set", *changes, "--output", str(run)]
    assert said in refusal(capsys, "train", "gpt2", *words)
    assert not run.exists()
