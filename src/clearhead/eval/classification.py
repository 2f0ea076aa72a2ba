"""A classifier's predictions and their metrics: accuracy, F1, Matthews', Pearson's correlation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from clearhead.models.inspection import evaluating

Answers = Sequence[float] | np.ndarray


def accuracy(answers: Answers, labels: Answers) -> float:
    """The share of answers that are right."""
    return float(np.mean(np.asarray(answers) == np.asarray(labels)))


def f1(answers: Answers, labels: Answers) -> float:
    """2 · tp / (2 · tp + fp + fn) of class 1; 0 if neither answers nor labels have it."""
    predicted, actual = np.asarray(answers) == 1, np.asarray(labels) == 1
    positive = int(predicted.sum() + actual.sum())
    return 2.0 * int((predicted & actual).sum()) / positive if positive else 0.0


def matthews(answers: Answers, labels: Answers) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004): that of the indicators of
    all classes; 0 where all answers, or all labels, are one class."""
    predicted, actual = np.asarray(answers), np.asarray(labels)
    classes = np.union1d(predicted, actual)
    correlation = pearson(predicted[:, None] == classes, actual[:, None] == classes)
    return 0.0 if np.isnan(correlation) else correlation


def pearson(answers: Answers, labels: Answers) -> float:
    """Pearson's correlation; NaN where either side is constant."""
    x, y = (np.asarray(side, dtype=np.float64) for side in (answers, labels))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = float((x**2).sum() * (y**2).sum()) ** 0.5
    return float((x * y).sum()) / spread if spread else float("nan")


METRICS: dict[str, Callable[[Answers, Answers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "mcc": matthews,
    "pearson": pearson,
}
"""Metrics of classification by name: functions of predictions and labels."""


def predict(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> np.ndarray:
    """The prediction for each text in order, [N]: int64 class of the largest logit, or float32
    number of a regression. The model runs in its own dtype, in evaluation mode, not in autocast."""
    answers = []
    with evaluating(model):
        for batch in batches:
            inputs = {k: v.to(model.device) for k, v in batch.items() if k != "labels"}
            logits_BN = model(**inputs).logits.float()
            single = logits_BN.shape[-1] == 1
            answers.append((logits_BN[:, 0] if single else logits_BN.argmax(-1)).cpu().numpy())
    return np.concatenate(answers)
