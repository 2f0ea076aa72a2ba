"""The tools around transformers, on every attention of the house."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from clearhead import ClearheadForCausalLM, preset

from .space import WHOLE as SHAPE


def _model(name: str, **overrides: object) -> ClearheadForCausalLM:
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **SHAPE | overrides)).eval()


def _ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (batch, length))


@pytest.mark.parametrize("name", ["differential-v2", "coca-slack"])
def test_dtype_device_map_and_untied_embeddings(name, tmp_path):
    _model(name, tie_word_embeddings=False).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model(_ids()).logits.isfinite().all()


def test_transformers_own_trainer(tmp_path):
    model = _model("differential")
    rows = [{"input_ids": row, "labels": row} for row in _ids(batch=4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["differential", "coca"])
def test_lora(name):
    peft = pytest.importorskip("peft")
    model, ids = _model(name), _ids()
    before = model(ids).logits
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings).eval()
    assert torch.allclose(adapted(input_ids=ids).logits, before, atol=1e-5)
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    trained = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in n for n in trained)
    assert any(g.abs().max() > 0 for g in trained.values())
