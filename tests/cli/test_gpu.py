"""The verbs on a CUDA device: they find it, use it, and what they write says so."""

import json
from pathlib import Path

import pytest
import torch

from .conftest import call, data_of, lines_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def words(text, cache) -> list[str]:
    return [*data_of(text, cache), "--data.vocabulary", "300"]


@pytest.fixture(scope="module")
def train(words, tmp_path_factory):
    """train(tokens, *options): a finished model, trained on the device in bfloat16."""

    def trained(tokens: int, *options: str) -> Path:
        run = tmp_path_factory.mktemp("run") / "run"
        batch = ("--train.sequence-length", "64", "--train.batch-size", "32")
        settings = (*batch, "--train.tokens", tokens, "--train.precision", "bf16", *options)
        assert call("train", "transformer", "--output", run, *words, *settings) == 0
        return run / "final"

    return trained


@pytest.fixture(scope="module")
def model(train) -> Path:
    """Its layers are compiled."""
    shape = ("hidden_size=128", "num_attention_heads=2", "intermediate_size=256")
    return train(65536, "--set", *shape, "--train.compile", "blocks")


def test_train(model):
    record = json.loads((model.parent / "run.json").read_text("utf-8"))
    assert record["device"].startswith("cuda, ")
    losses = [line["loss"] for line in lines_of(model.parent, "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1


def test_compare(words, tmp_path):
    arms = ("compare", "transformer", "differential", "sas-p", "coca", *words)
    small = ("--train.tokens", "4096", "--train.sequence-length", "16", "--train.batch-size", "4")
    measured = ("--lengths", "1", "2", "--evaluation-tokens", "512", "--output", tmp_path / "runs")
    assert call(*arms, *small, *measured) == 0
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (
            "eval",
            "--tasks perplexity passkey recall allocation --lengths 256 512 --tokens 4096 "
            "--rope-scaling none dynamic --factors 2 --passkey.trials 2 --passkey.wording landmark "
            "--passkey.new-tokens 4 --perplexity.text stream --recall.samples 2 --recall.pairs 2 "
            "--allocation.samples 2 --records out.jsonl",
        ),
        ("diagnose", "--length 32 --windows 4 --output ."),
        ("quantize", "--length 32 --tokens 512 --records out.jsonl"),
    ],
)
def test_a_verb_writes_records(verb, options, model, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(verb, model, *words, *options.split()) == 0
    (records,) = tmp_path.glob("*.jsonl")
    assert lines_of(tmp_path, records.name)


def test_models_in_few_bits(train, words, tmp_path):
    pytest.importorskip("torchao")
    # Wide enough for few bits to be smaller.
    shape = ("hidden_size=1024", "num_attention_heads=8", "intermediate_size=1024")
    wide, out = train(16384, "--set", "num_hidden_layers=1", *shape), tmp_path / "few"
    deploy = ("--deploy", "int8-dynamic-tensor", "--output", out, "--length", "32")
    assert call("quantize", wide, *words, "--tokens", "512", *deploy) == 0
    figures = json.loads((out / "quantization.json").read_text("utf-8"))
    # Weights, but for the head and the embedding, in half the bits.
    assert figures["bytes"] < 0.6 * figures["bfloat16_bytes"]
    assert figures["perplexity"] == pytest.approx(figures["bfloat16_perplexity"], rel=0.05)
