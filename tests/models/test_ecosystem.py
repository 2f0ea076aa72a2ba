"""The tools around transformers, on every attention of the house."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from clearhead import ClearheadForCausalLM, preset

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
NAMES = [
    "transformer",
    "gpt2",
    "differential",
    "differential-v2",
    "coca",
    "coca-strict",
    "coca-slack",
    "softmax1",
    "sink",
    "key-value",
    "alibi",
    "xpos",
]


def _model(name: str, **overrides: object) -> ClearheadForCausalLM:
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset(name, **SHAPE, initializer_range=0.3, **overrides)).eval()


def _ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (batch, length))


def _generate(model: ClearheadForCausalLM, ids: Tensor, **options: object) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **options)


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    model, ids = _model(name), _ids()
    greedy = _generate(model, ids, do_sample=False)
    slow = ids
    for _ in range(8):
        slow = torch.cat([slow, model(slow, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, slow)
    torch.manual_seed(1)
    sampled = _generate(model, ids, do_sample=True, top_p=0.9)
    torch.manual_seed(1)
    assert torch.equal(sampled, _generate(model, ids, do_sample=True, top_p=0.9))
    beams = _generate(model, ids, num_beams=3, do_sample=False)
    assert beams.shape == greedy.shape

    def likelihood(out: Tensor) -> Tensor:
        logits = model(out[:, :-1]).logits.log_softmax(-1)[:, ids.shape[1] - 1 :]
        return logits.gather(2, out[:, ids.shape[1] :, None]).sum((1, 2))

    assert (likelihood(beams) >= likelihood(greedy) - 1e-3).all()


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
