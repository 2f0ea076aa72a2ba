"""Contextual hallucination: texts by whole forward passes, words counted, judges that fail."""

import json
from dataclasses import replace

import pytest
import tests_judge_server as served
import torch

from clearhead import ClearheadError
from clearhead.eval.hallucination import HallucinationTask, bigrams, contains, grounding, names
from clearhead.eval.judge import Judge, JudgeConfig
from clearhead.records.intervals import wilson

from .conftest import numbers


def _ignore(steps):
    pass


@pytest.fixture
def task(tmp_path):
    """Six questions on documents of unlike lengths."""
    rows = [
        {
            "question": f"who left {n}",
            "answers": ["the ship", "Ann"],
            "passage": "The ship left the harbour in the morning. " * (1 + 5 * n % 7),
        }
        for n in range(6)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = {"text_field": "passage", "label_field": "answers", "pair_field": "question"}
    return HallucinationTask(files=(str(path),), answer_tokens=7, **fields)


@pytest.fixture
def summaries(tmp_path):
    path = tmp_path / "stories.jsonl"
    rows = [
        {"document": f"{n} The old woman knew, and was silent. " * 30, "summary": "x"}
        for n in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return HallucinationTask(files=(str(path),), summary_tokens=9)


@pytest.fixture
def subject(make_subject):
    subject = make_subject(lengths=(192,))
    subject.model.double()
    return subject


def _by_hand(subject, ids, new_tokens):
    """Greedy decoding of one prompt by whole forward passes."""
    ids, start = list(ids), len(ids)
    for _ in range(new_tokens):
        with torch.no_grad():
            token = int(subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == subject.tokenizer.eos_token_id:
            break
        ids.append(token)
    return subject.decode(ids[start:])


def test_texts_and_measures_are_what_is_found_by_hand(subject, task, summaries):
    for one, new_tokens, stop in ((task, 7, "\n"), (summaries, 9, "\n\n")):
        (cell,) = one.cells(subject)
        advanced = []
        found = numbers(one.measure(subject, cell, advanced.append))
        rows, documents, prompts = one._asked(subject, one.files[0], 192)
        texts = [
            _by_hand(subject, prompt.ids, new_tokens).strip().partition(stop)[0].rstrip()
            for prompt in prompts
        ]
        assert found["texts"] == texts
        assert sum(advanced) == len(rows) == found["items"]
        counts = grounding(texts, documents)
        assert {key: found[key] for key in counts} == pytest.approx(counts)
        assert ("answer_contained" in found) == (one is task)
        assert "accuracy" not in found
        for row, prompt in zip(rows, prompts, strict=True):
            asked = subject.decode(prompt.ids)
            assert row.text[:20] in asked
            assert asked.endswith("Answer:" if one is task else "\n\nSummary:")
            if one is task:
                assert f"\n\nQuestion: {row.pair}\n" in asked


def test_a_document_that_is_too_long_loses_its_end(subject, summaries):
    (cell,) = summaries.cells(subject)
    assert numbers(summaries.measure(subject, cell, _ignore))["cut"] == 1
    rows, documents, prompts = summaries._asked(subject, summaries.files[0], 192)
    for row, document, prompt in zip(rows, documents, prompts, strict=True):
        assert len(prompt.ids) == 192 - 9
        assert row.text.startswith(document)
        assert len(document) > 100
        assert document in subject.decode(prompt.ids)


def test_samples_are_drawn_by_the_seed_alone(make_subject, task):
    def asked(seed, samples):
        subject = make_subject(lengths=(192,), seed=seed)
        rows, _, _ = replace(task, samples=samples)._asked(subject, task.files[0], 192)
        return [row.pair for row in rows]

    assert len(asked(0, 100)) == 6
    assert len(set(asked(0, 4))) == 4
    assert asked(0, 4) == asked(0, 4)
    assert any(asked(0, 4) != asked(seed, 4) for seed in (1, 2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ()}, "hallucination needs files"),
        ({"files": ("a/x.jsonl", "b/x.jsonl")}, "two files are called x.jsonl"),
        ({"files": ("none.jsonl",)}, "no such file"),
        ({"samples": 0}, "samples is 0"),
        ({"answer_tokens": 0}, "tokens is 0"),
        ({"answer_tokens": 190}, r"takes \d+ tokens without it, its answer 190; give longer"),
        ({"text_field": "story"}, "no field 'story', it has .*--hallucination.text-field"),
        ({"label_field": "answer"}, "--hallucination.label-field answers"),
        ({"judge": JudgeConfig(endpoint="http://127.0.0.1:1/v1")}, "a judge needs a judge.model"),
    ],
)
def test_refuses_at_once_what_cannot_be_measured(subject, task, changes, message):
    with pytest.raises(ClearheadError, match=message) as error:
        replace(task, **changes).cells(subject)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "row", [{"document": " ", "summary": "x"}, {"document": "x", "summary": 3}]
)
def test_refuses_rows_that_say_nothing(subject, tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ClearheadError, match="line 1: give a document and a reference, not empty"):
        HallucinationTask(files=(str(tmp_path / "rows.jsonl"),)).cells(subject)


