"""Heads: the loss is of their own logits, also in Hugging Face's Trainer; encoders and classes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, spectral_norm
from transformers import DynamicCache, Trainer, TrainingArguments

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM, ClearheadForMaskedLM
from clearhead.models import ClearheadForSequenceClassification, plan, preset
from clearhead.models.base_model import ClearheadModel

from . import space
from .space import WHOLE as SHAPE

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
    where = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": tmp_path / "disk"}
    apart = type(model).from_pretrained(tmp_path / "model", **where)
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


PAD = 60
ONE = torch.ones(1, 3, dtype=torch.long)


def _masked(name: str = "bert", **keys: object) -> ClearheadForMaskedLM:
    return ClearheadForMaskedLM(preset(name, **SHAPE | keys))


def _classifier(name: str = "bert", **keys: object) -> ClearheadForSequenceClassification:
    return ClearheadForSequenceClassification(preset(name, **{"num_labels": 3, **SHAPE, **keys}))


@pytest.mark.parametrize(
    ("name", "published"), [("bert", 119.5e6), ("bert-sas", 101.3e6), ("bert-sas-p", 101.3e6)]
)
def test_the_crammed_models_have_the_published_number_of_parameters(name, published):
    with torch.device("meta"):
        model = ClearheadForMaskedLM(preset(name, "crammed"))
    assert model.num_parameters() == pytest.approx(published, abs=0.1e6)
    assert plan(model.config).parameters == model.num_parameters()
    gains = {model.config.layer(i).mlp_gain for i in range(16)}
    assert gains == ({None} if name == "bert" else {0.05})


@pytest.mark.parametrize("name", ["bert-sas", "bert-sas-p"])
def test_dropout_in_a_shaped_encoder_spares_attention(name):
    """Its output is the only way of the signal: dropped from are the MLPs and the embedding."""
    model = ClearheadModel(preset(name, **SHAPE, dropout=0.5)).train()
    model.dropout.p = 0.0
    for layer in model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    ids = torch.randint(0, 60, (2, 9))
    with torch.no_grad():
        loud = [model(ids).last_hidden_state for _ in range(2)]
        quiet = model.eval()(ids).last_hidden_state
    torch.testing.assert_close(loud[0], loud[1], rtol=0, atol=0)
    torch.testing.assert_close(loud[0], quiet)


def _padded(ids: Tensor, before: int, after: int) -> dict[str, Tensor]:
    mask = F.pad(torch.ones_like(ids), (before, after))
    return {"input_ids": F.pad(ids, (before, after), value=PAD), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bert", {}),
        ("bert-sas", {"query_range": 0.3}),
        ("bert-sas-p", {"query_range": 0.3}),
        ("transformer", {}),
        ("transformer", {"direction": "bidirectional"}),
        ("gpt2", {}),
        ("differential", {"direction": "bidirectional"}),
        ("differential-v2", {"direction": "bidirectional"}),
        ("softmax1", {"direction": "bidirectional"}),
        ("coca", {"direction": "bidirectional"}),
        ("alibi", {}),
    ],
)
def test_padding_of_any_length_on_any_side_changes_no_logit(name, keys):
    model = _classifier(name, pad_token_id=PAD, **keys).eval()
    ids = torch.randint(0, 60, (2, 7))
    with torch.no_grad():
        want = model(ids).logits
        assert want.std() > 0.01
        for before, after in [(0, 1), (0, 9), (1, 0), (8, 0), (3, 5)]:
            found = model(**_padded(ids, before, after)).logits
            torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-5)
        # Rows of unequal length, each padded to the longest.
        rows = [_padded(ids[:1], 4, 0), _padded(torch.randint(0, 60, (1, 11)), 0, 0)]
        both = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        torch.testing.assert_close(model(**both).logits[:1], want[:1], rtol=1e-4, atol=2e-5)


def test_the_head_reads_the_first_token_of_an_encoder_and_the_last_of_a_causal_model():
    ids = torch.randint(0, 60, (2, 7))
    for name, place in (("bert", 0), ("transformer", -1)):
        model = _classifier(name).eval()
        with torch.no_grad():
            state = model.model(ids).last_hidden_state[:, place]
            head = model.classifier
            want = head.out_proj(torch.tanh(head.dense(state)))
            torch.testing.assert_close(model(ids).logits, want)
        assert head.dense.out_features == 1024


@pytest.mark.parametrize(
    ("keys", "inputs", "message"),
    [
        ({"problem_type": "multi_label_classification"}, {}, "choose single_label"),
        ({"problem_type": "regression"}, {}, "with num_labels=3: choose .* with num_labels=1"),
        ({"pad_token_id": PAD}, {"input_ids": ONE * PAD}, "but no attention_mask"),
        *(
            ({}, {"input_ids": ONE, "attention_mask": ONE, name: ONE}, "a row is one text")
            for name in ("document_ids", "position_ids")
        ),
        *(
            (
                {},
                {"input_ids": ONE, "labels": ONE[:, 0] * label},
                f"labels has {label}, outside the",
            )
            for label in (3, -1)
        ),
    ],
)
def test_what_a_classifier_refuses(keys, inputs, message):
    with pytest.raises(ClearheadError, match=message):
        _classifier(**keys)(**inputs)


def test_dropout_is_after_the_embedding_and_both_branches_and_on_in_training_alone():
    ids, model = torch.randint(0, 60, (2, 7)), _masked(dropout=0.1)
    with torch.no_grad():
        quiet, again = (model.eval()(ids).logits for _ in range(2))
        loud, other = (model.train()(ids).logits for _ in range(2))
    assert torch.equal(quiet, again)
    assert not torch.equal(loud, other)
    assert sum(isinstance(m, torch.nn.Dropout) and m.p == 0.1 for m in model.modules()) == 1 + 2 * 2


def test_what_needs_a_direction_is_refused():
    with pytest.raises(ClearheadError, match="needs direction='bidirectional'"):
        _masked("transformer")
    with pytest.raises(ClearheadError, match="ForCausalLM needs direction"):
        ClearheadForCausalLM(preset("bert", **SHAPE))
    with pytest.raises(ClearheadError, match="needs direction='causal'"):
        _masked()(ONE, past_key_values=DynamicCache())
    assert _masked().model(ONE, use_cache=True).past_key_values is None
