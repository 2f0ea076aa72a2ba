"""The loss is that of the head's own logits, whatever stands in the place of a plain matrix, and in
Hugging Face's Trainer (in several processes: tests/train)."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, spectral_norm
from transformers import Trainer, TrainingArguments

from clearhead import (
    ClearheadConfig,
    ClearheadError,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
)

from . import space

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "next token": (ClearheadForCausalLM, {}),
    "hidden tokens": (ClearheadForMaskedLM, {"direction": "bidirectional"}),
    "classes": (ClearheadForSequenceClassification, {"num_labels": 3}),
    "a number": (ClearheadForSequenceClassification, {"num_labels": 1}),
}
OF_TOKENS = [*KINDS][:2]
IDS = torch.randint(0, 31, (8, 11), generator=torch.Generator().manual_seed(0))
TARGETS = {
    **dict.fromkeys(OF_TOKENS, IDS.masked_fill(IDS % 3 == 0, -100)),
    "classes": torch.arange(8) % 3,
    "a number": torch.arange(8) % 3 / 7,
}


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    cls, keys = KINDS[kind]
    return cls(ClearheadConfig(**space.SHAPE, **keys, tie_word_embeddings=False)).eval()


def _loss_of_logits(model: Any, kind: str, targets: Tensor | None = None) -> Tensor:
    logits, targets = model(IDS).logits, TARGETS[kind] if targets is None else targets
    if kind == "a number":
        return mse_loss(logits[:, 0], targets)
    if kind == "next token":
        logits, targets = logits[:, :-1], targets[:, 1:]
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _everywhere(head):
    return register_module_forward_hook(lambda m, x, out: out * 30 if m is head else None)


CHANGES = {
    "nothing": lambda head: None,
    "hook": lambda head: head.register_forward_hook(lambda m, x, out: out * 30),
    "backward pre-hook": lambda head: head.register_full_backward_pre_hook(
        lambda m, out: (out[0] * 3,)
    ),
    "hook of every module": _everywhere,
    "forward of its own": lambda head: setattr(
        head, "forward", lambda x: nn.functional.linear(x, head.weight).tanh()
    ),
    "subclass": lambda head: setattr(head, "__class__", Doubled),
    "spectral norm": spectral_norm,
    "parametrised weight norm": parametrizations.weight_norm,
    "hook of the weight": lambda head: head.weight.register_hook(lambda gradient: gradient * 3),
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", [*OF_TOKENS, "classes"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_head_is_in_the_loss_and_its_gradients(change, kind, training):
    results = []
    for own in (True, False):
        model = _model(kind).train(training)
        handle = CHANGES[change](model.classifier.out_proj if kind == "classes" else model.lm_head)
        with handle if change == "hook of every module" else nullcontext():
            for _ in range(2):  # a spectral norm moves with each
                if own:
                    out = model(IDS, labels=TARGETS[kind])
                    assert training or out.logits is not None
                    sparse = change == "nothing" and kind in OF_TOKENS
                    assert out.logits is None or not (training and sparse)
                loss = out.loss if own else _loss_of_logits(model, kind)
                loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", OF_TOKENS)
def test_the_loss_counts_tokens_as_asked(kind, training):
    model, labels = _model(kind).train(training), TARGETS[kind]
    counted = int((labels[:, kind == "next token" :] != -100).sum())
    want, total = (model(IDS, labels=labels, num_items_in_batch=n).loss for n in (None, 100))
    torch.testing.assert_close(total, want * counted / 100)
    with pytest.raises(ClearheadError, match=r"labels must be int64 \["):
        model(IDS, labels=labels[:, :-1])


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_a_hooked_head_is_called_once_and_gives_the_logits_of_the_loss(kind):
    model, calls = _model(kind), []
    wanted = 30 * model(IDS).logits
    model.lm_head.register_forward_hook(lambda m, x, out: calls.append(1) or out * 30)
    out = model(IDS, labels=TARGETS[kind])
    assert len(calls) == 1
    torch.testing.assert_close(out.logits, wanted)
    if kind == "next token":
        last = model(IDS, labels=TARGETS[kind], logits_to_keep=2)
        torch.testing.assert_close(last.logits, wanted[:, -2:])
        torch.testing.assert_close(last.loss, out.loss)


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_an_adapter_of_the_head_is_in_the_loss_and_learns(kind):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["lm_head"], "r": 2, "init_lora_weights": False}
    model = peft.get_peft_model(_model(kind), peft.LoraConfig(**options))
    wanted = _loss_of_logits(model, kind)
    for training in (False, True):
        loss = model.train(training)(IDS, labels=TARGETS[kind]).loss
        torch.testing.assert_close(loss, wanted)
    loss.backward()
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 2
    assert all(p.grad is not None and p.grad.any() for p in adapters)


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_a_head_with_a_bias_and_one_that_is_offloaded(kind, tmp_path):
    model = _model(kind)
    model.save_pretrained(tmp_path / "model")
    apart = type(model).from_pretrained(
        tmp_path / "model",
        device_map={"model": "cpu", "lm_head": "disk"},
        offload_folder=tmp_path / "disk",
    )
    assert apart.lm_head.weight.is_meta
    with torch.no_grad():
        loss = apart.eval()(IDS, labels=TARGETS[kind]).loss
        torch.testing.assert_close(loss, _loss_of_logits(model, kind))
    model.set_output_embeddings(nn.Linear(16, 31))
    loss = model(IDS, labels=TARGETS[kind]).loss
    torch.testing.assert_close(loss, _loss_of_logits(model, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_evaluates_with_the_loss_of_the_logits(kind, tmp_path):
    model, targets = _model(kind), IDS if kind in OF_TOKENS else TARGETS[kind]
    with torch.no_grad():
        wanted = pytest.approx(_loss_of_logits(model, kind, targets).item(), abs=1e-5)
    rows = [{"input_ids": x, "labels": label} for x, label in zip(IDS, targets, strict=True)]
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings = TrainingArguments(str(tmp_path), learning_rate=0.0, use_cpu=True, **batches, **quiet)
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == [wanted, wanted]  # of both micro-batches together
    assert trainer.evaluate()["eval_loss"] == wanted
