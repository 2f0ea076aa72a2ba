"""Fine-tuning: what a finished seed is kept for, and the texts of a batch."""

from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.errors import ClearheadError
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.finetune import run_finetune
from clearhead.records.jsonl import append
from clearhead.train import FinetuneConfig


def _job(folder: Path, model: Any, side: str, lines: list[dict[str, str]]) -> FinetuneJob:
    """An epoch of a model of 290 entries on rows, padded on a side."""
    tokenizer = train_tokenizer(["good bad film plot"] * 30, 290)
    tokenizer.padding_side = side
    for one in (model, tokenizer):
        one.save_pretrained(folder / "model")
    append(folder / "rows.jsonl", *lines)
    return FinetuneJob(
        model=str(folder / "model"),
        train_file=str(folder / "rows.jsonl"),
        validation_file=(str(folder / "rows.jsonl"),),
        output=folder / "out",
        train=FinetuneConfig(epochs=1, batch_size=2, max_length=32),
    )


def test_an_answer_does_not_depend_on_the_other_texts_of_its_batch(tmp_path):
    lines = [{"text": text, "label": text[-1]} for text in ("film a", "good bad film plot b")]
    run_finetune(_job(tmp_path, architectures.make("GPT-2", vocab_size=320), "left", lines))
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/seed0/final").eval()
    read = AutoTokenizer.from_pretrained(tmp_path / "out/seed0/final")
    encoded = [{"input_ids": read(line["text"]).input_ids} for line in lines]
    with torch.no_grad():
        together = made(**read.pad(encoded, return_tensors="pt")).logits
        alone = made(**read.pad(encoded[:1], return_tensors="pt")).logits
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_a_seed_belongs_to_the_precision_it_was_made_with(tmp_path, monkeypatch):
    lines = [{"text": f"{word} film", "label": word} for word in ("good", "bad") * 4]
    job = _job(tmp_path, architectures.make("bert", vocab_size=320), "right", lines)
    native = [True]
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": native[0]})
    (run,) = run_finetune(job).runs
    assert run.precision == "bf16"
    native[0] = False
    with pytest.raises(ClearheadError, match="precision was 'bf16' and is now 'fp32'"):
        run_finetune(job)
