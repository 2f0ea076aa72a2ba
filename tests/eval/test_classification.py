"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from clearhead.eval.classification import METRICS, predict


@pytest.mark.parametrize(
    ("metric", "answers", "labels", "value"),
    [
        ("accuracy", [0, 1, 2, 1], [0, 1, 1, 1], 0.75),
        ("f1", [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0], 4 / 7),  # tp 2, fp 1, fn 2
        ("f1", [0, 0], [0, 0], 0.0),
        ("f1", [1, 1], [1, 1], 1.0),
        # tp 2, tn 1, fp 1, fn 2: (2·1 − 1·2) / √(3·4·2·3); tp 3, tn 2, fp 1, fn 0: 6 / √(4·3·3·2).
        ("mcc", [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0], 0.0),
        ("mcc", [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], 6 / math.sqrt(72)),
        ("mcc", [0, 1], [1, 0], -1.0),
        ("mcc", [1, 1], [1, 0], 0.0),  # one answer for all tells nothing
        # Three classes, p = (1, 2, 1), t = (2, 1, 1): (3·4 − 5) / √((16 − 6)(16 − 6)).
        ("mcc", [0, 1, 1, 2], [0, 0, 1, 2], 0.7),
        ("pearson", [1, 2, 3], [2, 4, 6], 1.0),
        ("pearson", [1, 2, 3], [1, 3, 2], 0.5),  # deviations (−1, 0, 1), (−1, 1, 0): 1 / √(2·2)
        ("pearson", [1, 1], [0, 1], math.nan),
    ],
)
def test_metrics_by_hand(metric, answers, labels, value):
    found = METRICS[metric](answers, labels)
    assert found == pytest.approx(value, abs=1e-15, nan_ok=True)


@pytest.mark.parametrize("labels", [1, 3])
def test_answers_come_in_order_and_without_dropout(labels):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=31, intermediate_size=8, initializer_range=0.5, **shape)
    config.num_labels = labels
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(0, 31, (7, 5))
    batches = [{"input_ids": part, "labels": torch.zeros(len(part))} for part in ids.split(3)]
    found = predict(model, batches)
    assert model.training
    with torch.no_grad():
        logits = model.eval()(ids).logits
    want = logits[:, 0] if labels == 1 else logits.argmax(-1)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5)
