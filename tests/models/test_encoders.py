"""Encoders: hidden tokens, classes, the crammed BERT; every token sees the whole text."""

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

from .space import WHOLE as SHAPE

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
