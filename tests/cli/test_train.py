"""Training from the command line: presets, and runs that go on."""

import json
import shlex
import shutil
import signal

import pytest
from transformers import AutoTokenizer

from clearhead.cli import options, train
from clearhead.records.files import hold_folder
from clearhead.records.identity import canonical, restored

from .conftest import call, refusal, rewritten, weights_of

SHAPE = ("hidden_size=24", "num_hidden_layers=2", "num_attention_heads=2")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "sas-p --size small --set norm=layernorm mlp_gain=0.5 --output a/b --train.tokens 9999",
        "bert --train.document-masks --train.betas 0.8 0.9 --data.data a 'b c@0.5' --data.limit 7",
        "sink --from my/model --set 'layer_overrides=[{}]' --train.only '*attn*' --train.lora 4",
        "--from x --train.optimizer muon --train.adamw-patterns a b --track wandb tensorboard",
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
