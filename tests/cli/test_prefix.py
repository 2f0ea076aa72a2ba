"""A model with a prefix, or an annealed start, in verbs beside the one that made it."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests_architectures import takes_adapters
from transformers import PreTrainedTokenizerBase

from .conftest import WORDS, call, lines_of, saved_llama

KEYS = "model.layers.0.self_attn.normalizer.key_bias"


@pytest.fixture(scope="module")
def plain(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3}
    return saved_llama(tmp_path_factory.mktemp("plain"), tokenizer, **shape)


@pytest.fixture(scope="module")
def prefixed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixed") / "model"
    assert call("convert", plain, folder, "--prefix", "key") == 0
    return folder


def test_a_prefix_is_evaluated_at_every_length_and_in_sliding_windows(prefixed, windows, tmp_path):
    records = str(tmp_path / "records.jsonl")
    tasks = ["--tasks", "perplexity", "passkey", "--lengths", "256", "--passkey.trials", "2"]
    common = [*windows[: windows.index("--data.validation") + 2], "--records", records]
    words = [*tasks, "--tokens", "512", *common]
    assert call("eval", prefixed, *words) == 0
    slid = ["--perplexity.text", "stream", "--perplexity.stride", "32", "--lengths", "64"]
    assert call("eval", prefixed, *slid, "--tokens", "256", *common) == 0
    cells = [line for line in lines_of(tmp_path) if line["kind"] == "cell"]
    assert [(one["task"], one["at"]["length"]) for one in cells if one["task"] == "perplexity"] == [
        ("perplexity", 256),
        ("perplexity", 64),
    ]
    depths = {one["at"]["depth"] for one in cells if one["task"] == "passkey"}
    assert len(depths) > 1


@pytest.mark.parametrize("more", [[], ["--train.lora", "2"], ["--train.document-masks"]])
def test_a_prefix_is_trained_on(prefixed, going_on, more, tmp_path):
    if more[:1] == ["--train.lora"] and not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    assert call("train", "--from", prefixed, *more, *going_on, "--output", tmp_path / "run") == 0
    start = load_file(prefixed / "model.safetensors")[KEYS]
    final = load_file(tmp_path / "run/final/model.safetensors")[KEYS]
    assert torch.equal(start, final) == (more[:1] == ["--train.lora"])


def test_a_prefix_is_fine_tuned(prefixed, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    draw = random.Random(0)
    for name in ("train", "test"):
        rows = ({"text": " ".join(draw.choices(WORDS, k=9)), "label": n % 2} for n in range(24))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = ["--train-file", str(tmp_path / "train.jsonl"), "--train.epochs", "1"]
    words += ["--validation-file", str(tmp_path / "test.jsonl"), "--output", str(out)]
    assert call("finetune", prefixed, *words) == 0
    (weights,) = out.glob("seed0/**/model.safetensors")
    assert KEYS in load_file(weights)
