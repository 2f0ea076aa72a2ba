"""Multiple choice from files: prompts, and accuracies against whole forward passes by hand."""

import gzip
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.eval import Questions, accuracy, load_questions
from clearhead.eval.choices import ChoicesTask
from clearhead.quantize import quantized, scheme

from .conftest import numbers

ROWS: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        {
            "activity_label": "Roof",
            "context": "A man is [title] up.  he",
            "choices": ["[step] sails the ship.", "waits", "sings [x] out", "It said"],
            "label": 3,
        },
        {"activity_label": "Sea", "context": "It.", "choices": ["It again!", "no"], "label": 0},
    ],
    "question": [
        {"question": "Who left?", "choices": ["The ship ", "a letter", "é"], "label": 0, "id": "x"},
        {"question": "What?", "choices": ["The captain and the old woman", "It"], "label": 1},
    ],
    "winogrande": [
        {"sentence": "Ann saw Eve so _ was silent.", "choices": ["Ann", "Eve"], "label": 1},
        {"sentence": "The ship left _'s harbour", "choices": ["Eve ", "the woman"], "label": 0},
    ],
    "boolq": [
        {"title": "Sea", "passage": "The ship left.", "question": "did it leave", "label": 1},
        {"passage": "Nobody saw it again!", "question": "was it seen", "label": 0},
    ],
}
# lm-eval's prompts: contexts and what continues each.
PAIRS = {
    "hellaswag": [
        ("Roof: A man is. up. he", "  sails the ship."),
        ("Roof: A man is. up. he", " waits"),
        ("Roof: A man is. up. he", " sings out"),
        ("Roof: A man is. up. he", " It said"),
    ],
    "question": [
        ("Question: Who left?\nAnswer:", " The ship "),
        ("Question: Who left?\nAnswer:", " a letter"),
        ("Question: Who left?\nAnswer:", " é"),
    ],
    "winogrande": [("Ann saw Eve so Ann", " was silent."), ("Ann saw Eve so Eve", " was silent.")],
    "boolq": [
        ("The ship left.\nQuestion: did it leave?\nAnswer:", " no"),
        ("The ship left.\nQuestion: did it leave?\nAnswer:", " yes"),
    ],
}


def _pairs(questions: Questions, number: int) -> list[tuple[str, str]]:
    one = questions.documents[number]
    if questions.form == "winogrande":
        return [(context, f" {one['query']}") for context in one["choices"]]
    return [(one["query"], f" {choice}") for choice in one["choices"]]


def _file(folder: Path, form: str, rows: list[Any] | None = None) -> Path:
    path = folder / f"{form}.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[form] if rows is None else rows)), "utf-8")
    return path


@pytest.mark.parametrize("form", ROWS)
def test_prompts_are_those_of_lm_eval(tmp_path, form):
    path = _file(tmp_path, form)
    found = load_questions(path, None)
    assert found.form == form
    assert _pairs(found, 0) == PAIRS[form]
    assert [one["label"] for one in found.documents] == [row["label"] for row in ROWS[form]]
    assert load_questions(path, 1).documents == found.documents[:1]
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes() + b"\n\n"))
    assert load_questions(packed, None) == found


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "label": 0}, "line 2 lacks some of .*it has text, label"),
        ({"question": "x", "choices": ["a"], "label": 0}, "it has question, choices, label"),
        ({"question": "", "choices": ["a", "b"], "label": 0}, "lacks some of"),
        ({"question": "x", "choices": ["a", "b"], "label": 2}, "label is 2, and the 2 choices"),
        ({"question": "x", "choices": ["a", "b"], "label": True}, "label is True"),
        ({"question": "x", "choices": ["a", "b"]}, "line 2: label is None"),
        ({"passage": "x", "question": "y", "label": "yes"}, "label is 'yes', and the 2 choices"),
        ({"context": "x", "choices": ["a", "b"], "label": 0}, "lacks some of"),
        ({"sentence": "no blank", "choices": ["a", "b"], "label": 0}, "no blank _ with words"),
        ({"sentence": "at the end _", "choices": ["a", "b"], "label": 0}, "no blank _ with words"),
        (
            {"activity_label": "x", "context": "y", "choices": ["[a]", "b"], "label": 0},
            "nothing is left of a choice",
        ),
        (ROWS["boolq"][0], "has items of question and boolq: give a file for each"),
        ([1, 2], "line 2 lacks some of"),
    ],
)
def test_rows_that_are_no_item(tmp_path, row, message):
    path = _file(tmp_path, "question", [ROWS["question"][0], row])
    with pytest.raises(ClearheadError, match=message):
        load_questions(path, None)