def test_refuses_lengths_beyond_learned_positions(make_subject, task):
    with pytest.raises(ClearheadError, match="64 learned positions of this model"):
        task.cells(make_subject("gpt2"))


def test_words_are_counted():
    found = grounding(
        ["Then Ann saw the ship.", "A ship, and Tom"],
        ["Ann saw a ship in 1900.", "the Ship and Bea"],
    )
    # "then ann", "ann saw", "saw the", "the ship"; "a ship", "ship and", "and tom"
    assert found["bigram_support"] == 2 / 7
    assert found["unsupported_names"] == 1 / 2  # Tom of Ann, Tom
    assert found["names_above_chance"] == 1 - 1 / 2
    nothing = grounding([""], ["a b"])
    assert nothing["bigram_support"] is nothing["unsupported_names"] is None
    assert nothing["names_above_chance"] is None


def test_names_follow_a_word_of_their_sentence():
    assert names("Tom met Ann, Bea's aunt. Later I'm at NASA (Paris) in May") == {
        *("ann", "bea", "nasa", "may")
    }
    assert bigrams("A b, a B.") == {("a", "b"), ("b", "a")}
    assert contains("It was THE ship.", ["Ann", "the Ship"])
    assert not contains("It was shipped", ["ship", "", "?"])


def _judged(task, server, **changes):
    return replace(task, judge=JudgeConfig(endpoint=server.url, model="gpt-x", **changes))


def _verdict(prompt):
    """By the question's number: four supported, one not, one undecided."""
    for number, said in ((1, "Conclusion: False"), (4, "who knows")):
        if f"who left {number}" in prompt:
            return served.completion(said)
    return served.completion("So it is.\n**Conclusion: True**")


def test_a_judge_gives_the_accuracy(subject, task, judge):
    judge.answer = _verdict
    task = _judged(task, judge)
    (cell,) = task.cells(subject)
    assert cell["judge"] == "gpt-x"
    found = numbers(task.measure(subject, cell, _ignore))
    assert found["accuracy"] == 4 / 5
    assert (found["low"], found["high"]) == wilson(4, 5)
    assert (found["undecided"], found["unjudged"], found["items"]) == (1, 0, 6)
    assert (found["judged_by"], found["judge_failures"]) == (["judge-2026"], [])
    rows, documents, _ = task._asked(subject, task.files[0], 192)
    for asked, row, document, text in zip(
        judge.prompts, rows, documents, found["texts"], strict=True
    ):
        for part in (document, row.pair, "the ship; Ann", f"Proposed text:\n{text}\n"):
            assert part in asked


