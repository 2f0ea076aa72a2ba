"""Multiple choice: log-likelihoods against whole log-softmaxes, and files that are none."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.eval import Question, accuracy, load_questions
from clearhead.eval.choices import _score

BEGIN = 60


class Letters:
    """A tokenizer of single characters; after a begin token where `bos` is set."""

    def __init__(self, bos: int | None = BEGIN) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 59 for letter in text]}


@pytest.mark.parametrize("bos", [None, BEGIN])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma2", "differential"])
def test_the_log_likelihood_of_an_answer(name, bos):
    model, letters = architectures.make(name), Letters(bos)
    question = Question(prompt="why?", choices=("so", "no"), label=0)
    ids = ([] if bos is None else [bos]) + letters("why? so", False)["input_ids"]
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found = _score(model, letters, question, "so")
    expected = sum(float(logs[at - 1, ids[at]]) for at in range(len(ids) - 3, len(ids)))
    assert found == pytest.approx(expected, abs=1e-4)  # " so": a space and two letters


def test_both_accuracies(monkeypatch):
    scores = {"a": -3.0, "bbbb": -4.0, "cc": -2.5, "dddddddd": -9.0}
    monkeypatch.setattr("clearhead.eval.choices._score", lambda _m, _t, _q, choice: scores[choice])
    questions = [
        Question(prompt="1", choices=("a", "bbbb"), label=0),  # raw right; per byte the other
        Question(prompt="2", choices=("cc", "dddddddd"), label=0),  # raw right; per byte the other
        Question(prompt="3", choices=("a", "bbbb", "cc", "dddddddd"), label=1),  # per byte right
    ]
    found = accuracy(architectures.make("Llama"), Letters(), questions)
    assert found.questions == 3
    assert found.raw == pytest.approx(2 / 3)
    assert found.normalised == pytest.approx(1 / 3)
    assert found.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert found.error == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))


def test_a_long_question_loses_its_beginning():
    model, letters = architectures.make("GPT-2"), Letters()
    short = Question(prompt="y" * (architectures.LENGTH - 4), choices=("so", "no"), label=0)
    long = Question(prompt="x" * 50 + short.prompt, choices=("so", "no"), label=0)
    with torch.no_grad():
        assert math.isfinite(_score(model, letters, long, "so"))
    with pytest.raises(ClearheadError, match="leaves no room for its question in the model's 32"):
        _score(model, letters, long, "s" * 40)


def test_likelihoods_that_are_none():
    model = architectures.make("Llama")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ClearheadError, match="log-likelihood of an answer is NaN"):
        accuracy(model, Letters(), [Question(prompt="a", choices=("b", "c"), label=0)])


def test_a_token_that_the_model_does_not_know():
    with pytest.raises(ClearheadError, match="use the tokenizer that the model was trained with"):
        _score(
            architectures.make("Llama"), Letters(99), Question(prompt="a", choices=(), label=0), "b"
        )


def _written(path: Path, rows: list[Any]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz"])
def test_files_of_questions(tmp_path, name):
    rows = [
        {"question": "Which?", "choices": ["a", "b"], "label": 1, "id": "x"},
        {"context": "A man", "activity_label": "Roof", "choices": ["runs", "is"], "label": 0},
        {"context": "A man", "choices": ["runs", "is"], "label": 0},
    ]
    path = _written(tmp_path / name, rows)
    found = load_questions(path)
    assert [question.prompt for question in found] == [
        "Question: Which?\nAnswer:",
        "Roof: A man",
        "A man",
    ]
    assert found[0].choices == ("a", "b")
    assert [question.label for question in found] == [1, 0, 0]
    assert load_questions(path, limit=2) == found[:2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "label": "y"}, r"line 1 lacks choices .*it has text, label"),
        ({"question": "x", "choices": ["a"], "label": 0}, "lacks choices"),
        ({"question": "x", "choices": ["a", ""], "label": 0}, "lacks choices"),
        ({"question": "x", "choices": ["a", 2], "label": 0}, "lacks choices"),
        ({"question": "", "choices": ["a", "b"], "label": 0}, "lacks choices"),
        ({"question": "x", "choices": ["a", "b"], "label": 2}, "label is 2, and the 2 choices"),
        ({"question": "x", "choices": ["a", "b"], "label": "b"}, "label is 'b'"),
        ({"question": "x", "choices": ["a", "b"], "label": True}, "label is True"),
        ({"question": "x", "choices": ["a", "b"]}, "label is None"),
        ([1, 2], "is no object"),
    ],
)
def test_rows_that_are_no_question(tmp_path, row, message):
    with pytest.raises(ClearheadError, match=message):
        load_questions(_written(tmp_path / "q.jsonl", [row]))


def test_files_that_hold_no_questions(tmp_path):
    empty, broken, other = (tmp_path / name for name in ("e.jsonl", "b.jsonl", "o.jsonl.gz"))
    empty.write_text("\n\n")
    broken.write_text('{"question": ')
    other.write_text("plain text")
    whole, damaged = gzip.compress(b"{}\n" * 1000), tmp_path / "d.jsonl.gz"
    damaged.write_bytes(whole[:12] + bytes([whole[12] ^ 255]) + whole[13:])
    with pytest.raises(ClearheadError, match="has no questions"):
        load_questions(empty)
    for path in (broken, other, damaged):
        with pytest.raises(ClearheadError, match=r"is no \.jsonl or \.jsonl\.gz file"):
            load_questions(path)
    with pytest.raises(FileNotFoundError):  # the command line says this in a line
        load_questions(tmp_path / "none.jsonl")
