"""The loss is that of the head's own logits, whatever stands in the place of a plain matrix."""

import pytest
import torch
from torch import nn

from clearhead import ClearheadConfig, ClearheadForCausalLM, ClearheadForMaskedLM

from . import space

KINDS = {"causal": ClearheadForCausalLM, "bidirectional": ClearheadForMaskedLM}
IDS = torch.arange(22).view(2, 11)


def _model(direction):
    torch.manual_seed(0)
    keys = {"direction": direction, "tie_word_embeddings": False}
    return KINDS[direction](ClearheadConfig(**space.SHAPE, **keys)).eval()


def _loss_of_logits(model, direction):
    logits, labels = model(IDS).logits, IDS
    if direction == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


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
def test_a_head_with_a_bias(direction):
    model = _model(direction)
    model.set_output_embeddings(nn.Linear(16, 31))
    torch.testing.assert_close(model(IDS, labels=IDS).loss, _loss_of_logits(model, direction))


@pytest.mark.parametrize("direction", KINDS)
def test_a_head_that_is_offloaded(direction, tmp_path):
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
