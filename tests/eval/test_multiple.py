"""Multiple choice from files: the prompts and the scores of the lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import ClearheadError
from clearhead.eval.items import load_items
from clearhead.eval.multiple import ChoicesTask

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
PAIRS = {
    "hellaswag": [
        ("Roof: A man is. up. he", "  sails the ship."),  # as it is there
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
LENGTHS = {"hellaswag": (16, 5, 9, 7), "question": (9, 8, 1), "winogrande": None, "boolq": None}


def _file(folder: Path, form: str, rows: list[Any] | None = None) -> Path:
    path = folder / f"{form}.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[form] if rows is None else rows)), "utf-8")
    return path


@pytest.mark.parametrize("form", ROWS)
def test_prompts(tmp_path, form):
    path = _file(tmp_path, form)
    first, second = load_items(path, None)
    assert first.form == second.form == form
    assert list(first.pairs) == PAIRS[form]
    assert first.lengths == LENGTHS[form]
    assert [first.label, second.label] == [row["label"] for row in ROWS[form]]
    assert load_items(path, 1) == [first]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "label": 0}, "line 2 lacks some of .*it has text, label"),
        ({"question": "x", "choices": ["a"], "label": 0}, "it has question, choices, label"),
        ({"question": "", "choices": ["a", "b"], "label": 0}, "lacks some of"),
        ({"question": "x", "choices": ["a", "b"], "label": 2}, "label is 2, and the 2 choices"),
        ({"question": "x", "choices": ["a", "b"], "label": True}, "label is True"),
        ({"question": "x", "choices": ["a", "b"]}, "lacks label.*it has question, choices"),
        ({"passage": "x", "question": "y", "label": "yes"}, "label is 'yes', and the 2 choices"),
        ({"context": "x", "choices": ["a", "b"], "label": 0}, "lacks some of"),
        ({"sentence": "no blank", "choices": ["a", "b"], "label": 0}, "no blank _ with words"),
        ({"sentence": "at the end _", "choices": ["a", "b"], "label": 0}, "no blank _ with words"),
        (
            {"activity_label": "x", "context": "y", "choices": ["[a]", "b"], "label": 0},
            "nothing is left of a choice",
        ),
        (ROWS["boolq"][0], "begins with items of question, and line 2 is one of boolq"),
    ],
)
def test_rows_that_are_no_item(tmp_path, row, message):
    path = _file(tmp_path, "question", [ROWS["question"][0], row])
    with pytest.raises(ClearheadError, match=message):
        load_items(path, None)


def test_a_file_without_items(tmp_path):
    with pytest.raises(ClearheadError, match="has no items: give a row a line"):
        load_items(_file(tmp_path, "question", []), None)


def _naive(subject, row: Any) -> list[float]:
    """Each pair alone, whole, in float64; with the tokens that fit."""
    model, out = subject.model, []
    for context, continuation in row:
        before = subject.tokenizer(context.rstrip())["input_ids"]
        ids = subject.tokenizer(context + continuation)["input_ids"]
        count = len(ids) - len(before)
        ids = ids[-model.config.max_position_embeddings - 1 :]
        with torch.no_grad():
            logs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        picked = logs[-count:].gather(1, torch.tensor(ids[-count:])[:, None])
        out.append(float(picked.sum()))
    return out


def test_accuracies(tmp_path, make_subject):
    subject = make_subject()
    task = ChoicesTask(files=tuple(str(_file(tmp_path, form)) for form in ROWS))
    cells = task.cells(subject)
    assert [cell["file"] for cell in cells] == [f"{form}.jsonl" for form in ROWS]
    assert len({cell["digest"] for cell in cells}) == len(ROWS)
    for cell, form in zip(cells, ROWS, strict=True):
        scores = [_naive(subject, item.pairs) for item in load_items(tmp_path / cell["file"], None)]
        labels = [row["label"] for row in ROWS[form]]
        raw = [max(range(len(row)), key=row.__getitem__) for row in scores]
        done: list[int] = []
        found = task.measure(subject, cell, done.append)
        assert sum(done) == sum(map(len, scores))
        assert found["accuracy"] == sum(a == b for a, b in zip(raw, labels, strict=True)) / 2
        assert found["low"] <= found["accuracy"] <= found["high"]
        assert found["prompt"] == form
        assert found["items"] == 2
        assert found["chance"] == sum(1 / len(row) for row in scores) / 2
        if LENGTHS[form] is None:
            assert "accuracy_norm" not in found  # nor has the harness one
            continue
        items = load_items(tmp_path / cell["file"], None)
        best = [
            max(range(len(row)), key=lambda n, row=row, item=item: row[n] / item.lengths[n])
            for row, item in zip(scores, items, strict=True)
        ]
        assert found["accuracy_norm"] == sum(a == b for a, b in zip(best, labels, strict=True)) / 2
    assert task.measure(make_subject(batch_tokens=1), cells[0], lambda _n: None) == task.measure(
        subject, cells[0], lambda _n: None
    )


def test_the_scores_are_those_of_the_harness(tmp_path, make_subject):
    """Where lm-eval is installed: its HFLM on the same pairs, one context cut on the left."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance")
    from clearhead.eval.continuations import encode_pairs, log_likelihoods

    subject = make_subject()
    long = {**ROWS["boolq"][0], "passage": "The old woman knew, and was silent. " * 20}
    paths = [_file(tmp_path, form) for form in ("hellaswag", "question", "winogrande")]
    paths.append(_file(tmp_path, "boolq", [*ROWS["boolq"], long]))
    items = [item for path in paths for item in load_items(path, None)]
    limit = subject.model.config.max_position_embeddings
    found = log_likelihoods(
        subject.model,
        subject.reader.prefill,
        [encode_pairs(subject.tokenizer, item.pairs, limit) for item in items],
        batch_tokens=500,
        advanced=lambda _n: None,
    )
    harness = huggingface.HFLM(
        pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=3, device="cpu"
    )
    pairs = [pair for item in items for pair in item.pairs]
    asked = [
        instance.Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n)
        for n, pair in enumerate(pairs)
    ]
    expected = [score for score, _ in harness.loglikelihood(asked, disable_tqdm=True)]
    assert [one for row in found for one in row] == pytest.approx(expected, abs=1e-3, rel=1e-5)


def test_what_cannot_be_asked(tmp_path, subject):
    path = _file(tmp_path, "question")
    (tmp_path / "other").mkdir()
    other = _file(tmp_path / "other", "question")
    long = _file(tmp_path, "boolq", [{"question": "x", "choices": ["a", "ship " * 70], "label": 0}])
    for task, message in (
        (ChoicesTask(), "choices needs files"),
        (ChoicesTask(files=(str(path),), limit=0), "limit is 0"),
        (ChoicesTask(files=(str(path), str(other))), "two files are called question.jsonl"),
        (ChoicesTask(files=(str(long),)), "tokens is longer than the 64 of the model"),
    ):
        with pytest.raises(ClearheadError, match=message):
            task.cells(subject)
