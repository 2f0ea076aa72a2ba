"""Encoders: hidden tokens, classes, the crammed BERT; every token sees the whole text."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from clearhead import (
    ClearheadError,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    ClearheadForSequenceClassification,
    preset,
)
from clearhead.models import plan
from clearhead.models.base_model import ClearheadModel
from clearhead.nn.positions import ScaledSinusoidal
from clearhead.nn.positionwise import MLP

from . import space
from .space import WHOLE as SHAPE

PAD = 60


ONE = torch.ones(1, 3, dtype=torch.long)


@pytest.fixture(params=["bert-sas", "bert-sas-p"])
def shaped(request) -> str:
    return request.param


def _masked(name: str = "bert", **keys: object) -> ClearheadForMaskedLM:
    return ClearheadForMaskedLM(preset(name, **SHAPE | keys))


def _classifier(name: str = "bert", **keys: object) -> ClearheadForSequenceClassification:
    return ClearheadForSequenceClassification(preset(name, **{"num_labels": 3, **SHAPE, **keys}))


def _hidden(ids: Tensor, *places: tuple[int, int]) -> Tensor:
    labels = torch.full_like(ids, -100)
    for row, column in places:
        labels[row, column] = ids[row, column]
    return labels


@pytest.mark.parametrize(
    ("name", "published"), [("bert", 119.5e6), ("bert-sas", 101.3e6), ("bert-sas-p", 101.3e6)]
)
def test_the_crammed_models_have_the_published_number_of_parameters(name, published):
    """SAS: no value or output matrix but the first layer's values."""
    with torch.device("meta"):
        model = ClearheadForMaskedLM(preset(name, "crammed"))
    count, layer = model.num_parameters(), 4 * 768**2 + 3 * 768 * 1536 + 2 * 2 * 768
    assert count == pytest.approx(published, abs=0.1e6)
    assert plan(model.config).parameters == count
    whole = 32_768 * 768 + 1 + 16 * layer + 2 * 2 * 768
    if name == "bert":
        assert count == whole
    else:
        assert whole - count == pytest.approx((2 * 16 - 1) * 768**2, rel=0.01)
        assert {model.config.layer(i).mlp_gain for i in range(16)} == {0.05}


def test_dropout_in_a_shaped_encoder_spares_attention(shaped):
    """Its output is the only way of the signal: dropped from are the MLPs and the embedding."""
    model = ClearheadModel(preset(shaped, **SHAPE, dropout=0.5)).train()
    model.dropout.p = 0.0
    for layer in model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    ids = torch.randint(0, 60, (2, 9))
    with torch.no_grad():
        loud = [model(ids).last_hidden_state for _ in range(2)]
        quiet = model.eval()(ids).last_hidden_state
    torch.testing.assert_close(loud[0], loud[1], rtol=0, atol=0)
    torch.testing.assert_close(loud[0], quiet)


@pytest.mark.parametrize(
    "name", ["bert", "bert-sas", "bert-sas-p", "transformer", "differential", "softmax1", "coca"]
)
def test_the_sparse_loss_is_that_of_the_whole_logits(name):
    model = _masked(name, direction="bidirectional")
    ids = torch.randint(0, 60, (3, 13))
    labels = _hidden(ids, (0, 0), (0, 12), (1, 5), (2, 7), (2, 8))
    with torch.no_grad():
        logits = model.eval()(ids).logits
        told = model(ids, labels=labels)
    assert logits.shape == (3, 13, 61)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(told.loss, want)
    made = model.train()(ids, labels=labels)
    assert made.logits is None, "training holds no logits but those of the hidden places"
    torch.testing.assert_close(made.loss, want)
    made.loss.backward()
    sparse = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logits = model(ids).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sparse[name], parameter.grad, rtol=1e-4, atol=1e-6)
    shared = model(ids, labels=labels, num_items_in_batch=10).loss
    torch.testing.assert_close(shared, want * 0.5)
    with pytest.raises(ClearheadError, match=r"labels must be int64 \["):
        model(ids, labels=labels[:, :-1])


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


def test_kinds_of_problem():
    ids = torch.randint(0, 60, (4, 5))
    model = _classifier()
    labels = torch.tensor([0, 1, 2, 1])
    made = model(ids, labels=labels)
    torch.testing.assert_close(made.loss, F.cross_entropy(made.logits, labels))
    made.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    number = _classifier(num_labels=1)
    targets = torch.tensor([0.5, 1.0, 2.5, 0.0])
    made = number(ids, labels=targets)
    torch.testing.assert_close(made.loss, ((made.logits[:, 0] - targets) ** 2).mean())


