"""Loss at hidden tokens as a task of `clearhead eval`."""

from dataclasses import replace

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.data import DataConfig, prepare, with_mask_token
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.eval.perplexity_task import MaskedTask
from clearhead.lab.measuring import measure
from clearhead.lab.sweep_configs import EvaluateConfig
from clearhead.records.jsonl import append


@pytest.fixture
def masked(make_subject):
    subject = make_subject()
    size = with_mask_token(subject.texts.corpus).vocabulary_size
    torch.manual_seed(0)
    model = architectures.make("bert", vocab_size=size)
    read = subject.texts.corpus
    texts = type(subject.texts)(lambda: read, ("validation",))
    return replace(subject, model=model, texts=texts, lengths=(16,))


def test_a_length_without_a_window_is_refused_before_any_is_measured(masked):
    long = replace(masked, lengths=(16, 100_000))
    with pytest.raises(ClearheadError, match="no window of 100,000 tokens"):
        MaskedTask().cells(long)


def test_the_loss_of_another_text_is_another_cell(tmp_path):
    tokenizer = train_tokenizer(["good bad film plot"] * 30, 290)
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for file, words in zip(files, ("good film", "bad plot"), strict=True):
        append(file, *({"text": f"{words} " * n} for n in range(9, 60)))
    data = DataConfig(data=(str(files[0]),), validation=0.4)
    corpus = with_mask_token(prepare(data, tokenizer=tokenizer, progress=str))
    torch.manual_seed(0)
    model = architectures.make("bert", vocab_size=corpus.vocabulary_size)
    model.save_pretrained(tmp_path / "model")
    corpus.tokenizer.save_pretrained(tmp_path / "model")
    few = {"lengths": (16,), "tokens": 256, "records": tmp_path / "records.jsonl"}
    asked = EvaluateConfig(models=(str(tmp_path / "model"),), data=data, **few)

    def loss(config) -> float:
        lines = measure(config)
        (value,) = (line["value"] for line in lines if line.get("metric") == "masked_loss")
        return value

    first = loss(asked)
    other = replace(asked, data=replace(data, data=(str(files[1]),)))
    assert loss(other) != first
    assert loss(asked) == first
