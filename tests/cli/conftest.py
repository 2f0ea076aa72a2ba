"""What the command line's tests share: a small text, models, a call, what it leaves in a file."""

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from clearhead.cli import main
from clearhead.data import DataConfig, prepare
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.train import MetricsFile, StepMetrics

WORDS = ("attention", "noise", "sink", "query", "key", "value", "head", "token", "layer", "norm")

# Options of a training of two steps, and the shape of a model for it.
STEPS = (
    *("--train.tokens", "64", "--train.sequence-length", "16", "--train.batch-size", "2"),
    *("--train.precision", "fp32"),
)
SMALL = ("hidden_size=24", "num_hidden_layers=1", "num_attention_heads=2")


def data_of(text: Path | str, cache: Path | None = None) -> list[str]:
    """Options of a text, and of the folder of its tokens."""
    words = ["--data.data", str(text), "--data.validation", "0.1"]
    return words if cache is None else [*words, "--data.cache", str(cache)]


def changed(words: Sequence[str], *options: str) -> list[str]:
    """A command line with these options in place of its own of the same names."""
    given = {word for word in options if word.startswith("--")}
    kept, dropped = list[str](), False
    for word in words:
        dropped = word in given or (dropped and not word.startswith("--"))
        if not dropped:
            kept.append(word)
    return [*kept, *options]


def call(*words: object) -> int:
    """The exit status of a command line."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, words)))
    return stop.value.code


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a refused request prints; nothing else, and exit code 2."""
    assert call(*words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("clearhead: ")
    assert "Traceback" not in "".join(lines)
    return lines[-1]


def lines_of(folder: Path, name: str = "records.jsonl") -> list[dict[str, Any]]:
    """All lines of a file of records."""
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def cells_of(tmp_path: Path) -> list[dict]:
    """The lines that close cells, each with the "numbers" of its measures by name."""
    lines = lines_of(tmp_path)
    for cell in (line for line in lines if line["kind"] == "cell"):
        mine = [line for line in lines if line.get("cell") == cell["cell"] and "metric" in line]
        cell["numbers"] = {line["metric"]: line["value"] for line in mine}
        assert cell["lines"] >= len(mine) > 0
    return [line for line in lines if line["kind"] == "cell"]


def weights_of(run: Path) -> bytes:
    return (run / "final/model.safetensors").read_bytes()


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder, with a model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The folder, its model's weights changed in place, and not sealed any more."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink(missing_ok=True)
    return folder


def saved(
    folder: Path, tokenizer: PreTrainedTokenizerBase, name: str = "transformer", **changes: object
) -> Path:
    """The folder, with a tiny model that was never trained, and its tokenizer."""
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.3}
    return save(folder, architectures.make(name, **shape | changes), tokenizer)


def saved_llama(folder: Path, tokenizer: PreTrainedTokenizerBase, **changes: object) -> Path:
    """The folder, with a tiny Llama of random weights, and its tokenizer."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": None}
    ids = {"initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2}
    return saved(folder, tokenizer, "Llama", **shape | ids | changes)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sixty short documents."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for index in range(60):
        lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(30)]
        (folder / f"{index:02}.txt").write_text("\n".join(lines), "utf-8")
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder of a tiny Llama with random weights, and a tokenizer."""
    lines = (path.read_text("utf-8") for path in text.iterdir())
    heads = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
    folder = tmp_path_factory.mktemp("llama")
    return saved_llama(folder, train_tokenizer(lines, 300), initializer_range=0.3, **heads)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a job of two steps."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    return [*data_of(text), "--data.vocabulary", "300", *STEPS]


@pytest.fixture(scope="session")
def trained(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, on text that has the synthetic tasks in it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    code = call(
        *("train", "transformer", "--output", str(folder), "--data.cache", str(cache)),
        *("--set", *SMALL, "max_position_embeddings=64"),
        *("--data.data", str(text), "synthetic:passkey:documents=60@0.3"),
        *("--data.vocabulary", "900", "--train.tokens", "512"),
        *("--train.sequence-length", "64", "--train.batch-size", "4", "--train.precision", "fp32"),
    )
    assert code == 0
    return folder


@pytest.fixture(scope="session")
def tokenizer(text: Path, cache: Path) -> PreTrainedTokenizerBase:
    config = DataConfig(data=(str(text),), vocabulary=300, validation=0.1, cache=cache)
    return prepare(config).tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A run's folder, whose finished model is in "final"."""
    return saved(tmp_path_factory.mktemp("runs") / "mine/final", tokenizer).parent


@pytest.fixture
def windows(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of three short windows of the text."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))
    return [*data_of(text), "--length", "16", "--tokens", "48"]


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
def source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder of another library's model, to be changed: 4 query heads, 2 key heads."""
    return saved_llama(tmp_path / "llama", tokenizer, tie_word_embeddings=True)


@pytest.fixture
def going_on(settings: list[str], text: Path) -> list[str]:
    """Options of a run of four steps, without those of a tokenizer."""
    return [*data_of(text), *changed(STEPS, "--train.tokens", "128")]
