"""Hugging Face's Trainer with each kind of model (in several processes: tests/train)."""

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from transformers import Trainer, TrainingArguments

from clearhead import (
    ClearheadConfig,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
)

from . import space

IDS = torch.randint(0, 31, (8, 11), generator=torch.Generator().manual_seed(0))
KINDS = {
    "next token": (ClearheadForCausalLM, {}),
    "hidden tokens": (ClearheadForMaskedLM, {"direction": "bidirectional"}),
    "classes": (ClearheadForSequenceClassification, {"num_labels": 3}),
    "a number": (ClearheadForSequenceClassification, {"num_labels": 1}),
}


def _labels(kind):
    if kind in ("classes", "a number"):
        labels = torch.arange(8) % 3
        return labels / 7 if kind == "a number" else labels
    return IDS


def _trainer(kind, folder):
    torch.manual_seed(0)
    cls, keys = KINDS[kind]
    model = cls(ClearheadConfig(**space.SHAPE, **keys))
    settings = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [
        {"input_ids": ids, "labels": label} for ids, label in zip(IDS, _labels(kind), strict=True)
    ]
    return Trainer(model, settings, train_dataset=rows, eval_dataset=rows)


@torch.no_grad()
def _expected(model, kind):
    logits, labels = model.eval()(IDS).logits, _labels(kind)
    if kind == "a number":
        return mse_loss(logits[:, 0], labels).item()
    if kind == "next token":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2), labels.flatten()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_evaluates_with_the_loss_of_the_logits(kind, tmp_path):
    trainer = _trainer(kind, tmp_path)
    wanted = pytest.approx(_expected(trainer.model, kind), abs=1e-5)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == [wanted, wanted]  # of both micro-batches together
    assert trainer.evaluate()["eval_loss"] == wanted
