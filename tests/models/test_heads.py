"""The loss is that of the head's own logits, whatever stands in the place of a plain matrix, and in
Hugging Face's Trainer (in several processes: tests/train)."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, spectral_norm
from transformers import Trainer, TrainingArguments

from clearhead import (
    ClearheadConfig,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
)

from . import space

KINDS = {"causal": ClearheadForCausalLM, "bidirectional": ClearheadForMaskedLM}
IDS = torch.arange(22).view(2, 11)


def _model(direction):
    torch.manual_seed(0)
    keys = {"direction": direction, "tie_word_embeddings": False}
    return KINDS[direction](ClearheadConfig(**space.SHAPE, **keys)).eval()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _by_its_own_forward(head):
    head.forward = lambda x: nn.functional.linear(x, head.weight).tanh()


def _everywhere(head):
    return register_module_forward_hook(lambda m, x, out: out * 30 if m is head else None)


def _as_a_subclass(head):
    head.__class__ = Doubled


CHANGES = {
    "hook": lambda head: head.register_forward_hook(lambda m, x, out: out * 30),
    "backward pre-hook": lambda head: head.register_full_backward_pre_hook(
        lambda m, out: (out[0] * 3,)
    ),
    "hook of every module": _everywhere,
    "forward of its own": _by_its_own_forward,
    "subclass": _as_a_subclass,
    "spectral norm": spectral_norm,
    "parametrised weight norm": parametrizations.weight_norm,
    "hook of the weight": lambda head: head.weight.register_hook(lambda gradient: gradient * 3),
}
LABELS = IDS.masked_fill(IDS % 3 == 0, -100)


def _loss_of_logits(model, direction, labels=IDS):
    logits = model(IDS).logits
    if direction == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _losses(direction, change, training, own):
    """Two losses, the model's own or those of its logits, and their gradients."""
    if direction == "classes":
        torch.manual_seed(0)
        model = ClearheadForSequenceClassification(ClearheadConfig(**space.SHAPE, num_labels=3))
        head, labels = model.classifier.out_proj, torch.tensor([0, 2])
    else:
        model = _model(direction)
        head, labels = model.lm_head, LABELS
    model.train(training)
    handle = CHANGES[change](head)
    losses = []
    with handle if change == "hook of every module" else nullcontext():
        for _ in range(2):
            if own:
                out = model(IDS, labels=labels)
                loss = out.loss
                if not training:
                    assert out.logits is not None
            else:
                loss = _loss_of_logits(model, direction, labels)
            loss.backward()
            losses.append(loss.detach())
    return losses, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("direction", [*KINDS, "classes"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_head_is_in_the_loss_and_its_gradients(change, direction, training):
    losses, gradients = _losses(direction, change, training, own=True)
    wanted, of_logits = _losses(direction, change, training, own=False)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(gradients, of_logits)


@pytest.mark.parametrize("direction", KINDS)
def test_a_hooked_head_is_called_once_and_gives_the_logits_of_the_loss(direction):
    model, calls = _model(direction), []
    wanted = 30 * model(IDS).logits
    model.lm_head.register_forward_hook(lambda m, x, out: calls.append(1) or out * 30)
    out = model(IDS, labels=LABELS)
    assert len(calls) == 1
    torch.testing.assert_close(out.logits, wanted)
    if direction == "causal":
        last = model(IDS, labels=LABELS, logits_to_keep=2)
        torch.testing.assert_close(last.logits, wanted[:, -2:])
        torch.testing.assert_close(last.loss, out.loss)


@pytest.mark.parametrize("direction", KINDS)
def test_an_adapter_of_the_head_is_in_the_loss_and_learns(direction):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["lm_head"], "r": 2, "init_lora_weights": False}
    model = peft.get_peft_model(_model(direction), peft.LoraConfig(**options))
    wanted = _loss_of_logits(model, direction)
    for training in (False, True):
        loss = model.train(training)(IDS, labels=IDS).loss
        torch.testing.assert_close(loss, wanted)
    loss.backward()
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 2
    assert all(p.grad is not None and p.grad.any() for p in adapters)


@pytest.mark.parametrize("direction", KINDS)
def test_a_head_with_a_bias_and_one_that_is_offloaded(direction, tmp_path):
    model = _model(direction)
    model.set_output_embeddings(nn.Linear(16, 31))
    torch.testing.assert_close(model(IDS, labels=IDS).loss, _loss_of_logits(model, direction))
    model = _model(direction)
    model.save_pretrained(tmp_path / "model")
    apart = KINDS[direction].from_pretrained(
        tmp_path / "model",
        device_map={"model": "cpu", "lm_head": "disk"},
        offload_folder=tmp_path / "disk",
    )
    assert apart.lm_head.weight.is_meta
    with torch.no_grad():
        wanted = _loss_of_logits(model, direction)
        torch.testing.assert_close(apart.eval()(IDS, labels=IDS).loss, wanted)


ROWS = torch.randint(0, 31, (8, 11), generator=torch.Generator().manual_seed(0))
TRAINED = {
    "next token": (ClearheadForCausalLM, {}),
    "hidden tokens": (ClearheadForMaskedLM, {"direction": "bidirectional"}),
    "classes": (ClearheadForSequenceClassification, {"num_labels": 3}),
    "a number": (ClearheadForSequenceClassification, {"num_labels": 1}),
}


def _targets(kind):
    if kind in ("classes", "a number"):
        labels = torch.arange(8) % 3
        return labels / 7 if kind == "a number" else labels
    return ROWS


def _trainer(kind, folder):
    torch.manual_seed(0)
    cls, keys = TRAINED[kind]
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
        {"input_ids": ids, "labels": label} for ids, label in zip(ROWS, _targets(kind), strict=True)
    ]
    return Trainer(model, settings, train_dataset=rows, eval_dataset=rows)


@torch.no_grad()
def _expected(model, kind):
    logits, labels = model.eval()(ROWS).logits, _targets(kind)
    if kind == "a number":
        return mse_loss(logits[:, 0], labels).item()
    if kind == "next token":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2), labels.flatten()).item()


@pytest.mark.parametrize("kind", TRAINED)
def test_it_trains_and_evaluates_with_the_loss_of_the_logits(kind, tmp_path):
    trainer = _trainer(kind, tmp_path)
    wanted = pytest.approx(_expected(trainer.model, kind), abs=1e-5)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == [wanted, wanted]  # of both micro-batches together
    assert trainer.evaluate()["eval_loss"] == wanted
