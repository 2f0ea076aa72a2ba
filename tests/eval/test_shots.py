"""Metrics of classes by hand; many shots against whole forward passes, their orders and prompts."""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace
from statistics import variance
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from clearhead import ClearheadError
from clearhead.data.seeded import SeededChoices
from clearhead.eval.classification import METRICS, predict
from clearhead.eval.shots import Setting, ShotsTask
from clearhead.records.intervals import wilson

from .conftest import log_p, numbers

LABELS = ("card", "card arrival", "card arrival late", "lost")  # each starts the next


def _rows(count, start=0):
    return [
        {"text": f"the  letter {n}\nof the old captain", "label": LABELS[(7 * n + n // 5) % 4]}
        for n in range(start, start + count)
    ]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    def make(rows, name="rows.jsonl"):
        path = tmp_path_factory.mktemp("rows") / name
        with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return str(path)

    return make


@pytest.fixture(scope="module")
def task(write):
    return ShotsTask(
        data=write(_rows(60), "train.jsonl.gz"),
        test=write(_rows(40, start=30)),
        queries=7,
        permutations=2,
        counts=("1", "fill"),
    )


def _by_hand(subject, setting, context):
    """The likeliest label of each query, by whole texts, one by one."""
    found = []
    for question in setting.questions:
        texts = [((*context, *question, *answer), len(answer)) for answer in setting.answers]
        scores = [sum(log_p(subject.model, *text)) for text in texts]
        found.append(scores.index(max(scores)))
    return found


@pytest.mark.parametrize("name", ["transformer", "differential"])
def test_a_cell_is_what_is_found_by_hand(make_subject, task, name):
    subject = make_subject(name, lengths=(192,))
    subject.model.double()
    setting = Setting(task, subject)
    labels = [query.label for query in setting.queries]
    for cell in task.cells(subject):
        found = numbers(task.measure(subject, cell))
        shown = setting.shown(192, cell["shots"])
        accuracies = []
        for number in range(2):
            order = SeededChoices(f"shots 0 random {number}").sample(shown, len(shown))
            answers = _by_hand(subject, setting, setting.context(order))
            accuracies.append(sum(a == b for a, b in zip(answers, labels, strict=True)) / 7)
        assert found["accuracies"] == accuracies
        assert found["accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert (found["low"], found["high"]) == pytest.approx(wilson(7 * found["accuracy"], 7))
        assert found["chance"] == 1 / 4
        assert found["commonest"] == max(Counter(labels).values()) / 7
        if cell["shots"] == "1":  # one demonstration has one order
            assert found["margin"] is found["variance"] is None
        else:
            assert found["margin"] == max(accuracies) - min(accuracies)
            assert found["variance"] == pytest.approx(variance(accuracies))


def test_prompts_fit_the_length_and_never_show_a_query(subject, task):
    setting = Setting(task, subject)
    asked = {query.text for query in setting.queries}
    assert asked & {row["text"].replace("  ", " ").replace("\n", " ") for row in _rows(60)}
    longest = max(map(len, setting.questions)) + max(map(len, setting.answers))
    before = []
    for length in (128, 192, 256):
        shown = setting.shown(length, "fill")
        assert shown[: len(before)] == before  # a longer context has the shorter one's
        before = shown
        assert not asked & {example.text for example in shown}
        assert len(set(shown)) == len(shown)
        used = len(setting.context(shown)) + longest
        assert length - 40 < used <= length
    text = subject.tokenizer.decode(setting.context(shown)).removeprefix("<|begin|>")
    assert text == "".join(f"text: {e.text}\nlabel: {LABELS[e.label]}\n\n" for e in shown)


def test_draws_follow_the_seed_alone(make_subject, task):
    setting = Setting(replace(task, test="", queries=20), make_subject())
    assert (len(setting.queries), len(setting.pool)) == (20, 40)
    assert not set(setting.queries) & set(setting.pool)
    first, again, other = (Setting(task, make_subject(seed=seed)) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    assert first.shown(192, "fill") == again.shown(192, "fill") != other.shown(192, "fill")


def _letters(text):
    return tuple(map(ord, text))


@pytest.mark.parametrize(
    ("encode", "labels", "message"),
    [
        (_letters, ("a", ""), "label '' has no tokens of its own"),
        (
            lambda t: _letters(t.replace("q", "").replace(" ", "")),
            ("a", "q"),
            "'q' has no tokens of its own",
        ),
        (lambda t: _letters(t.lower()), ("Ab", "aB"), "'Ab' has no tokens of its own"),
        (lambda t: _letters(t.strip()), ("a", "b"), "no token ends a line"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused(write, encode, labels, message):
    rows = [{"text": f"{n}", "label": labels[n % 2]} for n in range(4)]
    subject = SimpleNamespace(ids=lambda *pieces: [*map(encode, pieces)], begin=(), seed=0)
    with pytest.raises(ClearheadError, match=message):
        Setting(ShotsTask(data=write(rows), queries=1), subject)


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, [{"sentence": "a", "label": "b"}], r"line 1: no field 'text', it has 'sentence', 'la"),
        ({}, [*_rows(9), {"text": "a", "label": ["b"]}], r"line 10: a label is a name .*\['b'\]"),
        ({}, _rows(1) * 3, "all 3 training rows have class"),
        ({"queries": 31}, _rows(30), "queries is 31, and .* has 30 rows"),
        ({"counts": ("9",)}, _rows(12), "shots: 9 asked for, and 4 of 8 examples fit"),
        ({}, _rows(8), r"shots: fill asked for, and 4 of 4 examples fit"),
        ({}, [{"text": f"{n} " * 300, "label": n % 2} for n in range(8)], "fit the 0 tokens"),
        ({"counts": ("two",)}, _rows(30), "'two' is no whole number above 0, nor fill"),
        ({"data": ""}, _rows(3), "give a .jsonl"),
        ({"counts": ()}, _rows(3), "counts are none: give at least one"),
    ],
)
def test_refuses_at_once_what_cannot_be_measured(make_subject, write, changes, rows, message):
    options = {"data": write(rows), "queries": 4, **changes}
    with pytest.raises(ClearheadError, match=message) as error:
        ShotsTask(**options).cells(make_subject())
    assert "\n" not in str(error.value)


def test_refuses_labels_that_are_not_shown(subject, write, task):
    odd = replace(task, test=write([{"text": "a", "label": "other"}]), queries=1)
    with pytest.raises(ClearheadError, match="label 'other' is outside the 4 classes"):
        odd.cells(subject)


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