@pytest.mark.parametrize(
    ("keys", "inputs", "message"),
    [
        ({"problem_type": "multi_label_classification"}, {}, "choose single_label"),
        ({"problem_type": "regression"}, {}, "with num_labels=3: choose .* with num_labels=1"),
        (
            {"pad_token_id": PAD},
            {"input_ids": torch.tensor([[1, 2, PAD]])},
            "but no attention_mask",
        ),
        *(
            ({}, {"input_ids": ONE, "attention_mask": ONE, name: ONE}, "a row is one text")
            for name in ("document_ids", "position_ids")
        ),
        *(
            (
                {},
                {"input_ids": torch.arange(10).view(2, 5), "labels": torch.tensor([0, label])},
                f"labels has {label}, outside the classes, 0 to 2",
            )
            for label in (3, -1)
        ),
    ],
)
def test_what_a_classifier_refuses(keys, inputs, message):
    with pytest.raises(ClearheadError, match=message):
        _classifier(**keys)(**inputs)


@torch.no_grad()
def test_the_parts_of_the_crammed_bert_by_hand():
    """GEGLU; scaled waves, which start at 1/√width; the norm of the embedding after them."""
    layer = preset("bert", **SHAPE).layer(0)
    mlp = MLP(layer, torch.nn.Identity(), function=F.gelu, gated=True).double()
    x = torch.randn(3, 32, dtype=torch.float64)
    gate, up, down = (m.weight for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    exact = x @ gate.T * 0.5 * (1 + torch.erf(x @ gate.T / math.sqrt(2)))
    torch.testing.assert_close(mlp(x), (exact * (x @ up.T)) @ down.T)
    position = ScaledSinusoidal(layer, 4)
    assert position.scale.item() == pytest.approx(32**-0.5)
    with torch.enable_grad():
        made = position.embed(torch.zeros(1, 5, 32), torch.arange(5)[None])
        made.sum().backward()
    torch.testing.assert_close(position.scale.grad[0], made.sum() * 32**0.5)
    model, ids = ClearheadModel(preset("bert", **SHAPE)).eval(), torch.randint(0, 60, (1, 6))
    first = model(ids, output_hidden_states=True).hidden_states[0]
    summed = model.position.embed(model.embed_tokens(ids), torch.arange(6)[None])
    torch.testing.assert_close(first, F.layer_norm(summed, (32,), eps=1e-12))


def test_dropout_is_on_in_training_alone_and_its_mean_is_the_model_without():
    ids = torch.randint(0, 60, (2, 7))
    model = _masked(dropout=0.1)
    with torch.no_grad():
        quiet = model.eval()(ids).logits
        assert torch.equal(quiet, model(ids).logits)
        loud = [model.train()(ids).logits for _ in range(2)]
    assert not torch.equal(*loud)
    still = _masked().train()
    with torch.no_grad():
        assert torch.equal(still(ids).logits, still(ids).logits)
    dropped = sum(isinstance(m, torch.nn.Dropout) and m.p == 0.1 for m in model.modules())
    assert dropped == 1 + 2 * 2  # after the embedding, and after both branches of each block


BOTH_WAYS = space.WHOLE | {"direction": "bidirectional"}
NAMES = [
    *("transformer", "gpt2", "differential", "differential-v2"),
    *("coca", "coca-strict", "coca-slack", "softmax1", "sink"),
]


def _trunk(name: str, **overrides: object) -> ClearheadModel:
    return ClearheadModel(preset(name, **BOTH_WAYS | overrides)).eval()


_ids = space.drawing(11, 61)


def _run(model: ClearheadModel, ids: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **options).last_hidden_state


@pytest.mark.parametrize("name", NAMES)
def test_the_first_token_sees_the_last_as_in_eager_and_causally_it_does_not(name):
    ids = _ids()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    model = _trunk(name)
    fast = _run(model, ids)
    assert (fast - _run(model, other))[:, 0].abs().max() > 1e-4
    causal = _trunk(name, direction="causal")
    causal.load_state_dict(model.state_dict())
    assert torch.equal(_run(causal, ids)[:, 0], _run(causal, other)[:, 0])
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    assert torch.allclose(out.last_hidden_state, fast, atol=2e-5)
    assert (out.attentions[0][:, :, 0, 1:] != 0).any()


def test_what_needs_a_direction_is_refused():
    with pytest.raises(ClearheadError, match="needs direction='bidirectional'"):
        _masked("transformer")
    for config in (preset("transformer", **BOTH_WAYS), preset("bert", **SHAPE)):
        with pytest.raises(ClearheadError, match="ForCausalLM needs direction"):
            ClearheadForCausalLM(config)
    with pytest.raises(ClearheadError, match="needs direction='causal'"):
        _trunk("transformer")(_ids(), past_key_values=DynamicCache())
    assert _trunk("transformer")(_ids(), use_cache=True).past_key_values is None
