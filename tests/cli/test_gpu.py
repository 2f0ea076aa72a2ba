"""The verbs on a CUDA device: they find it, use it, and what they write says so."""

import json
from pathlib import Path

import pytest
import torch

from clearhead.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _call(*words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def words(text, cache) -> list[str]:
    return [
        *("--data.data", str(text), "--data.vocabulary", "300", "--data.validation", "0.1"),
        *("--data.cache", str(cache)),
    ]


@pytest.fixture(scope="module")
def model(words, tmp_path_factory) -> Path:
    """A finished model, trained on the device in bfloat16, its layers compiled."""
    run = tmp_path_factory.mktemp("run") / "run"
    _call(
        *("train", "transformer", "--output", str(run), *words),
        *("--set", "hidden_size=128", "num_attention_heads=2", "intermediate_size=256"),
        *("--train.tokens", "65536", "--train.sequence-length", "64", "--train.batch-size", "32"),
        *("--train.compile", "blocks", "--train.precision", "bf16"),
    )
    return run / "final"


def test_train(model):
    record = json.loads((model.parent / "run.json").read_text("utf-8"))
    assert record["device"].startswith("cuda, ")
    losses = [line["loss"] for line in _lines(model.parent / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (
            "eval",
            "--tasks perplexity passkey recall allocation --lengths 256 512 --tokens 4096 "
            "--rope-scaling none dynamic --factors 2 --passkey.trials 2 --passkey.new-tokens 4 "
            "--recall.samples 2 --recall.pairs 2 --allocation.samples 2 --records out.jsonl",
        ),
        ("diagnose", "--length 32 --windows 4 --output ."),
        ("quantize", "--length 32 --tokens 512 --records out.jsonl"),
    ],
)
def test_a_verb_writes_records(verb, options, model, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _call(verb, str(model), *words, *options.split())
    (records,) = tmp_path.glob("*.jsonl")
    assert _lines(records)