def test_files_without_items(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": ')
    (tmp_path / "other.jsonl.gz").write_text("plain text")
    for name, message in (
        ("broken.jsonl", "line 1: not JSON"),
        ("other.jsonl.gz", "not a whole gzip file"),
        ("none.jsonl", "cannot be read"),
        (_file(tmp_path, "question", []).name, "has items of no form: give a file"),
    ):
        with pytest.raises(ClearheadError, match=message):
            load_questions(tmp_path / name, None)


def _scores(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> list[float]:
    """Log-likelihoods, each pair alone and whole, in float64; with the tokens that fit."""
    limit, out = model.config.max_position_embeddings, []
    for context, continuation in pairs:
        count = len(tokenizer(context + continuation)["input_ids"])
        count -= len(tokenizer(context.rstrip())["input_ids"])
        ids = tokenizer(context + continuation)["input_ids"][-limit - 1 :]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        target = torch.tensor(ids[-count:])[:, None]
        out.append(float(logits.double().log_softmax(-1)[-count:].gather(1, target).sum()))
    return out


def _best(scores: list[float]) -> int:
    return scores.index(max(scores))


def _expected(model: Any, tokenizer: Any, questions: Questions) -> dict[str, float]:
    right, right_by_length = [], []
    for number, one in enumerate(questions.documents):
        scores = _scores(model, tokenizer, _pairs(questions, number))
        right.append(_best(scores) == one["label"])
        by_length = [s / len(c) for s, c in zip(scores, one["choices"], strict=True)]
        right_by_length.append(_best(by_length) == one["label"])
    shares = {"accuracy": sum(right) / len(right)}
    if questions.form in ("hellaswag", "question"):
        shares["accuracy_norm"] = sum(right_by_length) / len(right)
    errors = {
        f"{name}_stderr": pytest.approx(math.sqrt(p * (1 - p) / (len(right) - 1)))
        for name, p in shares.items()
    }
    return shares | errors


def test_accuracies_and_their_standard_errors(tmp_path, make_subject):
    pytest.importorskip("lm_eval")
    subject = make_subject()
    long = {**ROWS["boolq"][0], "passage": "The old woman knew, and was silent. " * 20}
    rows = ROWS | {"boolq": [*ROWS["boolq"], long]}  # longer than the model's positions
    task = ChoicesTask(files=tuple(str(_file(tmp_path, form, rows[form])) for form in ROWS))
    cells = task.cells(subject)
    assert [cell["file"] for cell in cells] == [f"{form}.jsonl" for form in ROWS]
    assert len({cell["digest"] for cell in cells}) == len(ROWS)
    for cell, form in zip(cells, ROWS, strict=True):
        questions = load_questions(tmp_path / cell["file"], None)
        done: list[int] = []
        found = numbers(task.measure(subject, cell, done.append))
        assert sum(done) == sum(len(_pairs(questions, n)) for n in range(len(rows[form])))
        expected = _expected(subject.model, subject.tokenizer, questions)
        assert {key: value for key, value in found.items() if "accuracy" in key} == expected
        assert found["low"] <= found["accuracy"] <= found["high"]
        assert found["prompt"] == form
        assert found["items"] == len(rows[form])
        cut = 2 if form == "boolq" else 0  # both answers to the long passage
        assert found["requests_cut"] == cut
        assert ("requests_cut" in found["headlines"]) == bool(cut)
        assert found["chance"] == sum(1 / len(one["choices"]) for one in questions.documents) / len(
            rows[form]
        )
        if form == "hellaswag":
            one = make_subject(batch_tokens=1)
            assert numbers(task.measure(one, cell, lambda _n: None)) == found


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Bloom", "differential", "Mamba"])
@pytest.mark.parametrize("bits", ["w4a4-coarse", None])
def test_answers_alone(tmp_path, subject, name, bits):
    """Read one at a time, whole: the plain forward's, with a quantiser's scale of one text."""
    pytest.importorskip("lm_eval")
    model = architectures.make(name, vocab_size=len(subject.tokenizer))
    rows = [
        {"question": f"{stem} {n}", "choices": list(choices), "label": n % 2}
        for n in range(4)
        for stem, choices in (("Who", ("The ship", "a letter", "It")), ("What", ("no", "truth")))
    ]
    questions = load_questions(_file(tmp_path, "question", rows), None)
    with torch.no_grad(), quantized(model, scheme(bits)) if bits else nullcontext():
        found = accuracy(model, subject.tokenizer, questions)
        expected = _expected(model, subject.tokenizer, questions)
    assert {key: found[key] for key in expected} == expected
    assert found["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_likelihoods_that_are_none(tmp_path, subject):
    pytest.importorskip("lm_eval")
    model = architectures.make("Llama", vocab_size=len(subject.tokenizer))
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ClearheadError, match="logits are not finite"):
        accuracy(model, subject.tokenizer, load_questions(_file(tmp_path, "question"), None))


def test_what_cannot_be_asked(tmp_path, subject, monkeypatch):
    pytest.importorskip("lm_eval")
    path = _file(tmp_path, "question")
    (tmp_path / "other").mkdir()
    other = _file(tmp_path / "other", "question")
    long = _file(tmp_path, "boolq", [{"question": "x", "choices": ["a", "ship " * 70], "label": 0}])
    for task, message in (
        (ChoicesTask(), "choices needs files"),
        (ChoicesTask(files=(str(path),), limit=0), "limit is 0"),
        (ChoicesTask(files=(str(path), str(other))), "two files are called question.jsonl"),
    ):
        with pytest.raises(ClearheadError, match=message):
            task.cells(subject)
    task = ChoicesTask(files=(str(long),))
    with pytest.raises(ClearheadError, match="an answer that the model has no room for"):
        task.measure(subject, task.cells(subject)[0], lambda _count: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.api.task", raising=False)
    with pytest.raises(ClearheadError, match=r"pip install 'clearhead\[lm-eval\]'"):
        ChoicesTask(files=(str(path),)).cells(subject)
