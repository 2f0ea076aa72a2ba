"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from clearhead.eval import METRICS, predict


def test_accuracy_by_hand():
    assert METRICS["accuracy"]([0, 1, 2, 1], [0, 1, 1, 1]) == 0.75


def test_f1_by_hand():
    # tp = 2, fp = 1, fn = 2: 4 / 7.
    assert METRICS["f1"]([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]) == pytest.approx(4 / 7)
    assert METRICS["f1"]([0, 0], [0, 0]) == 0.0
    assert METRICS["f1"]([1, 1], [1, 1]) == 1.0


def test_matthews_by_hand():
    # tp 2, tn 1, fp 1, fn 2: (2·1 − 1·2) / √(3·4·2·3) = 0.
    assert METRICS["mcc"]([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]) == pytest.approx(0, abs=1e-15)
    # tp 3, tn 2, fp 1, fn 0: 6 / √(4·3·3·2) = 6 / √72.
    found = METRICS["mcc"]([1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0])
    assert found == pytest.approx(6 / math.sqrt(72))
    assert METRICS["mcc"]([0, 1], [1, 0]) == -1.0
    assert METRICS["mcc"]([1, 1], [1, 0]) == 0.0, "one answer for all tells nothing"
    # Three classes, c = 3 of n = 4; p = (1, 2, 1), t = (2, 1, 1):
    # (3·4 − (2 + 2 + 1)) / √((16 − 6)(16 − 6)) = 0.7.
    assert METRICS["mcc"]([0, 1, 1, 2], [0, 0, 1, 2]) == pytest.approx(0.7)


def test_pearson_by_hand():
    assert METRICS["pearson"]([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    # Deviations (−1, 0, 1) and (−1, 1, 0): 1 / √(2·2).
    assert METRICS["pearson"]([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert math.isnan(METRICS["pearson"]([1, 1], [0, 1]))


@pytest.mark.parametrize("labels", [1, 3])
def test_answers_come_in_order_and_without_dropout(labels):
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=31,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            num_labels=labels,
            initializer_range=0.5,
        )
    ).train()
    ids = torch.randint(0, 31, (7, 5))
    batches = [{"input_ids": part, "labels": torch.zeros(len(part))} for part in ids.split(3)]
    found = predict(model, batches)
    assert model.training
    with torch.no_grad():
        logits = model.eval()(ids).logits
    want = logits[:, 0] if labels == 1 else logits.argmax(-1)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5)
