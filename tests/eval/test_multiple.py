"""Multiple choice from files: the prompts and the scores of the lm-evaluation-harness."""

import gzip
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tests_architectures as architectures
import torch

from clearhead import ClearheadError
from clearhead.eval import Item, accuracy, load_items, multiple
from clearhead.eval.continuations import encode_pairs, log_likelihoods
from clearhead.eval.multiple import ChoicesTask
from clearhead.quantize import quantized, scheme

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
        (ROWS["boolq"][0], "line 2 is an item of boolq, and those before are of question"),
    ],
)
def test_rows_that_are_no_item(tmp_path, row, message):
    path = _file(tmp_path, "question", [ROWS["question"][0], row])
    with pytest.raises(ClearheadError, match=message):
        load_items(path, None)


def test_a_compressed_file(tmp_path):
    plain = _file(tmp_path, "question")
    packed = tmp_path / "question.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n\n"))
    assert load_items(packed, None) == load_items(plain, None)


def test_files_of_another_kind(tmp_path):
    broken, other, damaged, rows = (
        tmp_path / name for name in ("b.jsonl", "o.jsonl.gz", "d.jsonl.gz", "r.jsonl")
    )
    broken.write_text('{"question": ')
    other.write_text("plain text")
    whole = gzip.compress(b"{}\n" * 1000)
    damaged.write_bytes(whole[:12] + bytes([whole[12] ^ 255]) + whole[13:])
    rows.write_text("[1, 2]")
    for path, message in (
        (broken, "line 1: not JSON"),
        (other, "not a whole gzip file"),
        (damaged, "not a whole gzip file"),
        (tmp_path / "none.jsonl", r"none\.jsonl: cannot be read"),
    ):
        with pytest.raises(ClearheadError, match=message):
            load_items(path, None)
    with pytest.raises(ClearheadError, match="line 1 is no object of fields"):
        load_items(rows, None)


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


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(one) % 59 for one in text] for text in texts]}


def _items(count: int) -> list[Item]:
    asked = [("why?", (" so", " no", " in truth")), ("who did", (" it", " that at last"))]
    return [
        Item(
            form="question",
            pairs=tuple((prompt * (1 + n // 2), answer) for answer in answers),
            label=n % 2,
            lengths=tuple(map(len, answers)),
        )
        for n, (prompt, answers) in enumerate(asked * count)
    ]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Bloom", "differential", "Mamba"])
@pytest.mark.parametrize("bits", ["w4a4-coarse", None])
def test_answers_alone(name, bits, monkeypatch):
    """Read one at a time, whole: what the plain forward gives, with a scale of one text."""
    model, items = architectures.make(name), _items(2)
    seen: list[list[float]] = []

    def watched(*arguments: Any, **options: Any) -> list[list[float]]:
        seen.extend(log_likelihoods(*arguments, **options))
        return seen

    def score(prompt: str, answer: str) -> float:
        (ids,) = Letters()([prompt + answer])["input_ids"]
        logs = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].double().log_softmax(-1)
        return sum(float(logs[at - 1, ids[at]]) for at in range(len(prompt), len(ids)))

    monkeypatch.setattr(multiple, "log_likelihoods", watched)
    with torch.no_grad(), quantized(model, scheme(bits)) if bits else nullcontext():
        found = accuracy(model, Letters(), items)
        expected = [[score(*pair) for pair in item.pairs] for item in items]
    for one, other in zip(seen, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-4)
    by_length = [
        [score / length for score, length in zip(row, item.lengths, strict=True)]
        for row, item in zip(expected, items, strict=True)
    ]
    for rows, right in ((expected, found.right), (by_length, found.right_by_length)):
        best = [row.index(max(row)) for row in rows]
        assert right == sum(a == item.label for a, item in zip(best, items, strict=True))
    assert found.items == 4
    assert found.chance == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_likelihoods_that_are_none():
    model = architectures.make("Llama")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ClearheadError, match="log-likelihood of an answer is NaN"):
        accuracy(model, Letters(), _items(1))


def test_the_scores_are_those_of_the_harness(tmp_path, make_subject):
    """Where lm-eval is installed: its HFLM on the same pairs, one context cut on the left."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance")
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
