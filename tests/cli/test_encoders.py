"""The encoder's way from text to classes, as a person walks it."""

import copy
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.errors import ClearheadError
from clearhead.lab import finetune
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.finetune import run_finetune
from clearhead.progress import Work
from clearhead.report import load
from clearhead.train import FinetuneConfig, InterruptedRun

from .conftest import call, changed, data_of, refusal, rewritten, saved

SMALL = ["--set", "hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2"]
TASK = ["--train.epochs", "8", "--train.batch-size", "8", "--train.learning-rate", "3e-3"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["good fine nice bad poor awful film plot cast"] * 30, 290)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, str]:
    """Files of sentences whose words tell their class, or a number."""
    folder, draw = tmp_path_factory.mktemp("rows"), random.Random(0)
    words = {True: ("good", "fine", "nice"), False: ("bad", "poor", "awful")}
    for split, count in (("train", 64), ("validation", 32)):
        for _ in range(count):
            kind = draw.random() < 0.6
            pair = [draw.choice(words[kind]), draw.choice(("film", "plot", "cast"))]
            text = " ".join(pair * draw.randint(1, 3))
            for name, row in (
                (split, {"review": text, "label": "yes" if kind else "no"}),
                (f"numbers-{split}", {"sentence1": text, "sentence2": "film", "label": 5.0 * kind}),
            ):
                with (folder / f"{name}.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return {path.stem: str(path) for path in folder.iterdir()}


MODELS = {"masked": "bert", "learned": "gpt2", "bert": "BERT", "gpt2": "GPT-2"}


def _checkpoint(folder: Path, kind: str, tokenizer) -> str:
    """A run's folder, named by its kind."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.02}
    saved(folder / kind / "final", tokenizer, MODELS[kind], **shape, **more)
    return str(folder / kind)


def _words(rows: dict[str, str]) -> list[str]:
    files = ["--train-file", rows["train"], "--validation-file", rows["validation"]]
    return [*files, "--text-field", "review", "--train.max-length", "16", *TASK]


@pytest.mark.parametrize("kind", ["masked", "gpt2"])
def test_a_checkpoint_of_any_kind_learns_a_task_and_reloads(
    kind, rows, tokenizer, tmp_path, capsys
):
    model = _checkpoint(tmp_path, kind, tokenizer)
    out = tmp_path / "out"
    assert call("finetune", model, *_words(rows), "--output", out) == 0
    records = load(out / "records.jsonl")
    (name,) = records.arms()
    assert name == f"{kind} on train"
    accuracy = records.values(name, "accuracy")
    commonest = records.values(name, "accuracy, commonest class")
    assert set(accuracy) == {0}
    assert min(accuracy.values()) > 0.9 > max(commonest.values())
    assert len(records.runs[0].steps) == 8 * 8
    assert "accuracy" in capsys.readouterr().out

    folder = out / "seed0/final"
    told = refusal(capsys, "eval", folder, "--tasks", "perplexity")
    assert "Classification'], predicts no next token" in told
    again = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reader = AutoTokenizer.from_pretrained(folder)
    assert again.config.id2label == {0: "no", 1: "yes"}
    ids = [reader.bos_token_id, *reader("awful plot")["input_ids"], reader.eos_token_id]
    with torch.no_grad():
        answer = again(torch.tensor([ids])).logits.argmax(-1).item()
    assert again.config.id2label[answer] == "no"
    if kind == "masked":
        assert again.config.dropout == 0.1


def test_an_answer_does_not_depend_on_the_other_texts_of_its_batch(rows, tokenizer, tmp_path):
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    words = changed(_words(rows), "--train.epochs", "1", "--output", str(tmp_path / "out"))
    assert call("finetune", _checkpoint(tmp_path, "gpt2", left), *words) == 0
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/seed0/final").eval()
    read = AutoTokenizer.from_pretrained(tmp_path / "out/seed0/final")
    encoded = [{"input_ids": read(text).input_ids} for text in ("film", "good bad film plot")]
    with torch.no_grad():
        together = made(**read.pad(encoded, return_tensors="pt")).logits
        alone = made(**read.pad(encoded[:1], return_tensors="pt")).logits
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_a_regression_of_glue_is_streamed_from_the_hub_at_a_recorded_revision(
    rows, tokenizer, tmp_path, monkeypatch
):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, config, *, split, streaming, revision):
        assert (name, config, streaming, revision) == ("nyu-mll/glue", "stsb", False, "a1b2")
        return map(json.loads, Path(rows[f"numbers-{split}"]).read_text().splitlines())

    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_: SimpleNamespace(sha="a1b2"))
    model = _checkpoint(tmp_path, "masked", tokenizer)
    out = tmp_path / "out"
    assert call("finetune", model, "--task", "stsb", *TASK, "--output", out) == 0
    sources = [f"hf:nyu-mll/glue:stsb#{split}" for split in ("train", "validation")]
    recorded = load(out / "records.jsonl").runs[0].header["revisions"]
    assert recorded == dict.fromkeys(sources, "a1b2")
    records = load(out / "records.jsonl")
    assert records.values("masked on stsb", "pearson")[0] > 0.8
    again = AutoModelForSequenceClassification.from_pretrained(out / "seed0/final")
    assert again.config.problem_type == "regression"


@pytest.mark.parametrize("where", ["while it trains", "seed 1, validation"])
def test_a_stopped_seed_goes_on_to_the_same_bits(
    where, rows, tokenizer, tmp_path, monkeypatch, capsys
):
    """After a signal while it trains; after an end of the process while it is measured."""
    whole = FinetuneJob(
        model=_checkpoint(tmp_path, "masked", tokenizer),
        train_file=rows["train"],
        validation_file=(rows["validation"],),
        text_field="review",
        seeds=(0, 1),
        output=tmp_path / "whole",
        train=FinetuneConfig(epochs=3, batch_size=10, max_length=16),
    )
    run_finetune(whole)
    job = replace(whole, output=tmp_path / "stopped")

    class Stopping(Work):
        name = ""

        def begin(self, name: str) -> None:
            self.name = name

        def update(self, share: float, detail: str = "") -> None:
            if where == "while it trains" and (self.name, detail[:7]) == ("seed 1", "step 14"):
                os.kill(os.getpid(), signal.SIGINT)

        def say(self, line: str) -> None:
            if line.startswith(where):
                os.kill(os.getpid(), signal.SIGINT)

    stopping = Stopping()
    monkeypatch.setattr(finetune, "say", stopping.say)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises((InterruptedRun, KeyboardInterrupt)) as stopped:
            run_finetune(job, work=stopping)
    finally:
        signal.signal(signal.SIGINT, ours)
    assert getattr(stopped.value, "code", 130) == 130
    assert [run.seed for run in load(job.output / "records.jsonl").runs] == [0]
    other = replace(job, train=replace(job.train, warmup=0.5))
    with pytest.raises(ClearheadError, match=r"seed0 holds .*: train\.warmup was"):
        run_finetune(other)
    model = Path(job.model) / "final/model.safetensors"
    weights = model.read_bytes()
    rewritten(model.parent, lambda weights: weights["model.norm.weight"].mul_(2))
    with pytest.raises(ClearheadError, match=r"seed1 holds .*: from\.parameters was"):
        run_finetune(replace(job, seeds=(1,)))
    model.write_bytes(weights)

    often = replace(job, train=replace(job.train, save_every=9))  # which changes no result
    monkeypatch.undo()
    capsys.readouterr()
    records = run_finetune(often)
    said = capsys.readouterr().err
    assert said.startswith("seed 0: already done")
    assert ("training 21 steps from step 14\n" in said) == (where == "while it trains")
    for file in ("seed1/final/model.safetensors", "seed1/final/config.json"):
        assert (job.output / file).read_bytes() == (whole.output / file).read_bytes()
    expected = load(whole.output / "records.jsonl")
    for run, other in zip(records.runs, expected.runs, strict=True):
        assert [line["epoch"] for line in run.steps] == [*[1] * 7, *[2] * 7, *[3] * 7]
        assert [line["loss"] for line in run.steps] == [line["loss"] for line in other.steps]
    (name,) = records.arms()
    assert records.values(name, "accuracy") == expected.values(name, "accuracy")


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("a/dev.jsonl",), ["validation"]),
        (("dev.jsonl", "test.jsonl.gz"), ["dev", "test"]),
        (("a/dev.jsonl", "b/dev.jsonl"), ["validation", "validation 1"]),
    ],
)
def test_validation_files_have_splits_of_their_own(files, splits):
    job = FinetuneJob(model="m", train_file="train.jsonl", validation_file=files)
    assert [split for split, _ in job.resolved().validation] == splits


def test_refusals_of_finetune(rows, tokenizer, tmp_path, capsys):
    model = _checkpoint(tmp_path, "learned", tokenizer)
    bert = _checkpoint(tmp_path, "bert", tokenizer)
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"review": "good", "label": "perhaps"}) + "\n")
    good = _words(rows)
    out = ["--output", str(tmp_path / "out")]
    for words, message in (
        ([model], "give --task: cola"),
        ([model, "--task", "colla"], "did you mean cola"),
        ([model, "--task", "rte", "--train-file", "x"], "or --train-file and"),
        ([model, *good[:4], "--text-field", "text"], "no field 'text'"),
        ([model, *changed(good, "--validation-file", str(odd))], "label 'perhaps' is outside"),
        ([model, *good[:6], "--train.max-length", "65"], "give a smaller --train.max-length"),
        ([bert, *good, "--train.dropout", "0.2"], "is for clearhead models"),
        ([model, *good, "--seeds", "1", "1"], "each once"),
    ):
        assert message in refusal(capsys, "finetune", *words, *out), words
    assert not (tmp_path / "out").exists()


@pytest.fixture
def masked_words(settings: list[str], tmp_path: Path) -> list[str]:
    recipe = ["--train.accumulation", "2", "--train.ramp", "0.5", "--train.tokens", "256"]
    words = ["train", "bert", *SMALL, *changed(settings, *recipe)]
    return [*words, "--output", str(tmp_path / "run")]


def test_masked_pretraining_then_its_loss(masked_words, tmp_path, text, capsys):
    assert call(*masked_words) == 0
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["description"]["objective"] == "mlm"
    assert run["description"]["mask"] == 0.25
    reader = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    assert reader.mask_token == "<|mask|>"
    assert run["model"]["vocab_size"] == reader.mask_token_id + 1
    where = [*data_of(text), "--tokens", "128"]
    records = tmp_path / "eval.jsonl"
    told = ["--lengths", "16", "--records", str(records)]
    assert call("eval", tmp_path / "run", *where, *told) == 0
    assert "Masked loss of masked" in " ".join(capsys.readouterr().out.split())
    (measured,) = load(records).runs
    (loss,) = measured.select("masked_loss", task="masked")
    assert loss.value == pytest.approx(5.7, abs=0.7)
    asked = [*where, "--lengths", "16", "--tasks", "perplexity"]
    assert "its task is masked" in refusal(capsys, "eval", tmp_path / "run", *asked)
    assert "predicts no next token" in refusal(capsys, "generate", tmp_path / "run", "x")


def test_encoders_are_compared_among_themselves(settings, tmp_path, capsys):
    out = tmp_path / "compared"
    small = ["--lengths", "1", "2", "--evaluation-tokens", "64", *settings]
    words = ["compare", "bert", "--vary", "norm=layernorm,rmsnorm", *SMALL, *small]
    assert call(*words, "--output", out) == 0
    records = load(out / "records.jsonl")
    assert len(records.arms()) == 2
    for run in records.runs:
        assert run.header["objective"] == "mlm"
        assert run.measure("perplexity", length=16) is None
        assert 4 < run.value("masked loss", length=16) < 8
        assert run.value("masked loss", length=32) > 4
        assert run.header["documents"] == "together"
    assert "loss at hidden" in capsys.readouterr().out
    mixed = ["compare", "bert", "transformer", *SMALL, *small, "--output", str(tmp_path / "mixed")]
    assert "predicts hidden tokens and transformer the next" in refusal(capsys, *mixed)
    every = [*words, "--measure-every", "0.5", "--output", str(tmp_path / "every")]
    assert "not for presets that predict hidden tokens" in refusal(capsys, *every)
