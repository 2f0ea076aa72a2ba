"""A tiny model with a tokenizer, and a corpus of a few documents: what evaluations run on."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import ClearheadForCausalLM, preset
from clearhead.data import Corpus, DataConfig, prepare
from clearhead.measure.sweep import Subject, Texts


def numbers(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A cell's lines as one dictionary: numbers by name, their errors, and all details."""
    found: dict[str, Any] = {"headlines": ()}
    for line in map(dict, lines):
        metric, value, interval = line.pop("metric"), line.pop("value"), line.pop("interval", None)
        if metric == "document_perplexity":
            found.setdefault("documents", []).append({"perplexity": value, **line})
            continue
        found["headlines"] += () if line.pop("aside", False) else (metric,)
        found[metric] = value
        for name, suffix in (("stderr", "stderr"), ("items", "by_item")):
            if name in line:
                found[f"{metric}_{suffix}"] = line.pop(name)
        if interval is not None and metric == "accuracy":
            found["low"], found["high"] = interval
        found |= line
    return found


def log_p(model: Any, ids: Sequence[int], count: int) -> list[float]:
    """log p of the last tokens of a text, each given all before it: one pass without a cache."""
    text = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(text[:, :-1], use_cache=False).logits[0].double()
    start = len(ids) - count
    return logits[start - 1 :].log_softmax(-1).gather(1, text[0, start:, None])[:, 0].tolist()


def greedy(model: Any, ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The likeliest next tokens, each by a pass over the whole text."""
    text = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    return tuple(text[len(ids) :])


LINES = (
    "The ship left the harbour in the morning. Nobody saw it again!",
    "A letter came after some weeks. It said little of the voyage.",
    "What had become of the captain? The old woman knew, and was silent.",
)


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve books of several hundred tokens, one of twenty."""
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    texts = [
        " ".join(f"{LINES[(book + n) % 3]} Chapter {n}." for n in range(20 + book))
        for book in range(12)
    ]
    path.write_text("\n".join(json.dumps({"text": text}) for text in (*texts, "A note.")), "utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The books, and text that gives the tokenizer the words of the synthetic tasks."""
    tasks = ("needle", "recall", "passkey")
    data = (str(books), *(f"synthetic:{task}:documents=40" for task in tasks))
    data += ("synthetic:passkey:documents=40,landmark=1",)
    cache = tmp_path_factory.mktemp("cache")
    return prepare(DataConfig(data=data, vocabulary=800, validation=0.4, cache=cache))


@pytest.fixture(scope="session")
def make_subject(corpus: Corpus):
    """make_subject(preset, **changes of the subject)."""

    def make(name: str = "transformer", **changes: object) -> Subject:
        torch.manual_seed(0)
        shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"intermediate_size": 40, "max_position_embeddings": 64}
        config = preset(name, vocab_size=corpus.vocabulary_size, initializer_range=0.4, **shape)
        subject = Subject(
            model=ClearheadForCausalLM(config).eval(),
            tokenizer=corpus.tokenizer,
            texts=Texts(lambda: corpus, ("train", "validation")),
            **{"lengths": (128, 192), "tokens": 2000, "batch_tokens": 1000, "seed": 0},
        )
        return replace(subject, **changes)

    return make


@pytest.fixture(scope="session")
def subject(make_subject) -> Subject:
    """One for the tests that do not change it."""
    return make_subject()
