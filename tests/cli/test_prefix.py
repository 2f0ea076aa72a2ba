"""A model with a prefix, or an annealed start, in verbs beside the one that made it."""

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests_architectures import takes_adapters
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from clearhead.experiments import converting

from .conftest import WORDS, call, lines_of, saved_llama

KEYS = "model.layers.0.self_attn.normalizer.key_bias"


@pytest.fixture(scope="module")
def plain(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3}
    return saved_llama(tmp_path_factory.mktemp("plain"), tokenizer, **shape)


@pytest.fixture(scope="module")
def prefixed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixed") / "model"
    assert call("convert", str(plain), str(folder), "--prefix", "key") == 0
    return folder


@pytest.fixture
def steps(settings: list[str], tmp_path: Path) -> Callable[..., list[float]]:
    """The losses of a run from a model, in folder "run"."""
    tokenizer = settings.index("--data.vocabulary")
    options = [*settings[:tokenizer], *settings[tokenizer + 2 :], "--train.log-every", "1"]

    def losses(*words: str) -> list[float]:
        assert call("train", *words, *options, "--output", str(tmp_path / "run")) == 0
        lines = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return losses


def test_a_repair_holds_two_models_in_memory(plain, text, tmp_path, monkeypatch):
    """The model as it is and one copy; half as much again while the copy's MLPs are equalised."""
    held = list[float]()

    def models() -> dict[int, PreTrainedModel]:
        return {id(one): one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel)}

    others = models()  # what other tests of this process keep

    def measured(before, after, *rest):
        own = [one for key, one in models().items() if key not in others]
        tensors = {x.data_ptr(): x.numel() for one in own for x in one.parameters()}
        held.append(sum(tensors.values()) / sum(x.numel() for x in before.parameters()))
        return one_of_them(before, after, *rest)

    one_of_them = converting.with_equal_logits
    monkeypatch.setattr(converting, "with_equal_logits", measured)
    repair = "--prefix key --rotate residual values down --equalise --windows 1 --length 64"
    words = [*repair.split(), "--text", str(text)]
    assert call("convert", str(plain), str(tmp_path / "repaired"), *words) == 0
    assert len(held) == 2
    assert max(held) < 2.6


def test_a_prefix_is_evaluated_at_every_length_and_in_sliding_windows(prefixed, windows, tmp_path):
    records = str(tmp_path / "records.jsonl")
    tasks = ["--tasks", "perplexity", "passkey", "--lengths", "256", "--passkey.trials", "2"]
    common = [*windows[: windows.index("--data.validation") + 2], "--records", records]
    words = [*tasks, "--tokens", "512", *common]
    assert call("eval", str(prefixed), *words) == 0
    slid = ["--perplexity.text", "stream", "--perplexity.stride", "32", "--lengths", "64"]
    assert call("eval", str(prefixed), *slid, "--tokens", "256", *common) == 0
    cells = [line for line in lines_of(tmp_path) if line["kind"] == "cell"]
    assert [(one["task"], one["at"]["length"]) for one in cells if one["task"] == "perplexity"] == [
        ("perplexity", 256),
        ("perplexity", 64),
    ]
    depths = {one["at"]["depth"] for one in cells if one["task"] == "passkey"}
    assert len(depths) > 1


def test_a_prefix_stays_in_sight_of_a_window_that_is_trained(prefixed, steps, tmp_path):
    """A window as long as the text changes nothing; a shorter one leaves the prefix visible."""
    whole = steps("--from", str(prefixed))
    (tmp_path / "run").rename(tmp_path / "whole")
    wide = steps("--from", str(prefixed), "--set", "sliding_window=16")
    assert wide == pytest.approx(whole, abs=1e-5)
    (tmp_path / "run").rename(tmp_path / "wide")
    narrow = steps("--from", str(prefixed), "--set", "sliding_window=2")
    assert narrow[0] != pytest.approx(whole[0], abs=1e-3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits[0, -1]
        for name, weight in model.named_parameters():
            if name.endswith("value_bias"):
                weight.mul_(3)
        assert not torch.allclose(before, model(ids).logits[0, -1], atol=1e-3)


@pytest.mark.parametrize("more", [[], ["--train.lora", "2"], ["--train.document-masks"]])
def test_a_prefix_is_trained_on(prefixed, steps, more, tmp_path):
    if more[:1] == ["--train.lora"] and not takes_adapters():
        pytest.skip("no PEFT that this transformers takes")
    steps("--from", str(prefixed), *more)
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
    assert call("finetune", str(prefixed), *words) == 0
    (weights,) = out.glob("seed0/**/model.safetensors")
    assert KEYS in load_file(weights)


def test_an_annealed_start_that_is_over_stays_over(plain, steps, tmp_path):
    """Neither more tokens nor another run anneals it again."""
    name = "model.layers.0.self_attn.normalizer.offset"
    annealed = ["softmax1", "--from", str(plain), "--set", "annealed_start=true"]
    before = steps(*annealed)
    run = tmp_path / "run"
    assert load_file(run / "final/model.safetensors")[name].item() == 0
    assert call("train", "--resume", str(run), "--train.tokens", "128") == 0
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in lines][: len(before)] == before
    assert len(lines) == 2 * len(before)
    assert load_file(run / "final/model.safetensors")[name].item() == 0
    run.rename(tmp_path / "first")
    steps("--from", str(tmp_path / "first"))
    assert load_file(run / "final/model.safetensors")[name].item() == 0