def test_a_judge_that_goes_away_leaves_what_is_measured(subject, task, judge, capsys):
    def leaving(prompt):
        if len(judge.prompts) > 2:
            raise ConnectionError
        return _verdict(prompt)

    judge.answer = leaving
    task = _judged(task, judge)
    (cell,) = task.cells(subject)
    found = numbers(task.measure(subject, cell, _ignore))
    assert found["unjudged"] == 4
    assert found["undecided"] + len(found["accuracy_by_item"]) == 2
    assert "bigram_support" in found
    assert found["judge_failures"]
    assert "4 of 6 texts are unjudged: " in capsys.readouterr().err
    assert len(judge.requests) == 2 + 3 * 3  # and then it is asked no more
    judge.close()
    found = numbers(task.measure(subject, cell, _ignore))
    assert (found["unjudged"], found["items"]) == (6, 6)
    assert "accuracy" not in found


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It says so.\nConclusion: True", True),
        ("It does not.\n\n**Conclusion: False**\n", False),
        ("**Conclusion:** true.", True),
        ("  _CONCLUSION_ : `False`  \nmore", False),
        ("Conclusion: True\nso\nConclusion: True", True),
        ("Conclusion: True\nConclusion: False", None),
        ("Conclusion: True or False", None),
        ("My conclusion: True", None),
        ("Conclusion: True2", None),
        ("Conclusion:\nTrue", None),
        ("Conclusion: not False", None),
        ("", None),
        (None, None),  # as when all tokens went into thought
    ],
)
def test_a_conclusion_is_read_strictly(judge, reply, verdict):
    judge.answer = lambda prompt: served.completion(reply)
    found = _ask(judge)
    assert found.get("accuracy") == verdict
    assert (found["undecided"], found["unjudged"]) == (int(verdict is None), 0)


def _ask(server, *prompts, **changes):
    config = JudgeConfig(endpoint=server.url, model="gpt-x", **changes)
    return Judge(config).verdicts(prompts or ["one"])


def test_a_server_is_asked_at_temperature_0_with_its_key(judge, monkeypatch):
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")  # is the hub's
    judge.answer = lambda prompt: served.completion(f"{prompt} to sk-secret", model="x sk-secret")
    found = _ask(judge, "one", "two é", key_variable="MY_KEY", new_tokens=7)
    assert found["replies"] == ["one to [key]", "two é to [key]"]
    assert found["judged_by"] == ["x [key]"]
    _ask(judge, "three")
    (path, first, body), _, (_, last, _) = judge.requests
    assert path == "/v1/chat/completions"
    headers = [{key.lower(): value for key, value in one.items()} for one in (first, last)]
    assert [one["authorization"] for one in headers] == ["Bearer sk-secret", "Bearer none"]
    wanted = {"model": "gpt-x", "temperature": 0, "max_tokens": 7}
    assert {key: body[key] for key in wanted} == wanted
    assert body["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"error": {"message": "no sk-secret"}}, {}),
        (500, b"out of\nmemory", {}),
        (200, b"<html>hello", {}),
        (200, {"choices": []}, {}),
        (200, b"[" * 100_000, {}),
        (200, ["x"], {}),
        served.completion(float("nan")),
    ],
)
def test_what_a_server_does_wrong_is_counted_and_named(judge, monkeypatch, answer):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge.answer = lambda prompt: answer
    found = _ask(judge, key_variable="MY_KEY")
    assert (found["unjudged"], found["replies"]) == (1, [None])
    (failure,) = found["judge_failures"]
    assert "sk-secret" not in failure
    assert "\n" not in failure


def test_what_passes_is_tried_again(judge):
    failures = [503, 429]
    judge.answer = lambda prompt: (
        (failures.pop(), b"busy", {}) if failures else served.completion("Conclusion: True")
    )
    assert _ask(judge)["accuracy"] == 1
    assert len(judge.requests) == 3


URL = {"endpoint": "http://127.0.0.1:1/v1", "model": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**URL, "model": ""}, "a judge needs a judge.model and a judge.endpoint"),
        ({"model": "x"}, "a judge needs"),
        ({"timeout": 4.0}, "a judge needs"),
        ({**URL, "endpoint": "file:///etc/passwd"}, r"an http\(s\) URL"),
        ({**URL, "endpoint": "127.0.0.1:8000/v1"}, r"an http\(s\) URL"),
        ({**URL, "endpoint": "http://a b/v1"}, r"an http\(s\) URL"),
        ({**URL, "endpoint": "http://me:secret@x/v1"}, "without user and parameters"),
        ({**URL, "endpoint": "http://x/v1?key=secret"}, "without user and parameters"),
        ({**URL, "key_variable": "NO_SUCH_KEY"}, r"judge.key-variable: set \$NO_SUCH_KEY"),
        ({**URL, "timeout": 0.0}, "judge.timeout is 0.0: give a number above 0"),
        ({**URL, "new_tokens": 0}, "judge.new_tokens is 0"),
    ],
)
def test_refuses_options_that_cannot_work(changes, message):
    with pytest.raises(ClearheadError, match=message) as error:
        JudgeConfig(**changes).check()
    assert "secret" not in str(error.value)
