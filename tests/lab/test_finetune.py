"""Fine-tuning: what a finished seed is kept for, and the texts of a batch."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from clearhead import ClearheadForMaskedLM, preset
from clearhead.data.tokenizer import train as train_tokenizer
from clearhead.errors import ClearheadError
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.finetune import run_finetune
from clearhead.train import FinetuneConfig, precision


def _saved(folder: Path) -> str:
    """A masked model of one layer, and its tokenizer."""
    tokenizer = train_tokenizer(["good bad film plot"] * 30, 290)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    keys = {"vocab_size": max(tokenizer.get_vocab().values()) + 1, **shape}
    config = preset("bert", pad_token_id=tokenizer.pad_token_id, **keys)
    ClearheadForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_answer_does_not_depend_on_the_other_texts_of_its_batch(tmp_path):
    tokenizer = train_tokenizer(["good bad film plot"] * 30, 290)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": 320, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    lines = [{"text": text, "label": text[-1]} for text in ("film a", "good bad film plot b")]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = FinetuneJob(
        model=str(tmp_path / "model"),
        train_file=str(rows),
        validation_file=(str(rows),),
        output=tmp_path / "out",
        train=FinetuneConfig(epochs=1, batch_size=2, max_length=32),
    )
    run_finetune(job)
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/seed0/final").eval()
    read = AutoTokenizer.from_pretrained(tmp_path / "out/seed0/final")
    encoded = [{"input_ids": read(line["text"]).input_ids} for line in lines]
    with torch.no_grad():
        together = made(**read.pad(encoded, return_tensors="pt")).logits
        alone = made(**read.pad(encoded[:1], return_tensors="pt")).logits
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_a_seed_belongs_to_the_precision_it_was_made_with(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    lines = [{"text": f"{word} film", "label": word} for word in ("good", "bad") * 4]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = FinetuneJob(
        model=_saved(tmp_path / "model"),
        train_file=str(rows),
        validation_file=(str(rows),),
        output=tmp_path / "out",
        train=FinetuneConfig(epochs=1, batch_size=4, max_length=16),
    )
    native = [True]
    monkeypatch.setattr(precision, "_native_bf16", lambda _: native[0])
    (run,) = run_finetune(job).runs
    assert run.precision == "bf16"
    native[0] = False
    with pytest.raises(ClearheadError, match="precision was 'bf16' and is now 'fp32'"):
        run_finetune(job)
